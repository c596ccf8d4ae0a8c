"""`SqliteTx`: the unit of work in the writer thread, where no statement waits."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from ackbone.core.broker import Transactional
from ackbone.core.errors import StoreUnavailable
from ackbone.store.letters import Letter
from ackbone.store.tables import (
    GrantedRuns,
    KeyRows,
    LaneRows,
    NothingGranted,
    QueueRows,
    QuotaRows,
    TaskRows,
)
from ackbone.store.unit import Row

from .delivery_rows import SqliteDeliveryRows
from .key_rows import SqliteKeyRows
from .lane_rows import SqliteLaneRows
from .outgoing import SqliteOutgoing
from .queue_rows import SqliteQueueRows
from .quotas import SqliteQuotaRows
from .sql import SQL
from .task_rows import SqliteTaskRows

_STATE = "SELECT state FROM workers WHERE worker_id = ?"


class SqliteTx:
    """`ackbone.store.unit.Tx` on the connection of the writer thread."""

    sql = SQL
    repeated = False
    """A commit on a file never loses its answer."""
    exclusive = True
    """The file has one writer at a time."""
    granted: GrantedRuns = NothingGranted()

    def __init__(
        self,
        conn: sqlite3.Connection,
        now_us: int,
        queue: Transactional | None = None,
        holds: Callable[[str], bool] = lambda queue: False,
    ) -> None:
        """`queue`: the broker whose queues are in the same file, if there is one. `holds` returns
        True for these."""
        self.conn = conn
        self.now_us = now_us
        self._queue = queue
        self._holds = holds
        self.letters: dict[str, Letter] = {}
        self.if_unknown: Callable[[], None] | None = None
        self._state: str | None = None
        """The state of the worker that this transaction is for, once it was asked for."""

    @property
    def tasks(self) -> TaskRows:
        return SqliteTaskRows(self.conn, self.now_us)

    @property
    def keys(self) -> KeyRows:
        return SqliteKeyRows(self.conn, self.now_us)

    @property
    def lanes(self) -> LaneRows:
        return SqliteLaneRows(self.conn, self.now_us, self.require_alive)

    @property
    def quotas(self) -> QuotaRows:
        return SqliteQuotaRows(self.conn)

    @property
    def queue(self) -> QueueRows | None:
        if self._queue is None:
            return None
        return SqliteQueueRows(self.conn, self.now_us, self._queue)

    @property
    def deliveries(self) -> SqliteDeliveryRows:
        return SqliteDeliveryRows(self.conn)

    @property
    def outgoing(self) -> SqliteOutgoing:
        return SqliteOutgoing(self.conn, self._queue, self._holds)

    async def rows(self, statement: str, *values: Any) -> list[Row]:
        return self.conn.execute(statement, parameters(values)).fetchall()

    async def send(self, statement: str, *values: Any) -> None:
        self.conn.execute(statement, parameters(values))

    def before_end(self, statement: str, *values: Any) -> None:
        self.conn.execute(statement, parameters(values))

    def at_end(self, statement: str, *values: Any) -> None:
        self.conn.execute(statement, parameters(values))

    async def moment(self) -> int:
        return self.now_us

    async def look_at_clock(self) -> None:
        """Do nothing: no other transaction was committed since this one was begun."""

    async def require_alive(self, worker_id: int, *, or_leaving: bool = False) -> None:
        if self._state is None:  # asked for each part of a batch
            found = self.conn.execute(_STATE, (worker_id,)).fetchone()
            self._state = "" if found is None else str(found[0])
        if self._state not in (("alive", "leaving") if or_leaving else ("alive",)):
            # No reaper would find what a dead id claims. The worker registers again, and asks.
            raise StoreUnavailable(f"worker {worker_id} was declared dead; nothing claimed")

    async def hold_deliveries(self) -> int:
        return self.now_us  # the file has one writer at a time


def parameters(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A list of texts is given to SQLite as JSON."""
    if any(type(value) is list for value in values):
        return tuple(
            msgspec.json.encode(value).decode() if type(value) is list else value
            for value in values
        )
    return values
