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
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
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
    MessageTooLarge,
    PublishUnknown,
    StoreDenied,
    StoreError,
)
from ackbone.pgserver import arrays
from ackbone.pgserver.address import Address
from ackbone.pgserver.arrays import BEGUN, MICROSECOND, NOW, us
from ackbone.pgserver.connections import CALL_S, Connections, Row, Unanswered
from ackbone.pgserver.wake import WORK, WakeUps

LEASE_S = 30.0
NET_S = 1.0
"""How often a waiting reader looks without a wake-up, in case one got lost."""
MAX_BODY = 32 * 1024 * 1024
LONGEST_NAME = 255
"""Longest id and ordering key, in characters."""
_IN_DELAY = f"u.delay * {MICROSECOND}"

INSERT = (
    "INSERT INTO messages (queue, state, priority, message_id, lane, due_at, expires_at, sent_at,"
    " headers, body, body_crc) SELECT $1, CASE WHEN u.delay > 0 THEN 1 ELSE 0 END, u.priority,"
    f" u.id, u.lane, CASE WHEN u.delay > 0 THEN {BEGUN} + {_IN_DELAY} END,"
    f" {BEGUN} + {_IN_DELAY} + u.ttl * {MICROSECOND}, {BEGUN}, u.headers, u.body, u.crc"
    " FROM unnest($2::text[], $3::int[], $4::text[], $5::bigint[], $6::bigint[], $7::json[],"
    " $8::bytea[], $9::bigint[]) WITH ORDINALITY u(id, priority, lane, delay, ttl, headers, body,"
    " crc, n) ORDER BY u.n"
)
_COLUMNS = (
    f"m.seq, m.message_id, m.priority, m.lane, {us('m.expires_at')}, {us('m.sent_at')},"
    " m.deliveries, m.headers::text, m.body, m.body_crc"
)
# `queue IN` one value, so that rows are read through the index of their order, also while the
# table is small and a plan is made for good.
_READY = "SELECT r.ctid FROM messages r WHERE r.queue = $1 AND r.state = 0 AND r.lane IS"
_FREE = f"{_READY} NULL AND r.priority >= $2::int ORDER BY r.queue, r.priority DESC, r.seq"
_KEYED = f"{_READY} NOT NULL ORDER BY r.queue, r.seq"
_LOCKED = "LIMIT {}::int FOR UPDATE SKIP LOCKED"
TAKE_FREE = (
    f"DELETE FROM messages m WHERE m.ctid = ANY(ARRAY({_FREE} {_LOCKED.format('$3')}))"
    f" RETURNING {_COLUMNS}"
)
TAKE_KEYED = (
    f"DELETE FROM messages m WHERE m.ctid = ANY(ARRAY({_KEYED} {_LOCKED.format('$2')}))"
    f" RETURNING {_COLUMNS}"
)
HAS_KEYED = f"{_KEYED} LIMIT 1"
PROMOTE = (
    "UPDATE messages m SET state = 0, due_at = NULL WHERE m.ctid = ANY(ARRAY(SELECT r.ctid"
    f" FROM messages r WHERE r.due_at <= {BEGUN} ORDER BY r.due_at LIMIT 1000"
    " FOR UPDATE SKIP LOCKED))"
)
"""Delayed messages that are due, and received ones whose lease is over."""
NEXT_DUE = (
    f"SELECT {us('m.due_at')} - {us(NOW)} FROM messages m WHERE m.due_at IS NOT NULL"
    " ORDER BY m.due_at LIMIT 1"
)
RECEIVE = (
    f"WITH free AS MATERIALIZED (SELECT f.ctid AS place FROM ({_FREE} {_LOCKED.format('$3')}) f),"
    f" keyed AS MATERIALIZED (SELECT k.ctid AS place FROM ({_KEYED} {_LOCKED.format('$3')}) k),"
    " best AS (SELECT x.ctid AS place FROM messages x WHERE x.ctid = ANY(ARRAY("
    "SELECT place FROM free UNION ALL SELECT place FROM keyed))"
    " ORDER BY x.priority DESC, x.seq LIMIT $3::int)"
    " UPDATE messages m SET state = 2, deliveries = m.deliveries + 1,"
    f" due_at = {BEGUN} + $4::bigint * {MICROSECOND}"
    f" WHERE m.ctid = ANY(ARRAY(SELECT place FROM best)) RETURNING {_COLUMNS}"
)
_MINE = "m.seq = u.seq AND m.state = 2 AND m.deliveries = u.n"
_TAGS = "unnest($1::bigint[], $2::int[])"
ACK = f"DELETE FROM messages m USING {_TAGS} u(seq, n) WHERE {_MINE}"
RELEASE = (
    "UPDATE messages m SET state = CASE WHEN u.delay > 0 THEN 1 ELSE 0 END,"
    f" due_at = CASE WHEN u.delay > 0 THEN {BEGUN} + {_IN_DELAY} END"
    f" FROM unnest($1::bigint[], $2::int[], $3::bigint[]) u(seq, n, delay) WHERE {_MINE}"
)
EXTEND = (
    f"UPDATE messages m SET due_at = {BEGUN} + $3::bigint * {MICROSECOND}"
    f" FROM {_TAGS} u(seq, n) WHERE {_MINE}"
)
REJECT = (
    "WITH gone AS (DELETE FROM messages m USING unnest($1::bigint[], $2::int[], $3::text[])"
    f" u(seq, n, reason) WHERE {_MINE} RETURNING m.*, u.reason)"
    " INSERT INTO dead_letters (id, subscription, message_id, queue_name, reason, error, body,"
    " body_info, body_crc, failed_at) SELECT gen_random_uuid(), queue, message_id, queue,"
    f" 'rejected', reason, body, headers, body_crc, {BEGUN} FROM gone"
)
STATS = (
    "SELECT queue, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),"
    " count(*) FILTER (WHERE state = 2),"
    " extract(epoch FROM clock_timestamp() - min(sent_at) FILTER (WHERE state = 0))::float8"
    " FROM messages GROUP BY queue ORDER BY queue"
)
_encode = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_NO_HEADERS = "{}"


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
            max_body=MAX_BODY,
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
                await self._ask(RELEASE, *_tags(back.items()), arrays.numbers([0] * len(back)))
                wake.wake(WORK)
        self._opened = self._wake = None
        await wake.stop()
        await connections.close()

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        connections = self.connections
        refused = {n: error for n, item in enumerate(batch) if (error := _refusal(queue, item))}
        good = [n for n in range(len(batch)) if n not in refused]
        if good:
            within_s = min(CALL_S, self.publish_within_s or CALL_S)
            values = _insert_values(queue, [batch[n] for n in good])
            try:
                with _as_broker():
                    await connections.once(INSERT, *values, within_s=within_s)
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
            for queue, ready, delayed, taken, age in await self._ask(STATS)
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
        tx.at_end(INSERT, *_insert_values(queue, batch))

    async def take_in(
        self, tx: Any, sub: Subscription, *, limit: int, keyed: bool, floor: int
    ) -> Sequence[Delivery]:
        if keyed:
            found = await tx.rows(TAKE_KEYED, sub.queue, limit)
            found.sort()
        else:
            found = await tx.rows(TAKE_FREE, sub.queue, floor, limit)
            found.sort(key=_by_priority)
        return [_delivery(row) for row in found]

    async def has_keyed_in(self, tx: Any, sub: Subscription) -> bool:
        return bool(await tx.rows(HAS_KEYED, sub.queue))

    async def promote_in(self, tx: Any) -> None:
        await tx.send(PROMOTE)

    async def next_due_in(self, tx: Any) -> int | None:
        found = await tx.rows(NEXT_DUE)
        return found[0][0] if found else None

    # -- without a store in the same database -----------------------------------------------------

    async def _receive(self, sub: Subscription, limit: int) -> list[Delivery]:
        if self._closed.is_set():
            return []
        await self._ask(PROMOTE)
        found = await self._ask(RECEIVE, sub.queue, 0, limit, int(self._lease_s * 1e6))
        found.sort(key=_by_priority)
        self._held.update((row[0], row[6]) for row in found)
        return [_delivery(row, received=True) for row in found]

    async def _due_in_s(self) -> float | None:
        found = await self._ask(NEXT_DUE)
        return max(0.0, found[0][0] / 1e6) if found else None

    async def _settle(self, batch: Sequence[Settlement]) -> None:
        by: dict[Verb, list[Settlement]] = {}
        for item in batch:
            by.setdefault(item.verb, []).append(item)
        for verb, some in by.items():
            tags = _tags([item.delivery.tag for item in some])
            if verb is Verb.ACK:
                await self._ask(ACK, *tags)
            elif verb is Verb.REJECT:
                await self._ask(REJECT, *tags, arrays.texts([item.reason for item in some]))
            else:
                delays = arrays.numbers(int(item.delay_s * 1e6) for item in some)
                await self._ask(RELEASE, *tags, delays)
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
        tags = _tags([each.tag for each in batch])
        await self._broker._ask(EXTEND, *tags, int(self._broker._lease_s * 1e6))

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


