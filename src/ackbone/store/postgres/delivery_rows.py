"""Statements on replies and on the windows of their limits.

`rows` runs a statement: of a transaction, or by itself. Whoever changes replies calls
`Tx.hold_deliveries` first. New replies come without it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

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

from . import arrays
from .arrays import moment
from .database import Row, Tx
from .views import us

Rows = Callable[..., Awaitable[list[Row]]]

_LEVEL = (
    "SELECT d.priority, d.due_at FROM deliveries d WHERE d.channel = c.channel"
    " AND d.status = 'pending' {} ORDER BY d.priority DESC, d.due_at LIMIT 1"
)
LEVELS = (
    f"SELECT c.channel, l.priority, {us('l.due_at')}, {us('(SELECT clock_timestamp())')}"
    " FROM unnest($1::text[]) c(channel) CROSS JOIN LATERAL (WITH RECURSIVE l AS"
    f" (({_LEVEL.format('')}) UNION ALL SELECT n.priority, n.due_at FROM l CROSS JOIN LATERAL"
    f" ({_LEVEL.format('AND d.priority < l.priority')}) n) SELECT priority, due_at FROM l) l"
    " WHERE NOT EXISTS (SELECT 1 FROM roles r WHERE r.role = $2 || c.channel)"
)
"""The priorities of what waits in each channel that is not paused, and when the first is due: from
one to the next through the index."""
DUE = (
    "SELECT d.id, d.tenant_id, d.channel, d.recipient, d.conversation, d.task_id, d.options::text,"
    " d.calls, d.retry_count, d.max_retries, d.in_doubt, d.subscription, d.lane, d.priority,"
    f" {us('d.expires_at')}, {us('d.created_at')},"
    f" NOT EXISTS (SELECT 1 FROM deliveries e WHERE e.lane = d.lane AND e.{LIVE}"
    " AND e.seq < d.seq) AND NOT EXISTS (SELECT 1 FROM deliveries s WHERE s.lane = d.lane"
    " AND s.status = 'sending') FROM deliveries d WHERE d.channel = $1 AND d.status = 'pending'"
    f" AND d.priority = $2::int AND d.due_at <= {moment('$3::bigint')}"
    " ORDER BY d.due_at, d.seq LIMIT $4::int"
)
GRANT = (
    f"UPDATE deliveries SET status = 'sending', worker_id = $2::bigint,"
    f" last_attempt_at = {moment('$3::bigint')}, calls = calls + 1, put_off_by = NULL"
    " WHERE id = ANY($1::text[])"
    " RETURNING id, content, receipts::text"
)
HELD = (
    "SELECT d.id, d.tenant_id, d.channel, d.recipient, d.conversation, d.task_id, d.options::text,"
    " d.calls - 1, d.retry_count, d.max_retries, d.in_doubt, d.subscription, d.lane, d.priority,"
    f" {us('d.expires_at')}, {us('d.created_at')}, true, d.content, d.receipts::text"
    " FROM unnest($1::text[], $2::int[]) u(id, call) JOIN deliveries d ON d.id = u.id"
    " WHERE d.status = 'sending' AND d.worker_id = $3::bigint AND d.calls = u.call"
)
"""Those of these calls that are this worker's, if they were committed."""
BEHIND = (
    "SELECT d.id, d.tenant_id, d.channel, d.recipient, d.conversation, d.task_id, d.options::text,"
    " d.calls, d.retry_count, d.max_retries, d.in_doubt, d.subscription, d.lane, d.priority,"
    f" {us('d.expires_at')}, {us('d.created_at')}, false, d.content FROM deliveries h"
    f" JOIN deliveries d ON d.lane = h.lane AND d.seq > h.seq AND d.{LIVE} WHERE h.id = $1"
    " AND h.status = 'sending' AND h.worker_id = $2::bigint AND h.calls = $3::int"
    " ORDER BY d.seq LIMIT $4::int"
)
QUEUE = "UPDATE deliveries SET status = 'queued' WHERE id = ANY($1::text[])"
PUT_OFF = (
    f"UPDATE deliveries d SET due_at = {moment('u.until')}, put_off_by = u.by"
    " FROM unnest($1::text[], $2::bigint[], $3::text[]) u(id, until, by) WHERE d.id = u.id"
)
FREE = (
    f"UPDATE deliveries d SET due_at = {moment('$2::bigint')}, put_off_by = NULL"
    " FROM (SELECT id FROM deliveries WHERE put_off_by = $1 AND status = 'pending'"
    " ORDER BY priority DESC, seq LIMIT $3::int) f WHERE d.id = f.id RETURNING 1"
)
EXPIRE = "UPDATE deliveries SET status = 'failed', last_error = $2 WHERE id = ANY($1::text[])"
END = (
    "UPDATE deliveries d SET status = u.status, last_error = u.error,"
    f" due_at = coalesce({moment('u.due')}, d.due_at),"
    " retry_count = coalesce(d.retry_count + u.retries, 0),"
    " in_doubt = coalesce(u.in_doubt, d.in_doubt), receipts = CASE WHEN u.receipt IS NULL"
    " THEN d.receipts ELSE (coalesce(d.receipts::jsonb, '[]') || to_jsonb(u.receipt))::json END,"
    " resent = d.resent + u.resent"
    " FROM unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::bigint[], $6::int[],"
    " $7::int[], $8::text[], $9::int[]) u(id, call, status, error, due, retries, in_doubt, receipt,"
    " resent) WHERE d.id = u.id AND d.status = 'sending' AND d.worker_id = $10::bigint"
    " AND d.calls = u.call RETURNING d.id, d.calls, d.tenant_id, coalesce(d.subscription, ''),"
    " coalesce(d.task_id, ''), d.lane, d.retry_count, coalesce(json_array_length(d.receipts), 0)"
)
PROMOTE = (
    f"UPDATE deliveries d SET status = 'pending', due_at = {moment('$2::bigint')}"
    " FROM unnest($1::text[]) u(lane) CROSS JOIN LATERAL (SELECT q.id FROM deliveries q"
    f" WHERE q.lane = u.lane AND q.{LIVE} AND q.status = 'queued' ORDER BY q.seq LIMIT 1) f"
    " WHERE d.id = f.id RETURNING 1"
)
_GONE = (
    "status = 'sending' AND (worker_id IS NULL OR (worker_id <> $1::bigint AND worker_id NOT IN"
    " (SELECT worker_id FROM workers WHERE state IN ('alive', 'leaving'))))"
)
ORPHANS = f"SELECT 1 FROM deliveries WHERE {_GONE} LIMIT 1"
TAKE_BACK = (
    "WITH gone AS (SELECT id, calls, last_attempt_at, in_doubt, channel, tenant_id, subscription,"
    f" task_id FROM deliveries WHERE {_GONE}) UPDATE deliveries d SET status = 'pending',"
    f" due_at = {moment('$2::bigint')}, resent = d.resent + (d.in_doubt > 0)::int, in_doubt = 1,"
    " last_error = $3 FROM gone g WHERE d.id = g.id RETURNING g.id, g.calls,"
    f" coalesce({us('g.last_attempt_at')}, 0), g.in_doubt, g.channel, g.tenant_id,"
    " coalesce(g.subscription, ''), coalesce(g.task_id, '')"
)
WINDOWS = "SELECT key, state::text FROM send_windows WHERE key = ANY($1::text[])"
COUNTING_WINDOWS = (
    f"SELECT key, state::text FROM send_windows WHERE ends_at > {moment('$1::bigint')}"
)
SAVE = (
    f"INSERT INTO send_windows (key, state, ends_at) SELECT u.key, u.state, {moment('u.ends')}"
    " FROM unnest($1::text[], $2::json[], $3::bigint[]) u(key, state, ends) ON CONFLICT (key)"
    " DO UPDATE SET state = excluded.state, ends_at = excluded.ends_at"
)


