"""The broker in the store's own PostgreSQL database: a queue is rows of a table.

With the store, receiving and claiming a message are one transaction (`take_in`). The row moves from
the queue into the store, and there is nothing left to settle. Without it, a received row has a
lease, and the number of its deliveries tells whether it still belongs to its receiver.

Transactions that run side by side skip each other's rows, so no message has two receivers. Numbers
are given out before the commit: of two sends that overlap in time, the later number may be seen
first. A message whose send began after another one had returned is always behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import psycopg

from ackbone.core.broker import (
    Capabilities,
    Delivery,
    Durability,
    Health,
    Outgoing,
    QueueStats,
    Result,
    Settlement,
    Subscription,
    Verb,
)
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import (
    AckboneError,
    BrokerDenied,
    BrokerUnavailable,
    InvalidMessage,
    PublishUnknown,
    StoreDenied,
    StoreError,
)
from ackbone.pgserver import arrays
from ackbone.pgserver.address import Address
from ackbone.pgserver.connections import CALL_S, Connections, Row, Unanswered
from ackbone.pgserver.wake import WORK, WakeUps

from . import rows

LEASE_S = 30.0
NET_S = 1.0
"""How often a waiting reader looks without a wake-up, in case one got lost."""


class PostgresBroker:
    """`Broker`, `Inspectable` and `Transactional` on one PostgreSQL database.

    `lease_s`: how long a received message belongs to its receiver, without a store in the same
    database.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, lease_s: float = LEASE_S) -> None:
        self._address = Address.from_url(url)
        self._clock = clock or SystemClock()
        self._lease_s = lease_s
        self.capabilities = Capabilities(
            durability=Durability.FSYNC,
            delay=True,
            priority=True,
            ttl=True,
            ordered=True,
            reject=True,
            lease_s=lease_s,
            max_body=rows.MAX_BODY,
        )
        self._opened: Connections | None = None
        self._wake: WakeUps | None = None
        self._listens = False
        self._held: dict[int, int] = {}
        """Messages that this client received and did not settle: number and count of deliveries."""
        self._closed = asyncio.Event()
        self.publish_within_s: float | None = None
        """Give a publish up after this time."""

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> PostgresBroker:
        """Read the URL of a database whose schema exists."""
        return cls(url, clock=clock)

    @property
    def connections(self) -> Connections:
        if self._opened is None:
            raise BrokerUnavailable(f"the broker ({self._address.shown}) is not open")
        return self._opened

    async def open(self) -> None:
        if self._opened is not None:
            return
        connections = Connections(self._address, self._clock)
        with _as_broker():
            await connections.open()
        self._opened, self._closed, self._listens = connections, asyncio.Event(), False
        self._wake = WakeUps(connections)
        self._wake.start(listen=False)

    async def close(self) -> None:
        connections, wake = self._opened, self._wake
        if connections is None or wake is None:
            return
        self._closed.set()
        if self._held:
            back, self._held = self._held, {}
            with contextlib.suppress(AckboneError):  # else they come back when their lease is over
                await self._ask(
                    rows.RELEASE, *rows.tags(back.items()), arrays.numbers([0] * len(back))
                )
                wake.wake(WORK)
        self._opened = self._wake = None
        await wake.stop()
        await connections.close()

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        connections = self.connections
        refused = {n: error for n, item in enumerate(batch) if (error := rows.refusal(queue, item))}
        good = [n for n in range(len(batch)) if n not in refused]
        if good:
            within_s = min(CALL_S, self.publish_within_s or CALL_S)
            values = rows.insert_values(queue, [batch[n] for n in good])
            try:
                with _as_broker():
                    await connections.once(rows.INSERT, *values, within_s=within_s)
            except Unanswered as error:
                detail = f"{self._address.shown} did not answer: {error}"
                raise PublishUnknown([batch[n].id for n in good], detail) from error
            except psycopg.Error as error:
                if len(good) > 1:  # a value that the database refuses is one message's
                    return [
                        Result(id=item.id, error=refused[n])
                        if n in refused
                        else (await self.publish(queue, [item]))[0]
                        for n, item in enumerate(batch)
                    ]
                refused[good[0]] = InvalidMessage(f"{batch[good[0]].id}: refused: {error}")
            else:
                self.wake()
        return [Result(id=item.id, error=refused.get(n)) for n, item in enumerate(batch)]

    async def subscribe(self, sub: Subscription, *, room: int) -> PostgresSource:
        _ = self.connections
        if self._wake is not None and not self._listens:
            self._wake.listen()
            self._listens = True
        return PostgresSource(self, sub)

    async def health(self) -> Health:
        if self._opened is None:
            return Health(ok=False, detail="not open")
        try:
            await self._ask("SELECT 1")
        except AckboneError as error:
            return Health(ok=False, detail=str(error))
        return Health(ok=True)

    async def stats(self, queues: Collection[str] = ()) -> Sequence[QueueStats]:
        return [
            QueueStats(queue=queue, ready=ready, delayed=delayed, in_flight=taken, oldest_age_s=age)
            for queue, ready, delayed, taken, age in await self._ask(rows.STATS)
        ]

    def wake(self) -> None:
        """Wake the readers of every process."""
        if self._wake is not None:
            self._wake.wake(WORK)

    async def _ask(self, statement: str, *values: Any) -> list[Row]:
        """Run one statement that does no harm if it is repeated."""
        with _as_broker():
            return await self.connections.read(statement, *values)

    # -- inside the store's transaction, `store.postgres.database.Tx` -----------------------------

    async def publish_in(self, tx: Any, queue: str, batch: Sequence[Outgoing]) -> None:
        tx.at_end(rows.INSERT, *rows.insert_values(queue, batch))

    async def take_in(
        self, tx: Any, sub: Subscription, *, limit: int, keyed: bool, floor: int
    ) -> Sequence[Delivery]:
        if keyed:
            statement = rows.TAKE_IN_ORDER if sub.ordered else rows.TAKE_KEYED
            found = await tx.rows(statement, sub.queue, limit)
            found.sort()
        else:
            found = await tx.rows(rows.TAKE_FREE, sub.queue, floor, limit)
            found.sort(key=rows.by_priority)
        return [rows.delivery(row) for row in found]

    async def has_keyed_in(self, tx: Any, sub: Subscription) -> bool:
        return bool(await tx.rows(rows.HAS_KEYED, sub.queue))

    async def promote_in(self, tx: Any) -> None:
        await tx.send(rows.PROMOTE)

    async def next_due_in(self, tx: Any) -> int | None:
        found = await tx.rows(rows.NEXT_DUE)
        return found[0][0] if found else None

    # -- without a store in the same database -----------------------------------------------------

    async def _receive(self, sub: Subscription, limit: int) -> list[Delivery]:
        if self._closed.is_set():
            return []
        await self._ask(rows.PROMOTE)
        found = await self._ask(rows.RECEIVE, sub.queue, 0, limit, int(self._lease_s * 1e6))
        found.sort(key=rows.by_priority)
        self._held.update((row[0], row[6]) for row in found)
        return [rows.delivery(row, received=True) for row in found]

    async def _due_in_s(self) -> float | None:
        found = await self._ask(rows.NEXT_DUE)
        return max(0.0, found[0][0] / 1e6) if found else None

    async def _settle(self, batch: Sequence[Settlement]) -> None:
        by: dict[Verb, list[Settlement]] = {}
        for item in batch:
            by.setdefault(item.verb, []).append(item)
        for verb, some in by.items():
            tags = rows.tags([item.delivery.tag for item in some])
            if verb is Verb.ACK:
                await self._ask(rows.ACK, *tags)
            elif verb is Verb.REJECT:
                await self._ask(rows.REJECT, *tags, arrays.texts([item.reason for item in some]))
            else:
                delays = arrays.numbers(int(item.delay_s * 1e6) for item in some)
                await self._ask(rows.RELEASE, *tags, delays)
                self.wake()
        for item in batch:
            seq, count = item.delivery.tag
            if self._held.get(seq) == count:
                del self._held[seq]


