"""The store on PostgreSQL: the same protocol as on SQLite, for workers on several machines.

Time is the server's (`clock_timestamp()`), never the client's: leases, due times and windows of all
machines go by one clock.
"""
