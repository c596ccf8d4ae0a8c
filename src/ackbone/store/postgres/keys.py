"""Idempotency keys: a key belongs to one message until that message is final (P4).

Who waits for a key is told by a transaction of its own, after the commit that freed the key and
after the one that began to wait: whichever came last sees the other. Told inside `finish`, rows of
tasks would be locked after those of keys, against the order of the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ackbone.core import events
from ackbone.core.outcome import Status
from ackbone.store.outcomes import final_data

from . import arrays, lanes
from .database import Tx
from .ledger import Entry
from .tasks import BEGUN

Key = tuple[str, str, str]
"""tenant_id, subscription, key"""

_TAKE = (
    "INSERT INTO idempotency_keys AS k (tenant_id, subscription, key, message_id, state,"
    " created_at) SELECT u.tenant, $1, u.key, u.message, 'running', clock_timestamp()"
    " FROM unnest($3::text[], $4::text[], $5::text[]) u(tenant, key, message)"
    " ON CONFLICT (tenant_id, subscription, key) DO UPDATE SET message_id = excluded.message_id,"
    " state = 'running', value = NULL, expires_at = NULL"
    " WHERE k.message_id = excluded.message_id OR (k.state = 'done' AND $2::bool"
    f" AND k.expires_at <= {BEGUN}) RETURNING tenant_id, key, message_id"
)
"""Sorted by key; one row per key."""
_HOLDERS = (
    "SELECT k.tenant_id, k.key, k.message_id, k.state, k.value"
    " FROM unnest($2::text[], $3::text[]) u(tenant, key) JOIN idempotency_keys k"
    " ON k.tenant_id = u.tenant AND k.subscription = $1 AND k.key = u.key"
)
KEEP = (
    "UPDATE idempotency_keys k SET state = 'done', value = u.value,"
    f" expires_at = {BEGUN} + u.window_us * interval '1 microsecond'"
    " FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bigint[])"
    " u(tenant, sub, key, message, value, window_us) WHERE k.tenant_id = u.tenant"
    " AND k.subscription = u.sub AND k.key = u.key AND k.message_id = u.message"
)
FREE = (
    "DELETE FROM idempotency_keys k USING unnest($1::text[], $2::text[], $3::text[], $4::text[])"
    " u(tenant, sub, key, message) WHERE k.tenant_id = u.tenant AND k.subscription = u.sub"
    " AND k.key = u.key AND k.message_id = u.message"
)
_WAITING = (
    "SELECT q.tenant_id, q.subscription, q.message_id, q.idem_key, q.queue_name, q.event_name,"
    " q.trace_id, q.lane, k.message_id, k.state, k.value FROM {} LEFT JOIN idempotency_keys k"
    " ON k.tenant_id = q.tenant_id AND k.subscription = q.subscription AND k.key = q.idem_key"
    " WHERE q.status = 'waiting_key' AND (k.state IS NULL OR k.state = 'done')"
    " ORDER BY q.id LIMIT 500 FOR UPDATE OF q SKIP LOCKED"
)
WAITING_FOR = _WAITING.format(
    "unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, key) JOIN queue_executions q"
    " ON q.tenant_id = u.tenant AND q.subscription = u.sub AND q.idem_key = u.key"
    " AND q.status = 'waiting_key'"
)
WAITING = _WAITING.format("queue_executions q")
_DUPLICATES = (
    "UPDATE queue_executions q SET status = 'duplicate', completed_at = clock_timestamp(),"
    " result = u.value, body = NULL, body_info = NULL FROM unnest($1::text[], $2::text[],"
    " $3::text[], $4::bytea[]) u(tenant, sub, message, value) WHERE q.tenant_id = u.tenant"
    " AND q.subscription = u.sub AND q.message_id = u.message"
)
_READY = (
    f"UPDATE queue_executions q SET status = 'ready', due_at = {BEGUN}"
    " FROM unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, message)"
    " WHERE q.tenant_id = u.tenant AND q.subscription = u.sub AND q.message_id = u.message"
    " AND q.status = 'waiting_key'"
)


class Holder(NamedTuple):
    """Whose key it is."""

    message_id: str
    state: str
    value: bytes | None


class Wanted(NamedTuple):
    """A key that a message asks for."""

    tenant_id: str
    key: str
    message_id: str


async def take_keys(
    tx: Tx, subscription: str, wanted: Sequence[Wanted], *, expiry: bool
) -> dict[tuple[str, str], Holder]:
    """Take keys; returns the lost ones by (tenant, message). `expiry`: a window may be over."""
    first: dict[tuple[str, str], Wanted] = {}
    for each in wanted:  # of twins in one batch the first one has it
        first.setdefault((each.tenant_id, each.key), each)
    asked = [first[key] for key in sorted(first)]
    found = await tx.rows(
        _TAKE,
        subscription,
        expiry,
        arrays.texts([each.tenant_id for each in asked]),
        arrays.texts([each.key for each in asked]),
        arrays.texts([each.message_id for each in asked]),
    )
    won = {(tenant, message_id) for tenant, _, message_id in found}
    losers = [each for each in wanted if (each.tenant_id, each.message_id) not in won]
    if not losers:
        return {}
    holders = {
        (tenant, key): Holder(message_id, state, value)
        for tenant, key, message_id, state, value in await tx.rows(
            _HOLDERS,
            subscription,
            arrays.texts([each.tenant_id for each in losers]),
            arrays.texts([each.key for each in losers]),
        )
    }
    return {(each.tenant_id, each.message_id): holders[each[:2]] for each in losers}


def free_keys(tx: Tx, keys: Iterable[tuple[Key, str]]) -> None:
    """Messages that ended badly give their keys back, with the commit."""
    found = sorted(keys)
    if found:
        tx.before_end(
            FREE,
            arrays.texts([key[0] for key, _ in found]),
            arrays.texts([key[1] for key, _ in found]),
            arrays.texts([key[2] for key, _ in found]),
            arrays.texts([message_id for _, message_id in found]),
        )


async def resolve_keys(tx: Tx, keys: Sequence[Key] | None) -> tuple[list[Entry], set[lanes.Lane]]:
    """Those who wait for these keys (None: for any): duplicates if it is done, the oldest is next
    if it is free. Returns their events, and the lanes that they let go."""
    if keys is None:
        rows = await tx.rows(WAITING)
    else:
        found = sorted(set(keys))
        rows = await tx.rows(
            WAITING_FOR,
            arrays.texts([key[0] for key in found]),
            arrays.texts([key[1] for key in found]),
            arrays.texts([key[2] for key in found]),
        )
    entries: list[Entry] = []
    freed: set[lanes.Lane] = set()
    ended: list[tuple[Any, ...]] = []
    next_ones: dict[Key, tuple[str, str, str]] = {}
    for tenant, sub, message_id, key, queue, kind, trace, lane, holder, state, value in rows:
        identity = (tenant, sub, message_id)
        if state is None:
            next_ones.setdefault((tenant, sub, key), identity)
            continue
        ended.append((*identity, value))
        data = final_data(queue, tenant, message_id, kind, trace, Status.DUPLICATE)
        data["first_id"] = holder
        entries.append((*identity, events.DUPLICATE, data))
        if lane is not None:
            freed.add((tenant, sub, lane))
    if ended:
        await end_as_duplicates(tx, ended)
    if next_ones:
        first = sorted(next_ones.values())
        columns = [arrays.texts([each[n] for each in first]) for n in range(3)]
        await tx.send(_READY, *columns)
    return entries, freed


async def end_as_duplicates(tx: Tx, ended: Sequence[tuple[Any, ...]]) -> None:
    """(tenant, subscription, message, first one's result) of rows that this transaction locked."""
    found = sorted(ended, key=lambda each: each[:3])
    await tx.send(
        _DUPLICATES,
        *[arrays.texts([each[n] for each in found]) for n in range(3)],
        arrays.blobs(each[3] for each in found),
    )