class PostgresSource:
    """One queue, read without a store in the same database. It reads no message that nobody
    receives."""

    def __init__(self, broker: PostgresBroker, sub: Subscription) -> None:
        self._broker = broker
        self._sub = sub

    async def receive(self, *, limit: int, wait: float) -> Sequence[Delivery]:
        broker = self._broker
        _ = broker.connections
        clock, closed, wake = broker._clock, broker._closed, broker._wake
        assert wake is not None  # noqa: S101 - it is open
        woken = wake.subscribe(WORK)
        deadline = clock.monotonic() + wait
        try:
            while True:
                woken.clear()
                got = await self._received(limit)
                left = deadline - clock.monotonic()
                if got or left <= 0 or closed.is_set():
                    return got
                due_in = await broker._due_in_s()
                pause = min(left, NET_S, NET_S if due_in is None else due_in + 0.001)
                await _first_of(closed, woken, seconds=pause)
                if closed.is_set():
                    return ()
        finally:
            wake.unsubscribe(woken)

    async def _received(self, limit: int) -> list[Delivery]:
        """Receive messages. They are released if the caller was cancelled."""
        asked = asyncio.ensure_future(self._broker._receive(self._sub, limit))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            # Raise the cancellation, not this error. Either nothing was received, or it returns to
            # the queue when its lease is over.
            with contextlib.suppress(AckboneError):
                got = await asked
                await self.settle([Settlement(delivery=each, verb=Verb.RELEASE) for each in got])
            raise

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        await self._broker._settle(batch)
        return [Result(id=item.delivery.identity or "") for item in batch]

    async def extend(self, batch: Sequence[Delivery]) -> None:
        tags = rows.tags([each.tag for each in batch])
        await self._broker._ask(rows.EXTEND, *tags, int(self._broker._lease_s * 1e6))

    async def pause(self) -> None:
        """Do nothing: all messages that were read were received."""


@contextlib.contextmanager
def _as_broker() -> Any:
    """Raise errors of the database as those of a broker."""
    try:
        yield
    except StoreDenied as error:
        raise BrokerDenied(str(error)) from error
    except StoreError as error:
        raise BrokerUnavailable(str(error)) from error


async def _first_of(*events: asyncio.Event, seconds: float) -> None:
    waits = {asyncio.ensure_future(event.wait()) for event in events}
    _, pending = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