class Levels(NamedTuple):
    """What waits in channels that are not paused."""

    now_us: int
    found: Mapping[str, Sequence[tuple[int, int]]]
    """By channel: the priorities, the urgent first, and when the first of each is due."""


async def levels(rows: Rows, channels: Iterable[str]) -> Levels:
    names = list(channels)
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    waiting = await rows(LEVELS, arrays.texts(names), PAUSED)
    for channel, priority, due_us, _ in waiting:
        found[channel].append((priority, due_us))
    now_us = waiting[0][3] if waiting else 0
    return Levels(now_us, {name: sorted(each, reverse=True) for name, each in found.items()})


async def page(rows: Rows, channel: str, priority: int, now_us: int, limit: int) -> list[Parcel]:
    """What is due, the oldest first."""
    found = await rows(DUE, channel, str(priority), str(now_us), str(limit))
    return [parcel_of(row) for row in found]


async def grant(
    tx: Tx, ids: Sequence[str], worker_id: int, now_us: int
) -> dict[str, tuple[str, str | None]]:
    """They are being sent; returns their contents and receipts, by id."""
    if not ids:
        return {}
    given = await tx.rows(GRANT, arrays.texts(ids), str(worker_id), str(now_us))
    return {id_: (content, receipts) for id_, content, receipts in given}


