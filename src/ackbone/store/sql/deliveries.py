"""Statements of `ackbone.store.deliveries` and `delivery_operations`."""

from __future__ import annotations

import msgspec

from ackbone.core.outbound.settling import AGREED
from ackbone.store.delivery_rows import LIVE

DUE_REPLY = (
    "d.id, d.tenant_id, d.channel, d.recipient, d.conversation, d.task_id, d.options::text,"
    " {calls}, d.retry_count, d.max_retries, d.in_doubt, d.subscription, d.lane, d.priority,"
    " us(d.expires_at), us(d.created_at)"
)
_IDS = "id = ANY($1::text[])"
_RETRIED_FROM = "status IN ('failed', 'unknown', 'pending')"
# Retrying a delivery whose arrival is unknown is an operator's consent to a repeat.
_AGREES = f"in_doubt = CASE status WHEN 'unknown' THEN {AGREED} ELSE in_doubt END"
_CHANGED_IN = "status IN ('pending', 'queued', 'failed', 'unknown')"
_ACTED = "RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), channel, lane"
RECORD = (
    "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, conversation,"
    " priority, status, retry_count, max_retries, calls, resent, in_doubt, receipts::text,"
    " options::text, us(due_at), us(created_at), us(expires_at), us(last_attempt_at), last_error"
    " FROM deliveries"
)
_FILTER = (
    " WHERE ($1::text IS NULL OR status = $1) AND ($2::text IS NULL OR channel = $2)"
    " AND ($3::text IS NULL OR tenant_id = $3) AND ($4::bigint IS NULL OR created_at >= at($4))"
)
OF_TENANT = "($2::text IS NULL OR tenant_id = $2) ORDER BY id LIMIT $3::bigint"


class DeliveriesSql(msgspec.Struct, frozen=True, kw_only=True):
    """`reply` stands for the columns that `due_reply` reads."""

    levels: str
    """channels, prefix of paused channels, now → channel, priority, due_at of its first pending
    delivery, now; the database's own time where none is given"""
    due: str = (
        f"SELECT {DUE_REPLY.format(calls='d.calls')},"
        f" NOT EXISTS (SELECT 1 FROM deliveries e WHERE e.lane = d.lane AND e.{LIVE}"
        " AND placed(e.seq) < placed(d.seq)) AND NOT EXISTS (SELECT 1 FROM deliveries s"
        " WHERE s.lane = d.lane AND s.status = 'sending') FROM deliveries d WHERE d.channel = $1"
        " AND d.status = 'pending' AND d.priority = $2::int AND d.due_at <= at($3)"
        " ORDER BY d.due_at, placed(d.seq) LIMIT $4::int"
    )
    """channel, priority, now, limit → reply, the oldest first"""
    behind: str
    """id, worker_id and call of a delivery that is being sent, limit → reply and content of the
    next ones in its lane"""
    grant: str = (
        "UPDATE deliveries SET status = 'sending', worker_id = $2::bigint,"
        " last_attempt_at = at($3),"
        f" calls = calls + 1, put_off_by = NULL WHERE {_IDS} RETURNING id, content, receipts::text"
    )
    """ids, worker_id, now → id, content, receipts"""
    queue: str = f"UPDATE deliveries SET status = 'queued' WHERE {_IDS}"
    """ids"""
    expire: str = f"UPDATE deliveries SET status = 'failed', last_error = $2 WHERE {_IDS}"
    """ids, error"""
    promote: str
    """lanes, now → a row for each lane whose next delivery is due now"""
    free: str
    """key of a window, now, limit → a row for each delivery that it put off and that is due now"""
    orphans: str = (
        "SELECT id, calls, coalesce(us(last_attempt_at), 0), in_doubt, channel, tenant_id,"
        " coalesce(subscription, ''), coalesce(task_id, '') FROM deliveries"
        " WHERE status = 'sending' AND (worker_id IS NULL OR (worker_id <> $1::bigint AND worker_id"
        " NOT IN (SELECT worker_id FROM workers WHERE state IN ('alive', 'leaving'))))"
        " LIMIT $2::bigint"
    )
    """worker_id, limit → the columns of `Orphan`: other workers were sending them and are gone"""
    take_back: str = (
        "UPDATE deliveries SET status = 'pending', due_at = at($2),"
        f" resent = resent + (in_doubt > 0)::int, in_doubt = 1, last_error = $3 WHERE {_IDS}"
    )
    """ids, now, error: they are due again, in doubt"""
    windows: str = "SELECT key, state::text FROM send_windows WHERE key = ANY($1::text[])"
    """keys → key, state"""
    counting_windows: str = "SELECT key, state::text FROM send_windows WHERE ends_at > at($1)"
    """now → key, state of the windows that end later"""

    pause: str = "INSERT INTO roles (role) VALUES ($1) ON CONFLICT (role) DO NOTHING RETURNING 1"
    """role → a row if it was not there"""
    unpause: str = "DELETE FROM roles WHERE role = $1 RETURNING 1"
    """role → a row if it was there"""
    paused: str = "SELECT role FROM roles WHERE starts_with(role, $1)"
    """prefix → the roles that begin with it"""
    retry: str = (
        "UPDATE deliveries SET status = 'pending', due_at = at($2), retry_count = 0,"
        f" last_attempt_at = NULL, expires_at = NULL, {_AGREES} WHERE id = $1 AND {_RETRIED_FROM}"
        f" {_ACTED}"
    )
    """id, now → tenant, subscription, task, channel, lane"""
    edit: str = (
        "UPDATE deliveries SET content = $2 WHERE id = $1 AND receipts IS NULL"
        f" AND {_CHANGED_IN} {_ACTED}"
    )
    """id, content → the same"""
    discard: str = (
        "UPDATE deliveries SET status = 'discarded', due_at = at($2)"
        f" WHERE id = $1 AND {_CHANGED_IN} {_ACTED}"
    )
    """id, now → the same"""
    state: str = "SELECT status, receipts IS NOT NULL FROM deliveries WHERE id = $1"
    """id → status, whether a part was sent"""
    records: str = f"{RECORD}{_FILTER} ORDER BY placed(seq) DESC LIMIT $5::bigint"
    """status, channel, tenant, since, limit → the columns of `DeliveryRecord`, newest first"""
    ids: str = f"SELECT id FROM deliveries{_FILTER} ORDER BY placed(seq) LIMIT $5::bigint"
    """the same → id, oldest first"""
    named: str = f"{RECORD} WHERE id = $1 AND {OF_TENANT}"
    """id, tenant, limit → the columns of `DeliveryRecord`"""
    beginning: str = f"{RECORD} WHERE starts_with(id, $1) AND {OF_TENANT}"
    """beginning of an id, tenant, limit → the same"""
