"""Quotas: counted in the transactions of claim and finish, one row for each tenant and rule."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from ackbone.core.quota import WAITS_FOR
from ackbone.core.store import Finished, QuotasOf
from ackbone.store.quota_book import COLUMNS, QuotaBook

READ = f"SELECT {COLUMNS} FROM quotas WHERE tenant_id = ? AND name = ?"
WRITE = (
    f"INSERT INTO quotas (tenant_id, name, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (tenant_id, name) DO UPDATE SET window_us = excluded.window_us,"
    " window_start = excluded.window_start, runs = excluded.runs,"
    " llm_calls = excluded.llm_calls, tokens = excluded.tokens, cost = excluded.cost,"
    " deferred_until = excluded.deferred_until, deferred = excluded.deferred"
)
LOOK_AGAIN = (
    "UPDATE queue_executions SET due_at = ?1 WHERE status = 'ready' AND due_at > ?1"
    f" AND error_message GLOB '{WAITS_FOR}*'"
)
USE = (
    "SELECT q.tenant_id, q.name, q.window_start, q.window_us, q.runs, q.llm_calls, q.tokens,"
    " q.cost, (SELECT count(*) FROM queue_executions t WHERE t.status = 'ready'"
    f" AND t.tenant_id = q.tenant_id AND t.error_message = '{WAITS_FOR}' || q.name)"
    " FROM quotas q WHERE ?1 IS NULL OR q.tenant_id = ?1 ORDER BY q.tenant_id, q.name"
)


class SqliteQuotaBook(QuotaBook):
    """Read as it is asked for, written by `save`."""

    def __init__(
        self, conn: sqlite3.Connection, now_us: int, quotas_of: QuotasOf | None = None
    ) -> None:
        super().__init__(now_us, quotas_of)
        self._conn = conn

    def find(self, tenant_id: str, name: str) -> Sequence[Any] | None:
        found: Sequence[Any] | None = self._conn.execute(READ, (tenant_id, name)).fetchone()
        return found

    def correct(self, items: Iterable[Finished]) -> None:
        super().correct(items)
        self.save()

    def save(self) -> None:
        """Write what has changed."""
        for row in self.taken():
            self._conn.execute(WRITE, row)
