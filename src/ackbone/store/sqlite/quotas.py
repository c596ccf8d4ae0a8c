"""`quotas` on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from ackbone.store.quota_book import COLUMNS
from ackbone.store.tables import QuotaName

READ = f"SELECT {COLUMNS} FROM quotas WHERE tenant_id = ? AND name = ?"
WRITE = (
    f"INSERT INTO quotas (tenant_id, name, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (tenant_id, name) DO UPDATE SET window_us = excluded.window_us,"
    " window_start = excluded.window_start, runs = excluded.runs,"
    " llm_calls = excluded.llm_calls, tokens = excluded.tokens, cost = excluded.cost,"
    " deferred_until = excluded.deferred_until, deferred = excluded.deferred"
)


class SqliteQuotaRows:
    """`QuotaRows` in one transaction of the writer thread."""

    def __init__(self, conn: sqlite3.Connection) -> None:
        self._conn = conn

    async def lock(self, names: Sequence[QuotaName]) -> Mapping[QuotaName, Sequence[Any]]:
        found = {name: self._conn.execute(READ, name).fetchone() for name in names}
        return {name: row for name, row in found.items() if row is not None}

    def write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        for row in rows:
            self._conn.execute(WRITE, row)
