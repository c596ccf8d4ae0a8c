"""One transaction from its first statement to its commit, in the same order on both dialects.

An operation changes rows and fills a `Change`. Everything that follows from the change is written
here, before the commit:

1. Keys and conversations that became free are passed on. (SQLite. On PostgreSQL this is a
   transaction of its own after the commit, because it may have to wait for locks.)
2. Notices about tasks that ended: no way to end a task can forget its notice. A task whose result
   the broker publishes together with its acknowledgement is left out (`Change.told`). If the worker
   dies before that, the broker's copy comes back, and the notice is written then (`Change.again`).
3. Deliveries to the subscribers of events.
4. Deliveries, and messages: into the queue where it is in the same file, else into the outbox.
5. Events of the ledger. Writing an event does nothing else.

After the commit, listeners in this process get the events, and processes that wait for one of the
change's topics are woken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ackbone.core import events
from ackbone.core.broker import Outgoing, Transactional
from ackbone.core.errors import StoreError, StoreUnavailable
from ackbone.core.notices import End, Notices, letter_fields, notices_of
from ackbone.core.outbound.subscribers import Subscribers
from ackbone.core.outcome import Status
from ackbone.core.store import Send

from .conditions import STATUS_OF_EVENT
from .delivery_rows import notification_rows
from .outcomes import Letter
from .unit import OUTGOING, WORK, Change, Identity, Row, Tx

T = TypeVar("T")
X = TypeVar("X", bound=Tx)
Item = TypeVar("Item")
Answer = TypeVar("Answer")

NoticesOf = Callable[[str], Notices | None]
"""The queues that notices of a subscription go to; None: the subscription has no notices."""
_Ended = tuple[Notices, Status, Mapping[str, Any]]
_RELEVANT = frozenset({*STATUS_OF_EVENT, events.DLQ})
_encode = msgspec.json.Encoder().encode


class Transactions(ABC, Generic[X]):
    """The transactions of one store. `X` is the `Tx` of its dialect."""

    def __init__(
        self,
        notices: NoticesOf | None,
        subscribers: Subscribers | None,
        queue: Transactional | None = None,
        is_local: Callable[[str], bool] = lambda queue: True,
    ) -> None:
        self._notices = notices
        self._subscribers = subscribers
        self._queue = queue
        self._is_local = is_local
        self._listeners: list[events.Listener] = []

    def on_events(self, listener: events.Listener) -> None:
        """Call `listener`, on the event loop, with the events that this store object committed."""
        self._listeners.append(listener)

    def holds(self, queue: str) -> bool:
        """Return True if the queue is in the same database."""
        return self._queue is not None and self._is_local(queue)

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
        if change.sends:
            await self._publish(tx, change)
        await append()

    async def _publish(self, tx: X, change: Change) -> None:
        """Put messages into their queues, if these are in the same database, else into the
        outbox."""
        here: dict[str, list[Outgoing]] = {}
        elsewhere: list[Send] = []
        for send in change.sends:
            if self.holds(send.queue):
                here.setdefault(send.queue, []).append(send.outgoing)
            else:
                elsewhere.append(send)
        for queue, batch in here.items():
            assert self._queue is not None  # noqa: S101 - `holds` says so
            await self._queue.publish_in(tx, queue, batch)
            change.topics.add(WORK)
        if elsewhere:
            tx.deliveries.publish(elsewhere, await tx.moment())
            change.topics.add(OUTGOING)

    @abstractmethod
    async def _pass_on(self, tx: X, change: Change) -> None:
        """Inside the transaction: give keys and conversations to the messages that wait for them,
        if the dialect does that here."""

    async def _committed(self, change: Change, worker_id: int) -> None:
        """Inform those who wait for what was committed."""
        if change.entries:
            for listener in self._listeners:
                listener(change.entries)


# -- notices --------------------------------------------------------------------------------------


async def add_notices(tx: Tx, change: Change, notices: NoticesOf) -> None:
    """Add the notices of all tasks that this change ends to the messages that it publishes."""
    names = {entry[1] for entry in change.entries}
    if not change.again and all(notices(name) is None for name in names):
        return
    ends: dict[Identity, _Ended] = {}
    letters: dict[Identity, str] = {}
    for tenant_id, subscription, task_id, kind, data in change.entries:
        if kind not in _RELEVANT:
            continue
        identity = (tenant_id, subscription, task_id)
        if kind == events.DLQ:
            letters[identity] = data["dead_letter_id"]
        elif identity not in change.told:
            to = notices(subscription)
            if to is not None:
                ends[identity] = (to, STATUS_OF_EVENT[kind], data)
    for identity in change.again:
        to = notices(identity[1])
        if to is not None and to.on_ack:
            ends.setdefault(identity, (to, Status.SUCCEEDED, {}))
    if not ends:
        return
    now_us = await tx.moment()
    found = await tx.rows(tx.sql.store.ended_tasks, _encode(sorted(ends)).decode())
    rows = {row[:3]: row[3:] for row in found}
    for identity, (to, status, data) in ends.items():
        end = _end(identity, rows[identity], status, data, now_us)
        if identity in letters:
            _add_letter(end, letters[identity], tx.letters[letters[identity]])
        change.sends += [
            Send(queue=queue, outgoing=out, tenant_id=identity[0])
            for queue, out in notices_of(to, end)
        ]


def _end(
    identity: Identity, row: Sequence[Any], status: Status, data: Mapping[str, Any], now_us: int
) -> End:
    """Describe the end of a task from its row and the data of its final event."""
    tenant_id, subscription, task_id = identity
    tool_name, result, retry_count, error, key, worker = row
    return End(
        tenant_id=tenant_id,
        subscription=subscription,
        task_id=task_id,
        tool_name=tool_name or "",
        status=status,
        result=result,
        error=str(data.get("error") or data.get("reason") or error or ""),
        retry_count=data.get("retry_count", retry_count) or 0,
        idempotency_key=key,
        finished_at_us=now_us,
        consumer=worker or "",
        duplicate_of=data.get("first_id"),
    )


def _add_letter(end: End, letter_id: str, letter: Letter) -> None:
    """Describe the dead letter that a task left."""
    end.letter = letter_id
    form = msgspec.json.decode(letter.body_info) if letter.body_info else {}
    letter_fields(end, letter.body or b"", form.get("codec", ""), letter.reason)


# -- a batch that the database refuses ------------------------------------------------------------


async def commit_in_halves(
    batch: Sequence[Item],
    commit: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
    alone: Callable[[Item, Exception], Awaitable[Answer]],
) -> Sequence[Answer]:
    """`commit` the batch; if it is refused, commit it half by half until one item is left.

    `alone` answers for that item. Raises StoreError if the store itself is the reason.
    """
    try:
        return await commit(batch)
    except StoreError:
        raise
    except MemoryError as error:
        raise StoreUnavailable("there is no memory left to store it") from error
    except Exception as error:
        if len(batch) == 1:
            return [await alone(batch[0], error)]
        half = len(batch) // 2
        first = await commit_in_halves(batch[:half], commit, alone)
        return [*first, *await commit_in_halves(batch[half:], commit, alone)]
