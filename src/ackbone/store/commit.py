"""One transaction from its first statement to its commit, in the same order on both dialects.

An operation changes rows and fills a `Change`. Everything that follows from the change is written
here, before the commit:

1. Keys and conversations that became free are passed on. (SQLite. On PostgreSQL this is a
   transaction of its own after the commit, because it may have to wait for locks.)
2. Notices about tasks that ended.
3. Deliveries to the subscribers of events.
4. Deliveries, and messages: into the queue where it is in the same file, else into the outbox.
5. Events of the ledger. Writing an event does nothing else.

After the commit, listeners in this process get the events, and processes that wait for one of the
change's topics are woken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from ackbone.core import events
from ackbone.core.outbound.subscribers import Subscribers

from .delivery_rows import notification_rows
from .notices import NoticesOf, add_notices
from .unit import OUTGOING, Change, Row, Tx

T = TypeVar("T")
X = TypeVar("X", bound=Tx)


class Transactions(ABC, Generic[X]):
    """`UnitOfWork`: the transactions of one store. `X` is the `Tx` of its dialect."""

    def __init__(self, notices: NoticesOf | None, subscribers: Subscribers | None) -> None:
        self._notices = notices
        self._subscribers = subscribers
        self._listeners: list[events.Listener] = []

    def on_events(self, listener: events.Listener) -> None:
        """Call `listener`, on the event loop, with the events that this store object committed."""
        self._listeners.append(listener)

    @abstractmethod
    async def read(self, statement: str, *values: Any) -> list[Row]:
        """One statement by itself."""

    async def write(
        self,
        op: Callable[[X, Change], Awaitable[T]],
        *,
        worker_id: int,
        durable: bool = True,
    ) -> T:
        """Run one transaction and return what `op` returned, after the commit.

        Not `durable`: the commit is synced only if the change asks for it."""
        result, change = await self._transact(op, worker_id=worker_id, durable=durable)
        await self._committed(change, worker_id)
        return result

    @abstractmethod
    async def _transact(
        self, op: Callable[[X, Change], Awaitable[T]], *, worker_id: int, durable: bool
    ) -> tuple[T, Change]:
        """Run `op` and `_conclude` in one transaction. Both may be undone and run again."""

    async def _conclude(self, tx: X, change: Change, append: Callable[[], Awaitable[None]]) -> None:
        """Write everything that follows from a change. `append` writes its ledger events."""
        if change.keys or change.lanes:
            await self._pass_on(tx, change)
        if self._notices is not None and (change.entries or change.again):
            await add_notices(tx, change, self._notices)
        if self._subscribers and change.entries:
            now_us = await tx.moment()
            change.deliveries += notification_rows(self._subscribers, change.entries, now_us)
        if change.deliveries:
            tx.deliveries.insert(change.deliveries)
            change.topics.add(OUTGOING)
        if change.sends and tx.outgoing.publish(change.sends, await tx.moment()):
            change.topics.add(OUTGOING)
        await append()

    @abstractmethod
    async def _pass_on(self, tx: X, change: Change) -> None:
        """Inside the transaction: give keys and conversations to the messages that wait for them,
        if the dialect does that here."""

    async def _committed(self, change: Change, worker_id: int) -> None:
        """Inform those who wait for what was committed."""
        if change.entries:
            for listener in self._listeners:
                listener(change.entries)