async def behind(
    rows: Rows, head: Outbound, worker_id: int, limit: int
) -> list[tuple[Parcel, str]]:
    """What stands behind a reply that is this worker's, in order, with the contents."""
    found = await rows(BEHIND, head.id, str(worker_id), str(head.call), str(limit))
    return [(parcel_of(row), content) for *row, content in found]


async def held(tx: Tx, calls: Mapping[str, int], worker_id: int) -> list[Row]:
    """As `page`, and each with its content and its receipts."""
    ids = arrays.texts(list(calls))
    return await tx.rows(HELD, ids, arrays.numbers(calls.values()), str(worker_id))


async def queue(tx: Tx, found: Sequence[Parcel]) -> None:
    if found:
        await tx.send(QUEUE, _ids(found))


async def put_off(tx: Tx, found: Sequence[PutOff]) -> None:
    if found:
        await tx.send(
            PUT_OFF,
            _ids([each.parcel for each in found]),
            arrays.numbers(each.until_us for each in found),
            arrays.texts([each.by for each in found]),
        )


async def free(tx: Tx, keys: Iterable[str], now_us: int) -> set[str]:
    """What was put off by these windows is due now, the urgent and the oldest first; returns those
    by which more may be put off."""
    more = set()
    for key in keys:
        if len(await tx.rows(FREE, key, str(now_us), str(FREED))) == FREED:
            more.add(key)
    return more


async def expire(tx: Tx, found: Sequence[Parcel]) -> None:
    if found:
        await tx.send(EXPIRE, _ids(found), EXPIRED)


async def end(
    tx: Tx, batch: Sequence[Ending], worker_id: int, now_us: int
) -> dict[tuple[str, int], Ended]:
    """By id and call, those that were still this worker's, and this attempt's."""
    first = {(each.id, each.call): each for each in reversed(batch)}.values()
    found = await tx.rows(
        END,
        arrays.texts([each.id for each in first]),
        arrays.numbers(each.call for each in first),
        arrays.texts([each.status.value for each in first]),
        arrays.texts([each.error for each in first]),
        arrays.numbers(None if e.wait_us is None else now_us + e.wait_us for e in first),
        arrays.numbers(each.retries for each in first),
        arrays.numbers(None if each.in_doubt is None else int(each.in_doubt) for each in first),
        arrays.texts([each.receipt for each in first]),
        arrays.numbers(each.resent for each in first),
        str(worker_id),
    )
    return {(id_, call): Ended(*rest) for id_, call, *rest in found}


async def promote(tx: Tx, lanes: Iterable[str | None], now_us: int) -> bool:
    """The next of these lanes are due now; False if nobody stood there."""
    names = [lane for lane in dict.fromkeys(lanes) if lane is not None]
    return bool(names) and bool(await tx.rows(PROMOTE, arrays.texts(names), str(now_us)))


async def take_back(tx: Tx, me: int, now_us: int) -> list[Orphan]:
    """What dead workers were sending is due again, in doubt; returns it as it was."""
    found = await tx.rows(TAKE_BACK, str(me), str(now_us), SENDER_DIED)
    return [Orphan(*row) for row in found]


# -- windows --------------------------------------------------------------------------------------


async def windows(rows: Rows, keys: Iterable[str]) -> Windows:
    """Those that there are of these."""
    names = list(keys)
    found = await rows(WINDOWS, arrays.texts(names)) if names else []
    return {key: parcels.window_of(state) for key, state in found}


async def counting_windows(rows: Rows, now_us: int) -> Windows:
    """All that still say something."""
    found = await rows(COUNTING_WINDOWS, str(now_us))
    return {key: parcels.window_of(state) for key, state in found}


async def save_windows(tx: Tx, found: Windows, keys: Iterable[str], now_us: int) -> None:
    names = list(keys)
    if names:
        await tx.send(
            SAVE,
            arrays.texts(names),
            arrays.texts([parcels.state_of(found[key], now_us) for key in names]),
            arrays.numbers(found[key].ends_at for key in names),
        )


def _ids(found: Iterable[Parcel]) -> str:
    return arrays.texts([parcel.reply.id for parcel in found])
