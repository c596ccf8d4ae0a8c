"""`SqliteTx`: the unit of work in the writer thread, where no statement waits."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from ackbone.store.letters import Letter
from ackbone.store.unit import Row

from .sql import SQL


class SqliteTx:
    """`ackbone.store.unit.Tx` on the connection of the writer thread."""

    sql = SQL
    repeated = False
    """A commit on a file never loses its answer."""

    def __init__(self, conn: sqlite3.Connection, now_us: int) -> None:
        self.conn = conn
        self.now_us = now_us
        self.letters: dict[str, Letter] = {}

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
