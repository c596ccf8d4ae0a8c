"""Statements on replies and on the windows of their limits. Each runs inside a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from ackbone.core import parcels
from ackbone.core.delivery import Outbound
from ackbone.core.parcels import (
    EXPIRED,
    FREED,
    SENDER_DIED,
    Ended,
    Ending,
    Orphan,
    Parcel,
    PutOff,
    Windows,
)
from ackbone.store.parcel_rows import LIVE, PAUSED, parcel_of

LEVEL = (
    "SELECT priority, due_at FROM deliveries WHERE channel = ? AND status = 'pending'"
    " AND priority < ? ORDER BY priority DESC, due_at LIMIT 1"
)
DUE = (
    "SELECT d.id, d.tenant_id, d.channel, d.recipient, d.conversation, d.task_id, d.options,"
    " d.calls, d.retry_count, d.max_retries, d.in_doubt, d.subscription, d.lane, d.priority,"
    " d.expires_at, d.created_at,"
    f" NOT EXISTS (SELECT 1 FROM deliveries e WHERE e.lane = d.lane AND e.{LIVE}"
    " AND e.rowid < d.rowid) AND NOT EXISTS (SELECT 1 FROM deliveries s WHERE s.lane = d.lane"
    " AND s.status = 'sending') FROM deliveries d WHERE d.channel = ? AND d.status = 'pending'"
    " AND d.priority = ? AND d.due_at <= ? ORDER BY d.due_at, d.rowid LIMIT ?"
)
GRANT = (
    "UPDATE deliveries SET status = 'sending', worker_id = ?, last_attempt_at = ?,"
    " calls = calls + 1, put_off_by = NULL WHERE id = ? RETURNING content, receipts"
)
BEHIND = (
    "SELECT d.id, d.tenant_id, d.channel, d.recipient, d.conversation, d.task_id, d.options,"
    " d.calls, d.retry_count, d.max_retries, d.in_doubt, d.subscription, d.lane, d.priority,"
    " d.expires_at, d.created_at,"
    " 0, d.content FROM deliveries h CROSS JOIN deliveries d"
    " WHERE h.id = ?1 AND h.status = 'sending' AND h.worker_id = ?2 AND h.calls = ?3"
    f" AND d.lane = h.lane AND d.{LIVE} AND d.rowid > h.rowid ORDER BY d.rowid LIMIT ?4"
)
END = (
    "UPDATE deliveries SET status = ?1, last_error = ?2, due_at = coalesce(?3, due_at),"
    " retry_count = coalesce(retry_count + ?4, 0), in_doubt = coalesce(?5, in_doubt),"
    " receipts = CASE WHEN ?6 IS NULL THEN receipts"
    " ELSE json_insert(coalesce(receipts, '[]'), '$[#]', ?6) END,"
    " resent = resent + ?7"
    " WHERE id = ?8 AND status = 'sending' AND worker_id = ?9 AND calls = ?10"
    " RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), lane, retry_count,"
    " coalesce(json_array_length(receipts), 0)"
)
PROMOTE = (
    "UPDATE deliveries SET status = 'pending', due_at = ?2 WHERE rowid = (SELECT rowid"
    f" FROM deliveries WHERE lane = ?1 AND {LIVE} AND status = 'queued' ORDER BY rowid LIMIT 1)"
)
FREE = (
    "UPDATE deliveries SET due_at = ?2, put_off_by = NULL WHERE rowid IN (SELECT rowid FROM"
    " deliveries WHERE put_off_by = ?1 AND status = 'pending' ORDER BY priority DESC, rowid"
    " LIMIT ?3)"
)
_GONE = (
    "status = 'sending' AND (worker_id IS NULL OR (worker_id <> ?1 AND worker_id NOT IN"
    " (SELECT worker_id FROM workers WHERE state IN ('alive', 'leaving'))))"
)
ORPHANS = (
    "SELECT id, calls, coalesce(last_attempt_at, 0), in_doubt, channel, tenant_id,"
    f" coalesce(subscription, ''), coalesce(task_id, '') FROM deliveries WHERE {_GONE} LIMIT ?2"
)
TAKE_BACK = (
    "UPDATE deliveries SET status = 'pending', due_at = ?, resent = resent + (in_doubt > 0),"
    " in_doubt = 1, last_error = ? WHERE id IN (SELECT value FROM json_each(?))"
)
_SAVE = (
    "INSERT INTO send_windows (key, state, ends_at) VALUES (?, ?, ?) ON CONFLICT (key)"
    " DO UPDATE SET state = excluded.state, ends_at = excluded.ends_at"
)
_IDS = "id IN (SELECT value FROM json_each(?))"
_ABOVE_ALL = 1 << 62


def unpaused(conn: sqlite3.Connection, channels: Iterable[str]) -> list[str]:
    paused = {
        role.removeprefix(PAUSED)
        for (role,) in conn.execute("SELECT role FROM roles WHERE role GLOB ?", (f"{PAUSED}*",))
    }
    return [channel for channel in channels if channel not in paused]


def levels(conn: sqlite3.Connection, channel: str) -> list[tuple[int, int]]:
    """The priorities of what waits, the urgent first, and when the first of each is due."""
    found: list[tuple[int, int]] = []
    priority = _ABOVE_ALL
    while row := conn.execute(LEVEL, (channel, priority)).fetchone():
        priority = row[0]
        found.append((row[0], row[1]))
    return found


def page(
    conn: sqlite3.Connection, channel: str, priority: int, now_us: int, limit: int
) -> list[Parcel]:
    """What is due, the oldest first."""
    found = conn.execute(DUE, (channel, priority, now_us, limit)).fetchall()
    return [parcel_of(row) for row in found]


def grant(
    conn: sqlite3.Connection, delivery_id: str, worker_id: int, now_us: int
) -> tuple[str, str | None]:
    """It is being sent; returns its content and its receipts."""
    content, receipts = conn.execute(GRANT, (worker_id, now_us, delivery_id)).fetchone()
    return content, receipts


def behind(
    conn: sqlite3.Connection, head: Outbound, worker_id: int, limit: int
) -> list[tuple[Parcel, str]]:
    """What stands behind a reply that is this worker's, in order, with the contents."""
    found = conn.execute(BEHIND, (head.id, worker_id, head.call, limit)).fetchall()
    return [(parcel_of(row), content) for *row, content in found]


