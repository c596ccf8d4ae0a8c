"""The engine: what a worker does with messages. It imports core only.

Read `steps.py` first: receive, decode, claim, guard, run, finish, settle, in order.

Making the steps: `fetcher.py` (1 to 3), `executor.py` (4, 5), `settler.py` (6, 7), and `flow.py`
between them. `wiring.py` has the values that a worker is made of.
Around a handler: `handlers.py`, `context.py`, `guard.py`, `failures.py`, `patient_store.py`,
`deadlines.py`, `tracebacks.py`; in a child process `child_pool.py`, `child_runner.py`,
`child_protocol.py`.
The worker: `worker.py` (life cycle, lease), `lease.py`, `watchdog.py`, `outages.py`, `relays.py`,
`worker_relays.py`, `lost_copies.py`, `foreign_dead_letters.py`.
Sending: `sender.py`, `batcher.py`.
"""
