"""Statements of `ackbone.store.claims` and `dead_on_arrival`."""

from ackbone.store.conditions import UNENDED
from ackbone.store.statements import ClaimsSql

from .operations import TASK

_GIVEN_BACK = "worker_id = NULL, attempt = attempt - 1"


def _task(assignments: str, condition: str = "") -> str:
    return f"UPDATE queue_executions SET {assignments} WHERE {TASK}{condition}"


CLAIMS = ClaimsSql(
    hold=_task(
        "held = 'store', body = ?4, body_info = ?5, body_crc = ?6",
        " AND held = 'broker'",
    ),
    keep=_task("status = 'ready', due_at = ?4", " AND status = 'open'"),
    count_failures=_task("attempt = ?4, retry_count = ?5"),
    found_again=_task("lost_by = NULL"),
    wait_for_key=_task(f"status = 'waiting_key', {_GIVEN_BACK}"),
    pass_on=_task(f"status = 'ready', due_at = min(coalesce(due_at, ?4), ?4), {_GIVEN_BACK}"),
    park=_task(f"status = 'parked', parked_kind = ?4, error_message = ?5, {_GIVEN_BACK}"),
    put_off=_task(f"status = 'ready', due_at = ?4, error_message = ?5, {_GIVEN_BACK}"),
    expire=_task(
        "status = 'expired', completed_at = ?4, body = NULL,"
        " error_message = 'expired before it could run'"
    ),
    fail=_task("status = 'failed', completed_at = ?5, error_message = ?4, body = NULL"),
    known_hash=f"SELECT body_sha256 FROM queue_executions WHERE {TASK}",
    dead_on_arrival=(
        "INSERT OR IGNORE INTO queue_executions (id, tenant_id, subscription, message_id,"
        " queue_name, event_name, status, held, worker_id, started_at, completed_at,"
        " error_message, body_sha256)"
        " VALUES (id_of(?1), ?2, ?3, ?4, ?5, ?6, 'failed', 'store', ?7, ?8, ?8, ?9, ?10)"
        " RETURNING 1"
    ),
    complete_letter=(
        f"UPDATE dead_letters SET body = ?4, body_info = ?5, body_crc = ?6 WHERE {TASK}"
        " AND body IS NULL"
    ),
    unresolved=(
        "SELECT 1 FROM queue_executions w LEFT JOIN idempotency_keys k"
        " ON k.tenant_id = w.tenant_id AND k.subscription = w.subscription AND k.key = w.idem_key"
        " WHERE w.status = 'waiting_key' AND (k.state IS NULL OR k.state = 'done') LIMIT 1"
    ),
    stuck=(
        "SELECT tenant_id, subscription, lane FROM (SELECT tenant_id, subscription, lane, status,"
        f" min(lane_seq) FROM queue_executions WHERE {UNENDED}"
        " AND lane IS NOT NULL GROUP BY tenant_id, subscription, lane) WHERE status = 'queued'"
    ),
)
