"""Writes of many deliveries, and of messages that leave by the outbox: one statement with an array
for each column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ackbone.core.outbound.send_order import PutOff
from ackbone.core.outbound.settling import AttemptEnd, EndedRow
from ackbone.core.store import Send
from ackbone.pgserver import arrays
from ackbone.pgserver.arrays import moment
from ackbone.store.delivery_rows import DELIVERY_COLUMNS, DeliveryRow, WindowRow
from ackbone.store.outbox import outbox_row
from ackbone.store.unit import Row

if TYPE_CHECKING:
    from .database import Tx

INSERT = (
    f"INSERT INTO deliveries ({DELIVERY_COLUMNS}) SELECT u.id, u.tenant, u.sub, u.task, u.channel,"
    " u.recipient, u.content, u.conversation, u.priority,"
    f" {moment('u.due')}, {moment('u.created')}, u.lane, u.options, u.retries,"
    f" {moment('u.expires')} FROM unnest($1::text[], $2::text[], $3::text[], $4::text[],"
    " $5::text[], $6::text[], $7::text[], $8::text[], $9::int[], $10::bigint[], $11::bigint[],"
    " $12::text[], $13::json[], $14::int[], $15::bigint[]) u(id, tenant, sub, task,"
    " channel, recipient, content, conversation, priority, due, created, lane, options, retries,"
    " expires) ON CONFLICT (id) DO NOTHING"
)
PUT_OFF = (
    f"UPDATE deliveries d SET due_at = {moment('u.until')}, put_off_by = u.by"
    " FROM unnest($1::text[], $2::bigint[], $3::text[]) u(id, until, by) WHERE d.id = u.id"
)
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
SAVE_WINDOWS = (
    f"INSERT INTO send_windows (key, state, ends_at) SELECT u.key, u.state, {moment('u.ends')}"
    " FROM unnest($1::text[], $2::json[], $3::bigint[]) u(key, state, ends) ON CONFLICT (key)"
    " DO UPDATE SET state = excluded.state, ends_at = excluded.ends_at"
)
_OUTBOX = (
    "INSERT INTO outbox (id, tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
    " ordering_key, ttl_us, due_at, created_at) SELECT u.id, u.tenant, u.queue, u.message,"
    " u.headers, u.body, u.crc, u.priority, u.key, u.ttl,"
    f" {moment('u.due')}, {moment('u.created')}"
    " FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::json[], $6::bytea[],"
    " $7::bigint[], $8::int[], $9::text[], $10::bigint[], $11::bigint[], $12::bigint[]) u(id,"
    " tenant, queue, message, headers, body, crc, priority, key, ttl, due, created)"
)


class PostgresDeliveryRows:
    """`ackbone.store.delivery_rows.DeliveryRows` of one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def insert(self, found: Sequence[DeliveryRow]) -> None:
        self._tx.at_end(INSERT, *insert_values(found))

    async def add(self, row: DeliveryRow) -> bool:
        return bool(await self._tx.rows(f"{INSERT} RETURNING 1", *insert_values([row])))

    async def put_off(self, found: Sequence[PutOff]) -> None:
        if found:
            await self._tx.send(
                PUT_OFF,
                arrays.texts([each.due.reply.id for each in found]),
                arrays.numbers(each.until_us for each in found),
                arrays.texts([each.by for each in found]),
            )

    async def end(
        self, batch: Sequence[AttemptEnd], worker_id: int, now_us: int
    ) -> dict[tuple[str, int], EndedRow]:
        first = {(each.id, each.call): each for each in reversed(batch)}.values()
        found = await self._tx.rows(
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
            worker_id,
        )
        return {(id_, call): EndedRow(*rest) for id_, call, *rest in found}

    async def save_windows(self, found: Sequence[WindowRow]) -> None:
        if found:
            keys, states, ends = zip(*found, strict=True)
            values = arrays.texts(keys), arrays.texts(states), arrays.numbers(ends)
            await self._tx.send(SAVE_WINDOWS, *values)

    def publish(self, sends: Sequence[Send], now_us: int) -> None:
        rows = [outbox_row(send, now_us) for send in sends]
        self._tx.at_end(_OUTBOX, *_outbox_values(rows))


def insert_values(rows: Sequence[DeliveryRow]) -> tuple[str, ...]:
    """Return the arrays of `INSERT`."""
    columns = list(zip(*rows, strict=True))
    return (
        *(arrays.texts(columns[n]) for n in range(8)),
        arrays.numbers(int(each) for each in columns[8]),
        *(arrays.numbers(columns[n]) for n in range(9, 11)),
        *(arrays.texts(columns[n]) for n in range(11, 13)),
        *(arrays.numbers(columns[n]) for n in range(13, 15)),
    )


def _outbox_values(rows: Sequence[Row]) -> tuple[str, ...]:
    columns = list(zip(*rows, strict=True))
    return (
        arrays.ids(columns[0]),
        *(arrays.texts(columns[n]) for n in range(1, 5)),
        arrays.blobs(columns[5]),
        arrays.numbers(columns[6]),
        arrays.numbers(int(each) for each in columns[7]),
        arrays.texts(columns[8]),
        *(arrays.numbers(columns[n]) for n in range(9, 12)),
    )
