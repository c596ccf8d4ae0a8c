"""One SQLite file that broker and store share. Each process has one writer thread for it.

| module         | what it does                                             |
|----------------|----------------------------------------------------------|
| `file.py`      | the writer thread and its group commit                   |
| `turnstile.py` | a fair write lock between processes                      |
| `holders.py`   | names the process that holds a lock                      |
| `witness.py`   | proves that no commit went missing                       |
| `wal.py`       | checkpoints, and warnings about a log that keeps growing |
| `wake.py`      | wakes other processes at once                            |
| `liveness.py`  | which workers are alive                                  |
| `timebase.py`  | moves due times when somebody sets the clock             |
| `rows.py`      | statements over many rows                                |
| `faults.py`    | translates errors of SQLite                              |
"""
