"""The store on SQLite: hand SQL inside the writer thread's transactions.

`claims.py` who may run what · `finish.py` what became of it · `reaper.py` dead workers ·
`ledger.py` the chained event log · `effects.py` writes of a run before its end ·
`letters.py` dead letters · `store.py` the class that the engine sees.
"""
