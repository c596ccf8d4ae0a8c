"""What relays ask now and then: is there something to do for them?"""

from __future__ import annotations

from holdfast.store.crash import ALONE_AT, SUSPECT_AT
from holdfast.store.stored import none_of

from .tasks import NOW

TO_CANCEL = (
    "SELECT tenant_id, subscription, message_id FROM queue_executions"
    " WHERE worker_id = $1::bigint AND status = 'running' AND cancel_at IS NOT NULL"
)
SUSPECTS = (
    f"SELECT count(*) FILTER (WHERE crashes < {ALONE_AT}),"
    f" count(*) FILTER (WHERE crashes >= {ALONE_AT}) FROM (SELECT crashes FROM queue_executions"
    f" WHERE status = 'ready' AND crashes >= {SUSPECT_AT} AND subscription = ANY($1::text[])"
    f" AND priority IN (0, 1, 2, 3) AND due_at <= {NOW} LIMIT 1000) s"
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
