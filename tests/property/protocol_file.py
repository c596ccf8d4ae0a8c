"""One SQLite database for the protocol model: every operation is a transaction run on the spot.

`SqliteFile` has a writer thread; here the caller's own step is the writer, so that a seed alone
decides what happens in which order. A step may be told to fail in the two ways that a database has:
nothing was written, or everything was and the answer got lost. And the power may fail: what was
synced is there again afterwards, what was only committed perhaps, and never the later without the
earlier.
"""

from __future__ import annotations

import functools
import random
import sqlite3
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from ackbone.core.clock import Clock
from ackbone.core.errors import StoreUnavailable
from ackbone.sqlitefile.file import add_functions
from ackbone.store.sqlite.migrate import make_tables

T = TypeVar("T")
Rewrite = Callable[[str], str]


class Fault(StrEnum):
    """How the next transaction ends."""

    NONE = "none"
    UNDONE = "undone"
    """Rolled back; the caller is told."""
    UNKNOWN = "unknown"
    """Committed; the caller is told that it failed."""


@functools.cache
def empty_database() -> bytes:
    """A database with the real schema, as bytes: copying it is much faster than making it."""
    conn = sqlite3.connect(":memory:")
    make_tables(conn)
    image = conn.serialize()
    conn.close()
    return image


class ModelConnection(sqlite3.Connection):
    """A connection on which faults can be planted: statements are rewritten before they run."""

    rewrite: Rewrite | None = None
    rewritten: int = 0
    """How often a planted fault changed a statement: a plant that never applies proves nothing."""
    leaks: str | None = None
    """A table whose rows survive a rollback, as if they had been written elsewhere."""
    _leaked: list[tuple[str, Any]]
    _known: dict[str, str]

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        if self.rewrite is None and self.leaks is None:
            return super().execute(sql, parameters)
        return self._planted(sql, parameters)

    def plant(self, rewrite: Rewrite | None, leaks: str | None) -> None:
        self.rewrite, self.leaks = rewrite, leaks
        self._leaked, self._known = [], {}

    def _planted(self, sql: str, parameters: Any) -> sqlite3.Cursor:
        text = self._known.get(sql)
        if text is None:
            text = self._known[sql] = sql if self.rewrite is None else self.rewrite(sql)
        if text != sql:
            self.rewritten += 1
        if self.leaks is not None and f"INTO {self.leaks} " in sql:
            self._leaked.append((text, parameters))
        cursor = super().execute(text, parameters)
        if sql == "ROLLBACK":
            for leaked in self._leaked:
                super().execute(*leaked)
                self.rewritten += 1
        if sql in ("ROLLBACK", "COMMIT"):
            self._leaked.clear()
        return cursor


def _opened(image: bytes) -> ModelConnection:
    conn = sqlite3.connect(
        ":memory:", isolation_level=None, cached_statements=512, factory=ModelConnection
    )
    conn.deserialize(image)
    add_functions(conn)
    return conn


class InlineFile:
    """What the store and the queue see as their `SqliteFile`."""

    def __init__(self, clock: Clock) -> None:
        self.path = Path("/model.db")
        self.workers_folder = Path("/model.db.workers")
        self.clock = clock
        self.ledger_head = b""
        self.clock_in_doubt = False
        self.fault = Fault.NONE
        self.committed = False
        """Was the last transaction really committed, whatever its caller was told?"""
        self.result: Any = None
        """What it returned, if so."""
        self.conn = _opened(empty_database())
        self.lazy = False
        """A planted fault: who asks late that its commit be synced is not heard."""
        self.remembers = False
        """Only where the power will fail: each commit is copied for that."""
        self._sync_wanted = False
        self._left_by_a_power_cut = [empty_database()]
        """What the disk may hold after one: the last synced commit, and each one since."""
        self._rollback_hooks: list[Callable[[], None]] = []

    async def write(
        self,
        op: Callable[[sqlite3.Connection], T],
        *,
        durable: bool = True,
        within_s: float | None = None,
    ) -> T:
        fault, self.fault = self.fault, Fault.NONE
        self.committed, self.result = False, None
        self._sync_wanted = durable
        self.conn.execute("BEGIN IMMEDIATE")
        try:
            result = op(self.conn)
        except BaseException:
            self._roll_back()
            raise
        if fault is Fault.UNDONE:
            self._roll_back()
            raise StoreUnavailable("nothing was written")
        self.conn.execute("COMMIT")
        self.committed, self.result = True, result
        if self.remembers:
            self._remember()
        if fault is Fault.UNKNOWN:
            self._tell_hooks()
            raise StoreUnavailable("the answer was lost")
        return result

    def read_sync(self, op: Callable[[sqlite3.Connection], T]) -> T:
        return op(self.conn)

    async def read(self, op: Callable[[sqlite3.Connection], T]) -> T:
        return op(self.conn)

    def report_long_wait(self) -> None:
        """Nobody waits for a turn here."""

    def on_rollback(self, hook: Callable[[], None]) -> None:
        self._rollback_hooks.append(hook)

    def wake_after_commit(self, *_: object) -> None:
        """Nobody sleeps here: the scheduler decides who moves."""

    def sync_commit(self) -> None:
        if self.lazy:
            self.conn.rewritten += 1
        else:
            self._sync_wanted = True

    def cut_power(self, rng: random.Random) -> None:
        """Back to what the disk holds. Whoever had the file open is gone."""
        self._rollback_hooks.clear()
        before, self.conn = self.conn, _opened(rng.choice(self._left_by_a_power_cut))
        self.conn.plant(before.rewrite, before.leaks)
        self.conn.rewritten = before.rewritten
        before.close()

    def close(self) -> None:
        self.conn.close()

    def _remember(self) -> None:
        if self._sync_wanted:
            self._left_by_a_power_cut.clear()
        self._left_by_a_power_cut.append(self.conn.serialize())

    def _roll_back(self) -> None:
        self.conn.execute("ROLLBACK")
        self._tell_hooks()

    def _tell_hooks(self) -> None:
        for hook in self._rollback_hooks:
            hook()
