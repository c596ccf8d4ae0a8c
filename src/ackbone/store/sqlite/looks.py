"""What a worker that drains asks over and over: is anything left to do?

All history is in the table: each part is answered by an index. UNCOMMON repeats the words of a
partial one, or SQLite would not use it.
"""

from __future__ import annotations

from ackbone.store.stored import UNCOMMON

_OURS = "IN (SELECT value FROM json_each(?1))"
_SENT_OR_RUNNING = (
    f"EXISTS (SELECT 1 FROM messages WHERE queue {_OURS})"
    f" OR EXISTS (SELECT 1 FROM outbox WHERE queue_name {_OURS})"
    f" OR EXISTS (SELECT 1 FROM queue_executions WHERE status = 'running' AND subscription {_OURS})"
)
_AMONG = f"FROM queue_executions WHERE status IN ({{}}) AND {UNCOMMON} AND subscription {_OURS}"
_WAITING = _AMONG.format("'ready', 'queued', 'waiting_key', 'open'")
_READY = _AMONG.format("'ready'")
_BEHIND = _AMONG.format("'queued', 'waiting_key', 'open'")
BUSY = f"SELECT {_SENT_OR_RUNNING} OR EXISTS (SELECT 1 {_WAITING})"
"""Does anything of these subscriptions wait, run or come due later (parked messages aside)?"""
STUCK = (
    f"SELECT CASE WHEN {_SENT_OR_RUNNING} OR EXISTS (SELECT 1 {_READY}) THEN 0"
    f" ELSE (SELECT count(*) {_BEHIND}) END"
)
"""Where nothing is ready and nothing runs, a message that waits for its conversation or its key
waits for a parked one, or for one whose copy is with the broker."""
