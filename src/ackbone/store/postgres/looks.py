"""What relays ask now and then: is there something to do for them?"""

from __future__ import annotations

from ackbone.store.crash import ALONE_AT, SUSPECT_AT
from ackbone.store.stored import UNCOMMON

from .tasks import NOW

TO_CANCEL = (
    "SELECT tenant_id, subscription, message_id FROM queue_executions"
    " WHERE worker_id = $1::bigint AND status = 'running' AND cancel_at IS NOT NULL"
)
SUSPECTS = (
    f"SELECT subscription, event_name, count(*) FILTER (WHERE crashes < {ALONE_AT}),"
    f" count(*) FILTER (WHERE crashes >= {ALONE_AT}) FROM (SELECT subscription, event_name, crashes"
    f" FROM queue_executions WHERE status = 'ready' AND crashes >= {SUSPECT_AT}"
    f" AND subscription = ANY($1::text[]) AND priority IN (0, 1, 2, 3) AND due_at <= {NOW}"
    " LIMIT 1000) s GROUP BY 1, 2"
)
WAITS_FOR_KEY = "SELECT 1 FROM queue_executions WHERE status = 'waiting_key' LIMIT 1"
PAUSED = "SELECT subscription FROM sources WHERE paused_at IS NOT NULL"
_OURS = "subscription = ANY($1::text[])"
_SENT_OR_RUNNING = (
    "EXISTS (SELECT 1 FROM outbox WHERE queue_name = ANY($1::text[]))"
    f" OR EXISTS (SELECT 1 FROM queue_executions WHERE status = 'running' AND {_OURS})"
)
_AMONG = f"FROM queue_executions WHERE status IN ({{}}) AND {UNCOMMON} AND {_OURS}"
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
