"""The embedded broker: a queue in the store's own SQLite file.

With a store on the same file, receiving and claiming a message are one transaction (`take_in`). The
row moves from the queue into the store, and there is nothing left to settle. Without such a store,
received rows are marked with their owner. A lock file shows whether the owner is alive; the rows of
a dead owner return to the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

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
    ConfigError,
    MessageTooLarge,
    StoreError,
    StoreUnavailable,
)
from ackbone.core.ids import uuid7_bytes
from ackbone.sqlitefile import rows
from ackbone.sqlitefile.file import SqliteFile, close_file, open_file
from ackbone.sqlitefile.sharing import Beat, forget, is_alive

READY, DELAYED, TAKEN = 0, 1, 2
LEASE_S = 10.0
NET_S = 1.0
"""How often a waiting reader looks without a wake-up, in case one got lost."""
MAX_BODY = 64 * 1024 * 1024

_INSERT = (
    "INSERT INTO messages (queue, state, priority, message_id, lane, due_at, expires_at, sent_at,"
    " headers, body, body_crc)"
)
_INSERT_PLAIN = (
    "INSERT INTO messages (queue, sent_at, headers, priority, message_id, body, body_crc)"
)
"""Most messages: no delay, no expiry, no ordering key, no headers. Half the work."""
_COLUMNS = (
    "seq, message_id, priority, lane, expires_at, sent_at, deliveries, headers, body, body_crc"
)
_SELECT_FREE = (
    f"SELECT {_COLUMNS} FROM messages WHERE queue = ? AND state = 0 AND lane IS NULL"
    " AND priority >= ? ORDER BY priority DESC, seq LIMIT ?"
)
_SELECT_KEYED = (
    f"SELECT {_COLUMNS} FROM messages WHERE queue = ? AND state = 0 AND lane IS NOT NULL"
    " ORDER BY seq LIMIT ?"
)
_HAS_KEYED = "SELECT 1 FROM messages WHERE queue = ? AND state = 0 AND lane IS NOT NULL LIMIT 1"
_IS_OWNER = "SELECT 1 FROM workers WHERE worker_id = ?"
_SELECT_ANY = (
    f"SELECT {_COLUMNS} FROM messages WHERE queue = ? AND state = 0"
    " ORDER BY priority DESC, seq LIMIT ?"
)
_encode = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_NO_HEADERS = "{}"


class SqliteBroker:
    """`Broker`, `Inspectable` and `Transactional` on one SQLite file."""

    capabilities = Capabilities(
        durability=Durability.FSYNC,
        delay=True,
        priority=True,
        ttl=True,
        ordered=True,
        release=True,
        reject=True,
        max_body=MAX_BODY,
    )

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._opened: SqliteFile | None = None
        self._owner: int | None = None
        self._beat: Beat | None = None
        self._received = False
        self._closed = asyncio.Event()
        self.publish_within_s: float | None = None
        """Refuse messages that could not be written within this time."""

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> SqliteBroker:
        """Read `sqlite:///` and the path of a file whose schema exists."""
        path = url.partition(":///")[2]
        if not path:
            raise ConfigError(
                [f"broker: {url[:60]} names no file; write sqlite:///path/to/file.db"]
            )
        return cls(Path(path), clock)

    @property
    def file(self) -> SqliteFile:
        if self._opened is None:
            raise StoreUnavailable(f"{self._path} is not open")
        return self._opened

    async def open(self) -> None:
        if self._opened is None:
            self._opened = await asyncio.to_thread(open_file, self._path, self._clock)
            self._closed = asyncio.Event()

    async def close(self) -> None:
        if self._opened is None:
            return
        self._closed.set()
        file, self._opened = self._opened, None
        try:
            if self._received:  # runs after the operations that were asked for before
                await file.write(self._disown)
        finally:
            if self._beat is not None:
                self._beat.close()
            self._owner = self._beat = None
            await asyncio.to_thread(close_file, file)

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        refused = _too_long(batch)
        good = [item for n, item in enumerate(batch) if n not in refused] if refused else batch
        failure: AckboneError | None = None
        if good:
            try:
                await self.file.write(
                    lambda conn: self._publish(conn, queue, good), within_s=self.publish_within_s
                )
            except StoreError as error:
                failure = error
        return [Result(id=item.id, error=refused.get(n, failure)) for n, item in enumerate(batch)]

    async def subscribe(self, sub: Subscription, *, room: int) -> SqliteSource:
        self._received = True
        return SqliteSource(self, sub)

    async def health(self) -> Health:
        if self._opened is None:
            return Health(ok=False, detail="not open")
        try:
            await self.file.write(lambda conn: conn.execute("SELECT 1").fetchone(), durable=False)
        except StoreError as error:
            return Health(ok=False, detail=str(error))
        return Health(ok=True)

    async def stats(self, queues: Collection[str] = ()) -> Sequence[QueueStats]:
        now = self._clock.now_us()
        found = await self.file.read(
            lambda conn: conn.execute(
                "SELECT queue, count(*) FILTER (WHERE state = 0),"
                " count(*) FILTER (WHERE state = 1),"
                " count(*) FILTER (WHERE state = 2), min(sent_at) FILTER (WHERE state = 0)"
                " FROM messages GROUP BY queue ORDER BY queue"
            ).fetchall()
        )
        return [
            QueueStats(
                queue=queue,
                ready=ready,
                delayed=delayed,
                in_flight=taken,
                oldest_age_s=None if oldest is None else max(0.0, (now - oldest) / 1e6),
            )
            for queue, ready, delayed, taken, oldest in found
        ]

    def _publish(self, conn: sqlite3.Connection, queue: str, batch: Sequence[Outgoing]) -> None:
        self._insert(conn, queue, batch, self._clock.now_us())
        self.file.wake_after_commit()

    @staticmethod
    def _insert(conn: sqlite3.Connection, queue: str, batch: Sequence[Outgoing], now: int) -> None:
        plain = [
            (item.priority, item.id, item.body, zlib.crc32(item.body))
            for item in batch
            if item.key is None and not item.headers and not item.delay_s and item.ttl_s is None
        ]
        if len(plain) == len(batch):
            rows.insert(conn, _INSERT_PLAIN, plain, shared=(queue, now, _NO_HEADERS))
        else:
            rows.insert(conn, _INSERT, _full_rows(queue, batch, now))

    # -- inside the store's transaction, `SqliteTx` -----------------------------------------------

    async def publish_in(self, tx: Any, queue: str, batch: Sequence[Outgoing]) -> None:
        self._insert(tx.conn, queue, batch, tx.now_us)

    async def take_in(
        self, tx: Any, sub: Subscription, *, limit: int, keyed: bool, floor: int
    ) -> Sequence[Delivery]:
        if keyed:
            found = tx.conn.execute(_SELECT_KEYED, (sub.queue, limit)).fetchall()
        else:
            found = tx.conn.execute(_SELECT_FREE, (sub.queue, floor, limit)).fetchall()
        if found:
            _delete(tx.conn, [row[0] for row in found])
        return [_delivery(row) for row in found]

    async def has_keyed_in(self, tx: Any, sub: Subscription) -> bool:
        return tx.conn.execute(_HAS_KEYED, (sub.queue,)).fetchone() is not None

    async def promote_in(self, tx: Any) -> None:
        _promote(tx.conn, tx.now_us)

    async def next_due_in(self, tx: Any) -> int | None:
        due = _next_due(tx.conn)
        return None if due is None else due - tx.now_us

    # -- without a store on the same file ---------------------------------------------------------

    def _receive_in(
        self, conn: sqlite3.Connection, sub: Subscription, limit: int
    ) -> tuple[list[Delivery], float | None]:
        if self._closed.is_set():
            return [], None
        now = self._clock.now_us()
        owner = self._own(conn)
        self._reclaim(conn)
        _promote(conn, now)
        next_due = _next_due(conn)
        found = conn.execute(_SELECT_ANY, (sub.queue, limit)).fetchall()
        if found:
            seqs = _encode([row[0] for row in found]).decode()
            conn.execute(
                "UPDATE messages SET state = 2, worker_id = ?, deliveries = deliveries + 1"
                " WHERE seq IN (SELECT value FROM json_each(?))",
                (owner, seqs),
            )
        if self._beat is not None:
            self._beat.beat()
        due_in = None if next_due is None else (next_due - now) / 1e6
        return [_delivery(row) for row in found], due_in

    def _settle_in(self, conn: sqlite3.Connection, batch: Sequence[Settlement]) -> None:
        now = self._clock.now_us()
        acked: list[Any] = []
        for item in batch:
            seq = item.delivery.tag
            if item.verb is Verb.REJECT:
                conn.execute(
                    "INSERT INTO dead_letters (id, subscription, message_id, queue_name, reason,"
                    " error, body, body_info, body_crc, failed_at)"
                    " SELECT ?, queue, message_id, queue, 'rejected', ?, body, headers, body_crc, ?"
                    " FROM messages WHERE seq = ? AND state = 2 AND worker_id = ?",
                    (uuid7_bytes(), item.reason, now, seq, self._owner),
                )
            if item.verb is Verb.RELEASE:
                due = now + int(item.delay_s * 1e6) if item.delay_s > 0 else None
                conn.execute(
                    "UPDATE messages SET state = ?, due_at = ?, worker_id = NULL"
                    " WHERE seq = ? AND state = 2 AND worker_id = ?",
                    (DELAYED if due else READY, due, seq, self._owner),
                )
                self.file.wake_after_commit()
            else:
                acked.append((seq, self._owner))
        conn.executemany(
            "DELETE FROM messages WHERE seq = ? AND state = 2 AND worker_id = ?", acked
        )

    def _own(self, conn: sqlite3.Connection) -> int:
        """Return the owner id for rows that this broker takes. It is alive as long as the
        process."""
        known = self._owner
        # An operation may be undone and run again, so the id is valid only while its row exists.
        if known is not None and conn.execute(_IS_OWNER, (known,)).fetchone() is not None:
            return known
        cursor = conn.execute(
            "INSERT INTO workers (name, state, started_at) VALUES ('broker', 'alive', ?)",
            (self._clock.now_us(),),
        )
        owner = cursor.lastrowid or 0
        if owner != known:
            if self._beat is not None:
                self._beat.close()
            self._beat = Beat(self.file.workers_folder, owner, self._clock)
            self._owner = owner
        return owner

    def _disown(self, conn: sqlite3.Connection) -> None:
        """Release the messages that this broker took."""
        if self._owner is not None:
            self._return_rows(conn, [self._owner])

    def _reclaim(self, conn: sqlite3.Connection) -> None:
        owners = conn.execute("SELECT DISTINCT worker_id FROM messages WHERE state = 2").fetchall()
        dead = [
            owner
            for (owner,) in owners
            if owner != self._owner
            and not is_alive(self.file.workers_folder, owner, lease_s=LEASE_S, clock=self._clock)
        ]
        if dead:
            self._return_rows(conn, dead)

    def _return_rows(self, conn: sqlite3.Connection, owners: Sequence[int]) -> None:
        for owner in owners:
            conn.execute(
                "UPDATE messages SET state = 0, worker_id = NULL WHERE state = 2 AND worker_id = ?",
                (owner,),
            )
            # No event names this owner, so its row is not needed any more.
            conn.execute("DELETE FROM workers WHERE worker_id = ?", (owner,))
            forget(Path(f"{self._path}.workers"), owner)


class SqliteSource:
    """One queue, read without a store on the same file. It reads no message that nobody
    receives."""

    def __init__(self, broker: SqliteBroker, sub: Subscription) -> None:
        self._broker = broker
        self._sub = sub

    async def receive(self, *, limit: int, wait: float) -> Sequence[Delivery]:
        broker = self._broker
        file, clock, closed = broker.file, broker._clock, broker._closed
        woken = file.subscribe()
        deadline = clock.monotonic() + wait
        try:
            while True:
                woken.clear()
                got, due_in = await self._taken(limit)
                left = deadline - clock.monotonic()
                if got or left <= 0 or closed.is_set():
                    return got
                pause = min(left, NET_S, NET_S if due_in is None else max(0.0, due_in))
                await _first_of(closed, woken, seconds=pause)
                if closed.is_set():
                    return ()
        finally:
            file.unsubscribe(woken)

    async def _taken(self, limit: int) -> tuple[list[Delivery], float | None]:
        """Take messages for `receive`. They are released if the receiver was cancelled."""
        broker, sub = self._broker, self._sub
        asked = asyncio.ensure_future(
            broker.file.write(lambda conn: broker._receive_in(conn, sub, limit))
        )
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            # Raise the cancellation, not this error. Either nothing was taken, or it returns to the
            # queue when this owner has ended.
            with contextlib.suppress(StoreError):
                got, _ = await asked
                await self.settle([Settlement(delivery=each, verb=Verb.RELEASE) for each in got])
            raise

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        await self._broker.file.write(lambda conn: self._broker._settle_in(conn, batch))
        return [Result(id=item.delivery.identity or "") for item in batch]

    async def pause(self) -> None:
        """Do nothing: all messages that were read were received."""


async def _first_of(*events: asyncio.Event, seconds: float) -> None:
    waits = {asyncio.ensure_future(event.wait()) for event in events}
    _, pending = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


def _delete(tx: sqlite3.Connection, seqs: Sequence[int]) -> None:
    first, last = min(seqs), max(seqs)
    if last - first + 1 == len(
        seqs
    ):  # consecutive rows, as most are: one range instead of one search per row
        tx.execute("DELETE FROM messages WHERE seq BETWEEN ? AND ?", (first, last))
        return
    marks = _encode(seqs).decode()
    tx.execute("DELETE FROM messages WHERE seq IN (SELECT value FROM json_each(?))", (marks,))


def _promote(tx: sqlite3.Connection, now_us: int) -> None:
    """Make messages ready whose delay is over."""
    due = _next_due(tx)
    if due is not None and due <= now_us:
        tx.execute(
            "UPDATE messages SET state = 0, due_at = NULL WHERE state = 1 AND due_at <= ?",
            (now_us,),
        )


def _next_due(tx: sqlite3.Connection) -> int | None:
    found: int | None = tx.execute("SELECT min(due_at) FROM messages WHERE state = 1").fetchone()[0]
    return found


def _too_long(batch: Sequence[Outgoing]) -> dict[int, AckboneError]:
    """Return errors for messages whose body is too long, by position in the batch."""
    if sum([len(item.body) for item in batch]) <= MAX_BODY:
        return {}
    return {
        n: MessageTooLarge(f"{item.id}: {len(item.body)} bytes, the limit is {MAX_BODY}")
        for n, item in enumerate(batch)
        if len(item.body) > MAX_BODY
    }


def _full_rows(queue: str, batch: Sequence[Outgoing], now: int) -> list[tuple[Any, ...]]:
    return [
        (
            queue,
            DELAYED if item.delay_s > 0 else READY,
            item.priority,
            item.id,
            item.key,
            now + int(item.delay_s * 1e6) if item.delay_s > 0 else None,
            None if item.ttl_s is None else now + int((item.delay_s + item.ttl_s) * 1e6),
            now,
            _encode(dict(item.headers)).decode() if item.headers else _NO_HEADERS,
            item.body,
            zlib.crc32(item.body),
        )
        for item in batch
    ]


def _delivery(row: tuple[Any, ...]) -> Delivery:
    seq, message_id, priority, lane, expires_at, sent_at, count, headers, body, published = row
    crc = zlib.crc32(body)
    return Delivery(
        body=body,
        headers=_decode_headers(headers) if headers != _NO_HEADERS else {},
        tag=seq,
        identity=message_id,
        count=count + 1,
        sent_at_us=sent_at,
        priority=priority,
        key=lane,
        expires_at_us=expires_at,
        intact=crc == published,
        crc=crc,
    )