def _refusal(queue: str, item: Outgoing) -> AckboneError | None:
    """Return why the table cannot hold a message."""
    if len(item.body) > MAX_BODY:
        return MessageTooLarge(f"{item.id}: {len(item.body)} bytes, the limit is {MAX_BODY}")
    names = (("queue", queue), ("id", item.id), ("ordering key", item.key or ""))
    for what, name in names:
        if len(name) > LONGEST_NAME or "\0" in name:
            return InvalidMessage(
                f"{item.id[:60]!r}: its {what} is longer than {LONGEST_NAME} characters or "
                "contains a NUL"
            )
    return None


def _insert_values(queue: str, batch: Sequence[Outgoing]) -> tuple[str, ...]:
    """Return the values of INSERT."""
    headers = [_encode(dict(i.headers)).decode() if i.headers else _NO_HEADERS for i in batch]
    return (
        queue,
        arrays.texts([item.id for item in batch]),
        arrays.numbers(int(item.priority) for item in batch),
        arrays.texts([item.key for item in batch]),
        arrays.numbers(int(max(0.0, item.delay_s) * 1e6) for item in batch),
        arrays.numbers(None if i.ttl_s is None else int(i.ttl_s * 1e6) for i in batch),
        arrays.texts(headers),
        arrays.blobs(item.body for item in batch),
        arrays.numbers(zlib.crc32(item.body) for item in batch),
    )


def _tags(tags: Collection[tuple[int, int]]) -> tuple[str, str]:
    return arrays.numbers(seq for seq, _ in tags), arrays.numbers(count for _, count in tags)


def _by_priority(row: Row) -> tuple[int, int]:
    return -row[2], row[0]


def _delivery(row: Row, *, received: bool = False) -> Delivery:
    seq, message_id, priority, lane, expires_at, sent_at, count, headers, body, published = row
    crc = zlib.crc32(body)
    return Delivery(
        body=body,
        headers=_decode_headers(headers) if headers != _NO_HEADERS else {},
        tag=(seq, count),
        identity=message_id,
        count=count if received else count + 1,
        sent_at_us=sent_at,
        priority=priority,
        key=lane,
        expires_at_us=expires_at,
        intact=crc == published,
        crc=crc,
    )
