"""Queue triggers: messages of foreign queues start agent runs.

`QueueTrigger` itself is in `ackbone/queue_trigger.py`, because it names a concrete store.
"""
