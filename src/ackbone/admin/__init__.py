"""Actions of operators, over values and ports: no terminal and no SQL.

`dead_letters.py` · `parked.py` · `approvals.py` · `deliveries.py` · `queues.py` · `stats.py` ·
`trace.py` (the life of one message) · `tail.py` (the ledger) · `sending.py` (files of messages) ·
`doctor.py` · `bodies.py` (decode stored bodies)
"""
