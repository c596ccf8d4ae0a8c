"""One SQLite file, shared by broker and store: one writer thread per process, fair to others.

`file.py` the writer thread and its group commit · `turnstile.py` whose turn it is to write ·
`witness.py` proof that no commit went missing · `wake.py` telling other processes at once ·
`liveness.py` which workers are alive · `timebase.py` due times when the clock is set · `rows.py`
statements over many rows · `recovery.py` a refused file, looked at and mended.
"""
