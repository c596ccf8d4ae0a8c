"""The engine: receive, decode, claim, guard, run, finish, settle. Imports core only.

`worker.py` one worker process · `fetcher.py` receive, decode, claim · `executor.py` guard and run ·
`settler.py` finish and settle · `batcher.py` natural batching · `lease.py` the sign of life ·
`context.py` what a handler sees · `patience.py` its writes while the store is away ·
`handlers.py` who handles what · `breaker.py` · `relays.py` ·
`isolation.py` handlers in child processes, `isolated.py` the child's side, `frames.py` their words.
"""