def queue(conn: sqlite3.Connection, found: Sequence[Parcel]) -> None:
    if found:
        conn.execute(f"UPDATE deliveries SET status = 'queued' WHERE {_IDS}", (_ids(found),))


def put_off(conn: sqlite3.Connection, found: Sequence[PutOff]) -> None:
    conn.executemany(
        "UPDATE deliveries SET due_at = ?, put_off_by = ? WHERE id = ?",
        [(each.until_us, each.by, each.parcel.reply.id) for each in found],
    )


def free(conn: sqlite3.Connection, keys: Iterable[str], now_us: int) -> set[str]:
    """What was put off by these windows is due now, the urgent and the oldest first; returns those
    by which more may be put off."""
    return {key for key in keys if conn.execute(FREE, (key, now_us, FREED)).rowcount == FREED}


def expire(conn: sqlite3.Connection, found: Sequence[Parcel]) -> None:
    if found:
        conn.execute(
            f"UPDATE deliveries SET status = 'failed', last_error = ? WHERE {_IDS}",
            (EXPIRED, _ids(found)),
        )


def end(conn: sqlite3.Connection, ending: Ending, worker_id: int, now_us: int) -> Ended | None:
    """None: the row is not this attempt's any more."""
    found = conn.execute(
        END,
        (
            ending.status,
            ending.error,
            None if ending.wait_us is None else now_us + ending.wait_us,
            ending.retries,
            ending.in_doubt,
            ending.receipt,
            ending.resent,
            ending.id,
            worker_id,
            ending.call,
        ),
    ).fetchone()
    return None if found is None else Ended(*found)


def promote(conn: sqlite3.Connection, lanes: Iterable[str | None], now_us: int) -> bool:
    """The next of these lanes are due now; False if nobody stood there."""
    moved = 0
    for lane in dict.fromkeys(lanes):
        if lane is not None:
            moved += conn.execute(PROMOTE, (lane, now_us)).rowcount
    return moved > 0


def has_orphans(conn: sqlite3.Connection, me: int) -> bool:
    return conn.execute(ORPHANS, (me, 1)).fetchone() is not None


def take_back(conn: sqlite3.Connection, me: int, now_us: int) -> list[Orphan]:
    """What dead workers were sending is due again, in doubt; returns it as it was."""
    found = [Orphan(*row) for row in conn.execute(ORPHANS, (me, -1))]
    ids = msgspec.json.encode([each.id for each in found]).decode()
    conn.execute(TAKE_BACK, (now_us, SENDER_DIED, ids))
    return found


# -- windows --------------------------------------------------------------------------------------


def windows(conn: sqlite3.Connection, keys: Iterable[str]) -> Windows:
    """Those that there are of these."""
    found = conn.execute(
        "SELECT key, state FROM send_windows WHERE key IN (SELECT value FROM json_each(?))",
        (msgspec.json.encode(list(keys)).decode(),),
    ).fetchall()
    return {key: parcels.window_of(state) for key, state in found}


def counting_windows(conn: sqlite3.Connection, now_us: int) -> Windows:
    """All that still say something."""
    found = conn.execute("SELECT key, state FROM send_windows WHERE ends_at > ?", (now_us,))
    return {key: parcels.window_of(state) for key, state in found}


def save_windows(
    conn: sqlite3.Connection, found: Windows, keys: Iterable[str], now_us: int
) -> None:
    conn.executemany(
        _SAVE, [(key, parcels.state_of(found[key], now_us), found[key].ends_at) for key in keys]
    )


def _ids(found: Sequence[Parcel]) -> str:
    return msgspec.json.encode([parcel.reply.id for parcel in found]).decode()
