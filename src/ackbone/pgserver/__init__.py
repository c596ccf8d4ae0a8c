"""One PostgreSQL server as broker and store use it.

| module           | what it does                                                       |
|------------------|--------------------------------------------------------------------|
| `address.py`     | the URL                                                            |
| `connections.py` | connections, single statements, connections that were lost         |
| `wake.py`        | wake-ups for other processes by NOTIFY                             |
| `arrays.py`      | a batch as a few array literals                                    |
| `failures.py`    | translates errors of the driver                                    |
"""
