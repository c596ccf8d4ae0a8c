"""What relays ask now and then: is there something to do for them?"""

from __future__ import annotations

from holdfast.store.stored import none_of

from .tasks import NOW

TO_CANCEL = (
    "SELECT tenant_id, subscription, message_id FROM queue_executions"
    " WHERE worker_id = $1::bigint AND status = 'running' AND cancel_at IS NOT NULL"
)
SUSPECTS = (
    "SELECT DISTINCT subscription, event_name FROM queue_executions WHERE status = 'ready'"
    " AND crashes >= $2::int AND subscription = ANY($1::text[]) AND priority IN (0, 1, 2, 3)"
    f" AND due_at <= {NOW}"
)
WAITS_FOR_KEY = "SELECT 1 FROM queue_executions WHERE status = 'waiting_key' LIMIT 1"
PAUSED = "SELECT subscription FROM sources WHERE paused_at IS NOT NULL"
BUSY = (
    "SELECT EXISTS (SELECT 1 FROM outbox WHERE queue_name = ANY($1::text[]))"
    " OR EXISTS (SELECT 1 FROM queue_executions WHERE status = 'running'"
    " AND subscription = ANY($1::text[])) OR EXISTS (SELECT 1 FROM queue_executions"
    " WHERE status IN ('ready', 'queued', 'waiting_key', 'open')"
    f" AND {none_of('running', 'succeeded', 'duplicate')} AND subscription = ANY($1::text[]))"
)
"""Does anything of these subscriptions wait, run or come due later (parked messages aside)?"""
