"""Statements of `ackbone.store.claims` and `dead_on_arrival`."""

from ackbone.store.conditions import ENDED, UNENDED, none_of
from ackbone.store.postgres.arrays import moment
from ackbone.store.statements import ClaimsSql

from .operations import TASK

_GIVEN_BACK = "worker_id = NULL, attempt = attempt - 1"
_NEXT_LANE = (
    "SELECT {0}tenant_id, {0}subscription, {0}lane FROM queue_executions {1}"
    " WHERE {0}lane IS NOT NULL AND {2}{3} ORDER BY {0}tenant_id, {0}subscription, {0}lane LIMIT 1"
)


def _task(assignments: str, condition: str = "") -> str:
    return f"UPDATE queue_executions SET {assignments} WHERE {TASK}{condition}"


CLAIMS = ClaimsSql(
    hold=_task(
        "held = 'store', body = $4::bytea, body_info = $5::json, body_crc = $6::bigint",
        " AND held = 'broker'",
    ),
    keep=_task(f"status = 'ready', due_at = {moment('$4::bigint')}", " AND status = 'open'"),
    count_failures=_task("attempt = $4::int, retry_count = $5::int"),
    found_again=_task("lost_by = NULL"),
    wait_for_key=_task(f"status = 'waiting_key', {_GIVEN_BACK}"),
    pass_on=_task(
        f"status = 'ready', due_at = least(due_at, {moment('$4::bigint')}), {_GIVEN_BACK}"
    ),
    park=_task(f"status = 'parked', parked_kind = $4, error_message = $5, {_GIVEN_BACK}"),
    put_off=_task(
        f"status = 'ready', due_at = {moment('$4::bigint')}, error_message = $5, {_GIVEN_BACK}"
    ),
    expire=_task(
        f"status = 'expired', completed_at = {moment('$4::bigint')}, body = NULL,"
        " error_message = 'expired before it could run'"
    ),
    fail=_task(
        f"status = 'failed', completed_at = {moment('$5::bigint')}, error_message = $4, body = NULL"
    ),
    known_hash=f"SELECT body_sha256 FROM queue_executions WHERE {TASK}",
    dead_on_arrival=(
        "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name,"
        " event_name, status, held, worker_id, started_at, completed_at, error_message,"
        " body_sha256) VALUES ($1::uuid, $2, $3, $4, $5, $6, 'failed', 'store', $7::bigint,"
        f" {moment('$8::bigint')}, {moment('$8::bigint')}, $9, $10::bytea)"
        " ON CONFLICT (tenant_id, subscription, message_id) DO NOTHING RETURNING 1"
    ),
    complete_letter=(
        "UPDATE dead_letters SET body = $4::bytea, body_info = $5::json, body_crc = $6::bigint"
        f" WHERE {TASK} AND body IS NULL"
    ),
    unresolved="SELECT 1 FROM queue_executions WHERE status = 'waiting_key' LIMIT 1",
    stuck=(
        # From lane to lane through the index, however many messages wait in each.
        "WITH RECURSIVE lanes (tenant_id, subscription, lane) AS ("
        f"({_NEXT_LANE.format('', '', UNENDED, '')}) UNION ALL SELECT n.* FROM lanes l"
        " CROSS JOIN LATERAL ("
        + _NEXT_LANE.format(
            "m.",
            "m",
            none_of(*ENDED, column="m.status"),
            " AND (m.tenant_id, m.subscription, m.lane) > (l.tenant_id, l.subscription, l.lane)",
        )
        + ") n) SELECT l.tenant_id, l.subscription, l.lane FROM lanes l CROSS JOIN LATERAL ("
        "SELECT f.status FROM queue_executions f WHERE f.tenant_id = l.tenant_id"
        " AND f.subscription = l.subscription AND f.lane = l.lane AND f.lane IS NOT NULL"
        f" AND {none_of(*ENDED, column='f.status')} ORDER BY f.lane_seq LIMIT 1) h"
        " WHERE h.status = 'queued'"
    ),
)
