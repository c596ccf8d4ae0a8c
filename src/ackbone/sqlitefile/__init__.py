"""One SQLite file that broker and store share. Each process has one writer thread for it.

| module        | what it does                                                            |
|---------------|-------------------------------------------------------------------------|
| `file.py`     | the writer thread and its group commit                                  |
| `sharing.py`  | between processes: turns to write, lock holders, living workers, wake-ups |
| `wal.py`      | checkpoints, a log that keeps growing, and proof that no commit is lost |
| `timebase.py` | moves due times when somebody sets the clock                            |
| `rows.py`     | statements over many rows                                               |
| `faults.py`   | translates errors of SQLite                                             |
"""
