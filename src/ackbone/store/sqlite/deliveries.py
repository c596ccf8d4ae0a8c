"""Deliveries in the SQLite file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ackbone.store.deliveries import StoreDeliveries
from ackbone.store.unit import Rows

from .sql import SQL
from .store import SqliteStore, SqliteTx, run_now

T = TypeVar("T")


class SqliteDeliveries(StoreDeliveries):
    """`Deliveries` on the store's file."""

    sql = SQL.deliveries

    _store: SqliteStore

    def _takes_first(self) -> bool:
        return self._store.file.clock_was_set  # `take` moves the waiting times

    async def _look(self, op: Callable[[Rows, int | None], Awaitable[T]]) -> T:
        """Run all statements in one turn of a reader thread."""
        now = self._store.clock.now_us()
        return await self._store.file.read(lambda conn: run_now(op(SqliteTx(conn, now).rows, now)))
