"""Deliveries in PostgreSQL, where the answer to a commit can be lost.

Replies that such a commit granted belong to this worker, and no other worker would send them. So
their calls are remembered until a later transaction has looked at their rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from ackbone.core.outbound.delivery import Limits, Outbound, Settled, Status, Taken
from ackbone.core.outbound.settling import AttemptEnd
from ackbone.core.store import Worker
from ackbone.pgserver import arrays
from ackbone.store.deliveries import StoreDeliveries
from ackbone.store.delivery_rows import due_reply, with_content
from ackbone.store.sql import worded
from ackbone.store.sql.deliveries import DUE_REPLY
from ackbone.store.unit import OUTGOING, Change, Operation, Row, Rows, Tx

from .sql import SQL, WORDS
from .store import PostgresStore

T = TypeVar("T")
_HELD = (
    f"SELECT {worded(DUE_REPLY, WORDS).format(calls='d.calls - 1')}, true, d.content,"
    " d.receipts::text FROM unnest($1::text[], $2::int[]) u(id, call) JOIN deliveries d"
    " ON d.id = u.id WHERE d.status = 'sending' AND d.worker_id = $3::bigint AND d.calls = u.call"
)
"""ids, calls, worker → the calls that are this worker's: their grant was committed."""


class PostgresDeliveries(StoreDeliveries):
    """`Deliveries` of the store's database."""

    sql = SQL.deliveries

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store)
        self._unsure: dict[str, int] = {}
        """Calls of `take` that may have been granted, by the reply's id."""
        self._loose: dict[str, int] = {}
        """Calls of `follow` that may have been granted after their head went without them."""

    def _takes_first(self) -> bool:
        return bool(self._unsure)

    async def settle(
        self, channels: Mapping[str, Limits], batch: Sequence[Settled], *, worker: Worker
    ) -> None:
        loose = list(self._loose) if batch else []
        await super().settle(channels, batch, worker=worker)
        for delivery_id in loose:
            self._loose.pop(delivery_id, None)

    async def _take(self, channels: Mapping[str, Limits], limit: int, worker_id: int) -> Taken:
        taken = await super()._take(channels, limit, worker_id)
        self._unsure.clear()
        return taken

    async def _look(self, op: Callable[[Rows, int | None], Awaitable[T]]) -> T:
        return await op(self._store.read, None)

    async def _granted_before(self, tx: Tx, worker_id: int, taken: list[Outbound]) -> None:
        tx.if_unknown = lambda: self._unsure.update({reply.id: reply.call for reply in taken})
        for *row, content, receipts in await _held(tx, self._unsure, worker_id):
            taken.append(with_content(due_reply(row), content, receipts))

    async def _write_followers(
        self, op: Operation[list[Outbound]], worker_id: int
    ) -> Sequence[Outbound]:
        unsure: dict[str, Outbound] = {}

        async def once(tx: Tx, change: Change) -> list[Outbound]:
            await tx.require_alive(worker_id, or_leaving=True)
            calls = {reply.id: reply.call for reply in unsure.values()}
            held = {row[0] for row in await _held(tx, calls, worker_id)}
            if held:
                return [reply for reply in unsure.values() if reply.id in held]
            found = await op(tx, change)
            tx.if_unknown = lambda: unsure.update({reply.id: reply for reply in found})
            return found

        try:
            return await super()._write_followers(once, worker_id)
        except BaseException:
            self._loose |= {reply.id: reply.call for reply in unsure.values()}
            raise

    async def _put_back(self, tx: Tx, change: Change, worker_id: int, now: int) -> None:
        if self._loose:
            ends = [
                AttemptEnd(id=delivery_id, call=call, status=Status.PENDING, wait_us=0)
                for delivery_id, call in self._loose.items()
            ]
            await tx.deliveries.end(ends, worker_id, now)
            change.topics.add(OUTGOING)


async def _held(tx: Tx, calls: Mapping[str, int], worker_id: int) -> list[Row]:
    """Return the rows of those calls whose grant was committed, after waiting for it."""
    if not calls:
        return []
    await tx.hold_deliveries()
    return await tx.rows(_HELD, list(calls), arrays.numbers(calls.values()), worker_id)
