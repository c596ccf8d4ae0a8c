"""Use cases of the people who operate ackbone: no terminal, no SQL, only values and ports.

`dead_letters.py` · `parked.py` · `queues.py` · `trace.py` (the life of one message) · `tail.py` ·
`stats.py` · `sending.py` (files of messages) · `doctor.py` · `bodies.py` (stored bytes, read again)
"""
