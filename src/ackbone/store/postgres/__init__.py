"""The store on PostgreSQL: the same protocol as on SQLite, for workers on several machines.

Due times and windows of all machines go by one clock, the server's (`clock_timestamp()`);
`timebase.py` says what happens when that is set. Who is alive goes by steady clocks alone
(`leases.py`).
"""
