"""Connections of one process, and statements that are transactions of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncRawCursor

from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import StoreUnavailable

from . import arrays
from .address import Address
from .failures import is_away, translate

T = TypeVar("T")
Row = tuple[Any, ...]
log = logging.getLogger("ackbone.store")

CALL_S = 30.0
"""Longest time of one call, in seconds. After that, server and client give up."""
WRITERS, READERS = 6, 3
"""Connections at a time. A transaction may read beside itself: readers never wait for writers."""
KEPT = WRITERS + READERS
"""How many idle connections are kept."""
RECONNECTS = 2

# Batches are joined to their rows one by one, through an index, in the order of the batch, so that
# sorted batches lock in one order. A plan made while the tables were small must not be kept.
_SETTINGS = {
    "TimeZone": "UTC",
    "statement_timeout": f"{CALL_S - 5:.0f}s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "10s",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}
_STILL_THERE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE pid = $1::int AND backend_start = $2::timestamptz"
)
_GONE_WITHIN_S = 5.0


class Unanswered(Exception):
    """A statement was sent, and its answer was lost."""


class Session:
    """One connection, and the server process behind it."""

    def __init__(self, conn: AsyncConnection[Row], backend: tuple[int, Any]) -> None:
        self.conn = conn
        self.backend = backend

    async def close(self) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            await self.conn.close()


class Connections:
    """The connections of one process to one database."""

    def __init__(self, address: Address, clock: Clock | None = None) -> None:
        self.address = address
        self.clock = clock or SystemClock()
        self._idle: list[Session] = []
        self._is_open = False
        self._readers = asyncio.Semaphore(READERS)
        self._running: set[asyncio.Task[Any]] = set()
        self._away_at = -math.inf
        self._on_connect: list[Callable[[], None]] = []
        self.lost: list[tuple[int, Any]] = []
        """Server processes that may still be committing a transaction of a lost connection."""

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Call `callback` for every new connection: commits that were not synced may be gone."""
        self._on_connect.append(callback)

    @property
    def steady_s(self) -> float:
        """How long the database has been reachable without a break, in seconds."""
        return time.monotonic() - self._away_at

    async def open(self) -> None:
        self._is_open = True
        try:
            async with self._translated():
                self._give(await self._connect())
        except BaseException:
            self._is_open = False
            raise

    async def close(self) -> None:
        if self._running:
            await asyncio.wait(set(self._running))
        self._is_open = False
        idle, self._idle = self._idle, []
        for session in idle:
            await session.close()

    async def end_lost(self) -> bool:
        """End server processes that may still commit a transaction of a lost connection. After
        that, everything that they committed can be read. Returns False if there was none."""
        if not self.lost:
            return False
        try:
            async with asyncio.timeout(_GONE_WITHIN_S):
                while self.lost:
                    backend = pid, since = self.lost[-1]
                    # Not in a transaction: it would only see the processes of its begin.
                    if await self.read(_STILL_THERE, str(pid), since):
                        await asyncio.sleep(0.02)
                    elif backend in self.lost:
                        self.lost.remove(backend)
        except TimeoutError:
            raise StoreUnavailable(
                f"{self.address.shown}: a lost connection is still active on the server, so nothing"
                " can be claimed or written to the ledger yet"
            ) from None
        return True

    # -- work -------------------------------------------------------------------------------------

    async def read(self, statement: str, *values: Any) -> list[Row]:
        """Run one statement in its own transaction, again if the connection was stale."""
        return await self._shielded(self._read(statement, values))

    async def once(self, statement: str, *values: Any, within_s: float = CALL_S) -> None:
        """Run one statement in its own transaction, and never a second time.

        Raises Unanswered if it may have been committed, and StoreError if it was not.
        """
        await self._shielded(self._once_only(statement, values, within_s))

    async def _once_only(self, statement: str, values: Sequence[Any], within_s: float) -> None:
        sent = False
        async with self._translated():
            try:
                async with asyncio.timeout(within_s), self._readers, self._session() as session:
                    given = [parameter(value) for value in values]
                    sent = True
                    await AsyncRawCursor(session.conn).execute(
                        statement, given, prepare=True, binary=True
                    )
            except (psycopg.Error, OSError) as error:
                if not is_away(error):
                    raise
                await self._lost()
                if sent and getattr(error, "sqlstate", None) is None:
                    raise Unanswered(str(error) or "no answer in time") from error
                raise

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work, name="ackbone-postgres")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _read(self, statement: str, values: Sequence[Any]) -> list[Row]:
        async with self._translated():
            for attempt in range(RECONNECTS + 1):
                try:
                    async with self._readers, asyncio.timeout(CALL_S), self._session() as session:
                        cursor = AsyncRawCursor(session.conn)
                        sent = [parameter(value) for value in values]
                        await cursor.execute(statement, sent, prepare=True, binary=True)
                        return await cursor.fetchall() if cursor.description else []
                except (psycopg.Error, OSError) as error:
                    if not is_away(error) or attempt == RECONNECTS:
                        raise
                    await self._lost()
        raise AssertionError("unreachable")

    # -- connections ------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        session = self._idle.pop() if self._idle else await self._connect()
        try:
            yield session
        except BaseException:
            await self._after_failure(session)
            raise
        self._give(session)

    async def _after_failure(self, session: Session) -> None:
        """Bring the connection back to a clean state, or close it."""
        status = psycopg.pq.TransactionStatus
        try:
            async with asyncio.timeout(1):
                if session.conn.info.transaction_status in (status.INERROR, status.INTRANS):
                    await session.conn.execute("ROLLBACK")
            if session.conn.info.transaction_status is status.IDLE:
                self._give(session)
                return
        except (psycopg.Error, OSError, TimeoutError) as error:
            log.debug("closing a connection: %s", error)
        await session.close()

    def _give(self, session: Session) -> None:
        if self._is_open and len(self._idle) < KEPT and not session.conn.closed:
            self._idle.append(session)
        else:
            asyncio.get_running_loop().create_task(session.close())

    async def _lost(self) -> None:
        """A connection broke. The others are as old and most likely broken, too: close them."""
        self._away_at = time.monotonic()
        idle, self._idle = self._idle, []
        for session in idle:
            await session.close()

    async def _connect(self) -> Session:
        if not self._is_open:
            raise StoreUnavailable(f"the store ({self.address.shown}) is not open")
        conn = await self.connect()
        try:
            names = ", ".join(f"set_config('{k}', '{v}', false)" for k, v in _SETTINGS.items())
            await conn.execute(f"SELECT {names}")
            cursor = await conn.execute(
                "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
            )
            backend = await cursor.fetchone()
        except BaseException:
            await conn.close()
            raise
        for callback in self._on_connect:
            callback()
        return Session(conn, backend or (0, None))

    async def connect(self) -> AsyncConnection[Row]:
        """Open a connection that belongs to the caller, not to the pool."""
        return await AsyncConnection.connect(
            self.address, autocommit=True, prepare_threshold=None, cursor_factory=AsyncRawCursor
        )

    @contextlib.asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            yield
        except (psycopg.Error, OSError) as error:
            if is_away(error):
                self._away_at = time.monotonic()
            translated = translate(error, self.address)
            if translated is None:
                raise
            raise translated from error


def parameter(value: Any) -> Any:
    """Numbers and lists are sent as text: the statement decides the type of a parameter then."""
    kind = type(value)
    if kind is int:
        return str(value)
    return arrays.texts(value) if kind is list else value
