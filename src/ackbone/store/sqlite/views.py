"""Rows as people see them: dead letters, tasks, effects, replies, ledger events, waiting messages.

All functions run on a reading connection. Searches without a tenant first ask which tenants there
are, so that they find by an index that begins with the tenant.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from ackbone.core.records import (
    DeadLetter,
    Effect,
    Found,
    LedgerEvent,
    LetterFilter,
    Reply,
    Task,
    Waiting,
)
from ackbone.store.seen import (
    HIGHEST,
    event_of_row,
    id_bytes,
    is_intact,
    letter_of_row,
    mapping,
    task_of_row,
    text_id,
)
from ackbone.store.stored import UNCOMMON

_LETTER = (
    "SELECT id, tenant_id, subscription, message_id, queue_name, event_name, reason, error,"
    " retry_count, state, failed_at, settled_at, replay_id, history, {} FROM dead_letters"
)
_WITH_BODY, _NO_BODY = "body, body_info, body_crc", "NULL, body_info, NULL"
_TASK = (
    "SELECT rowid, tenant_id, subscription, message_id, queue_name, event_name, status, held,"
    " worker_id, attempt, crashes, retry_count, priority, created_at, started_at, completed_at,"
    " due_at, expires_at, duration_ms, parked_kind, error_message, lane, idem_key, correlation_id,"
    " trace_id, history, result, {} FROM queue_executions"
)
_EVENT = (
    "SELECT rowid, created_at, event_type, tenant_id, subscription, task_id, worker_id, seq, data"
    " FROM event_log"
)
_REPLY = (
    "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, status, retry_count,"
    " created_at, last_attempt_at, last_error, in_doubt FROM deliveries"
)
_STATES = ("ready", "delayed", "taken")


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────


def letters(
    conn: sqlite3.Connection, where: LetterFilter, limit: int, before: str | None
) -> list[DeadLetter]:
    """Newest first, without bodies."""
    condition, values = _letter_condition(where)
    found = conn.execute(
        f"{_LETTER.format(_NO_BODY)} WHERE {condition} AND (?2 IS NULL OR id < ?2)"
        " ORDER BY id DESC LIMIT ?1",
        (limit, None if before is None else id_bytes(before), *values),
    )
    return [letter_of_row(row) for row in found]


def letter_ids(conn: sqlite3.Connection, where: LetterFilter, limit: int | None) -> list[str]:
    """Oldest first."""
    condition, values = _letter_condition(where)
    found = conn.execute(
        f"SELECT id FROM dead_letters WHERE {condition} AND ?2 IS NULL ORDER BY id LIMIT ?1",
        (-1 if limit is None else limit, None, *values),
    )
    return [text_id(row[0]) for row in found]


def _letter_condition(where: LetterFilter) -> tuple[str, tuple[Any, ...]]:
    condition = (
        "(?3 IS NULL OR queue_name = ?3) AND (?4 IS NULL OR reason = ?4)"
        " AND (?5 IS NULL OR tenant_id = ?5) AND (?6 IS NULL OR failed_at >= ?6)"
        " AND (?7 IS NULL OR state = ?7) AND (?8 IS NULL OR event_name = ?8)"
        " AND (?9 IS NULL OR instr(error, ?9) > 0) AND (?10 IS NULL OR failed_at < ?10)"
    )
    return condition, (
        where.queue, where.reason, where.tenant_id, where.since_us, where.state, where.type,
        where.error, where.before_us,
    )  # fmt: skip


def letters_by_id(conn: sqlite3.Connection, ids: Sequence[str]) -> list[DeadLetter]:
    """In this order."""
    one = f"{_LETTER.format(_WITH_BODY)} WHERE id = ?"
    found = [conn.execute(one, (id_bytes(each),)).fetchone() for each in ids]
    return [letter_of_row(row) for row in found if row is not None]


def letters_named(
    conn: sqlite3.Connection, name: str, tenant_id: str | None, limit: int
) -> list[DeadLetter]:
    """By letter id or message id; if none is called so, those whose id begins so."""
    head = f"{_LETTER.format(_WITH_BODY)} WHERE (?2 IS NULL OR tenant_id = ?2)"
    tail = " ORDER BY id DESC LIMIT ?3"
    exact = conn.execute(
        f"{head} AND (id = ?1 OR message_id = ?4){tail}",
        (id_bytes(name), tenant_id, limit, name),
    ).fetchall()
    if exact:
        return [letter_of_row(row) for row in exact]
    digits = name.replace("-", "").upper()
    found = conn.execute(
        f"{head} AND (message_id BETWEEN ?1 AND ?4 OR hex(id) BETWEEN ?5 AND ?6){tail}",
        (name, tenant_id, limit, name + HIGHEST, digits, digits + "G"),
    )
    return [letter_of_row(row) for row in found]


def letters_of(conn: sqlite3.Connection, tenant_id: str, message_id: str) -> list[DeadLetter]:
    """Dead letters of a message, and those that it was sent in the place of."""
    found = conn.execute(
        f"{_LETTER.format(_NO_BODY)} WHERE tenant_id = ?1 AND (message_id = ?2 OR replay_id = ?2)"
        " ORDER BY id",
        (tenant_id, message_id),
    )
    return [letter_of_row(row) for row in found]


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def parked(
    conn: sqlite3.Connection,
    queue: str | None,
    kind: str | None,
    tenant_id: str | None,
    limit: int,
    before: int | None,
) -> list[tuple[int, Task]]:
    # The second condition on status is the one of a partial index: with it, the index is used.
    found = conn.execute(
        f"{_TASK.format(_NO_BODY)} WHERE status = 'parked'"
        f" AND {UNCOMMON}"
        " AND (?1 IS NULL OR queue_name = ?1) AND (?2 IS NULL OR parked_kind = ?2)"
        " AND (?3 IS NULL OR tenant_id = ?3) AND (?4 IS NULL OR rowid < ?4)"
        " ORDER BY rowid DESC LIMIT ?5",
        (queue, kind, tenant_id, before, limit),
    )
    return [(row[0], task_of_row(row)) for row in found]


def tasks(conn: sqlite3.Connection, tenant_id: str | None, message_id: str) -> list[Task]:
    found: list[Task] = []
    for tenant in [tenant_id] if tenant_id is not None else _tenants(conn, "queue_executions"):
        rows = conn.execute(
            f"{_TASK.format(_WITH_BODY)} WHERE tenant_id = ? AND message_id = ? ORDER BY rowid",
            (tenant, message_id),
        )
        found += [task_of_row(row) for row in rows]
    return found


def tasks_like(
    conn: sqlite3.Connection, prefix: str, tenant_id: str | None, status: str | None, limit: int
) -> list[Task]:
    found: list[Task] = []
    for tenant in [tenant_id] if tenant_id is not None else _tenants(conn, "queue_executions"):
        rows = conn.execute(
            f"{_TASK.format(_NO_BODY)} WHERE tenant_id = ?1 AND message_id BETWEEN ?2 AND ?3"
            " AND (?4 IS NULL OR status = ?4) ORDER BY message_id LIMIT ?5",
            (tenant, prefix, prefix + HIGHEST, status, limit - len(found)),
        )
        found += [task_of_row(row) for row in rows]
    return found


def tasks_correlated(conn: sqlite3.Connection, correlation_id: str, limit: int) -> list[Task]:
    found = conn.execute(
        f"{_TASK.format(_NO_BODY)} WHERE correlation_id = ? ORDER BY rowid LIMIT ?",
        (correlation_id, limit),
    )
    return [task_of_row(row) for row in found]


# ── searches ─────────────────────────────────────────────────────────────────────────────────────


def find(conn: sqlite3.Connection, name: str, tenant_id: str | None, limit: int) -> list[Found]:
    """Messages called so, else those whose id begins so, else those that belong to it."""
    sources = {"queue_executions": "message_id", "event_log": "task_id"}
    for by, high in (("id", name), ("prefix", name + HIGHEST)):
        found: dict[tuple[str, str], Found] = {}
        for table, column in sources.items():
            for tenant in [tenant_id] if tenant_id is not None else _tenants(conn, table):
                rows = conn.execute(
                    f"SELECT DISTINCT {column} FROM {table} WHERE tenant_id = ? AND {column}"
                    " BETWEEN ? AND ? LIMIT ?",
                    (tenant, name, high, limit),
                )
                for (message_id,) in rows:
                    key = (tenant, message_id)
                    found[key] = Found(tenant_id=tenant, message_id=message_id, by=by)
        if found:
            return sorted(found.values(), key=lambda each: each.message_id)[:limit]
    rows = conn.execute(
        "SELECT tenant_id, message_id, CASE ?1 WHEN correlation_id THEN 'correlation id'"
        " WHEN trace_id THEN 'trace id' ELSE 'idempotency key' END FROM queue_executions"
        " WHERE (correlation_id = ?1 OR trace_id = ?1 OR idem_key = ?1)"
        " AND (?2 IS NULL OR tenant_id = ?2) ORDER BY rowid LIMIT ?3",
        (name, tenant_id, limit),
    )
    return [Found(tenant_id=t, message_id=m, by=by) for t, m, by in rows]


def _tenants(conn: sqlite3.Connection, table: str) -> list[str]:
    """The tenants of a table, by as many steps through its index as there are tenants."""
    found = conn.execute(
        f"WITH RECURSIVE t (name) AS (SELECT min(tenant_id) FROM {table} UNION ALL SELECT"
        f" (SELECT min(tenant_id) FROM {table} WHERE tenant_id > t.name) FROM t"
        " WHERE t.name IS NOT NULL) SELECT name FROM t WHERE name IS NOT NULL"
    )
    return [name for (name,) in found]


# ── what belongs to a message ────────────────────────────────────────────────────────────────────


def events_of(conn: sqlite3.Connection, tenant_id: str, message_id: str) -> list[LedgerEvent]:
    found = conn.execute(
        f"{_EVENT} WHERE tenant_id = ? AND task_id = ? ORDER BY rowid", (tenant_id, message_id)
    )
    return [event_of_row(row) for row in found]


def events_after(
    conn: sqlite3.Connection, position: int, limit: int, since_us: int | None
) -> list[LedgerEvent]:
    if since_us is not None:
        position = max(position, position_of(conn, since_us) - 1)
    found = conn.execute(f"{_EVENT} WHERE rowid > ? ORDER BY rowid LIMIT ?", (position, limit))
    return [event_of_row(row) for row in found]


def last_position(conn: sqlite3.Connection, back: int) -> int:
    found: int | None = conn.execute("SELECT max(rowid) FROM event_log").fetchone()[0]
    return max(0, (found or 0) - back)


def position_of(conn: sqlite3.Connection, since_us: int) -> int:
    """The first event from a time on, by halving: the ledger grows in the order of time."""
    low, high = 1, last_position(conn, 0) + 1
    while low < high:
        middle = (low + high) // 2
        row = conn.execute(
            "SELECT rowid, created_at FROM event_log WHERE rowid >= ? ORDER BY rowid LIMIT 1",
            (middle,),
        ).fetchone()
        if row is not None and row[1] < since_us:
            low = row[0] + 1
        else:
            high = middle
    return low


def effects_of(conn: sqlite3.Connection, tenant_id: str, message_id: str) -> list[Effect]:
    found = conn.execute(
        "SELECT name, state, value, worker_id, created_at, done_at FROM effects"
        " WHERE tenant_id = ? AND message_id = ? ORDER BY created_at, name",
        (tenant_id, message_id),
    )
    return [
        Effect(name=n, state=s, value=v, worker_id=w, begun_at_us=begun, done_at_us=done)
        for n, s, v, w, begun, done in found
    ]


def replies_of(conn: sqlite3.Connection, tenant_id: str, message_id: str) -> list[Reply]:
    found = conn.execute(
        f"{_REPLY} WHERE tenant_id = ? AND task_id = ? ORDER BY created_at, id",
        (tenant_id, message_id),
    )
    names = Reply.__struct_fields__
    return [Reply(**dict(zip(names, (*row, bool(doubt)), strict=True))) for *row, doubt in found]


def waiting_with(conn: sqlite3.Connection, text: str, limit: int) -> list[Waiting]:
    """Messages of the embedded queue, by id or by any text in their body."""
    rows = conn.execute(
        "SELECT queue, message_id, state, priority, lane, sent_at, due_at, expires_at, headers,"
        " body, body_crc FROM messages WHERE message_id = ?1 OR instr(body, ?2) > 0"
        " ORDER BY message_id <> ?1, seq LIMIT ?3",
        (text, text.encode("utf-8", "surrogatepass"), limit),
    )
    return [
        Waiting(
            queue=queue,
            message_id=message_id,
            state=_STATES[state],
            priority=priority,
            ordering_key=lane,
            sent_at_us=sent,
            due_at_us=due,
            expires_at_us=expires,
            headers=mapping(headers),
            body=body,
            intact=is_intact(body, crc),
        )
        for queue, message_id, state, priority, lane, sent, due, expires, headers, body, crc in rows
    ]


# ── values ───────────────────────────────────────────────────────────────────────────────────────
