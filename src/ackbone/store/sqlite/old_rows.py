"""Old rows and files of a SQLite store.

A reader finds the rows that may go, page by page from the oldest on. The writer deletes them by
their rowids and asks again whether the rule still holds: it never searches a table.
"""

from __future__ import annotations

import asyncio

from ackbone.core.store import Worker
from ackbone.store.retention import BATCH, TASKS, Rule, delete_some

from .store import SqliteStore

PAGE = 5000
"""Rows that one reading looks at."""
_LOOK = (
    "SELECT t.rowid, {over}, t.{made} >= ?1 FROM {table} t WHERE t.rowid > ?2 ORDER BY t.rowid"
    " LIMIT ?3"
)
_THESE = "t.rowid IN (SELECT value FROM json_each(?2)) AND {over}"
_DELETE = f"DELETE FROM {{table}} AS t WHERE {_THESE} RETURNING 1"
_DELETE_EFFECTS = (
    "DELETE FROM effects WHERE (tenant_id, subscription, message_id) IN (SELECT t.tenant_id,"
    f" t.subscription, t.message_id FROM queue_executions t WHERE {_THESE})"
)
_ALIVE = "SELECT worker_id FROM workers WHERE state = 'alive'"


class SqliteOldRows:
    """`OldRows` of a SQLite file."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def delete(self, rule: Rule, keep_us: int) -> int:
        gone = after = 0
        deletions = [_sql(_DELETE, rule)]
        if rule is TASKS:
            deletions.insert(0, _sql(_DELETE_EFFECTS, rule))
        while True:
            page = await self._page(rule, keep_us, after)
            over = [rowid for rowid, may_go, _ in page if may_go]
            for at in range(0, len(over), BATCH):
                some = over[at : at + BATCH]
                gone += await delete_some(self._store, deletions, keep_us, some)
            if len(page) < PAGE or all(young for _, _, young in page):
                return gone
            after = page[-1][0]

    async def _page(self, rule: Rule, keep_us: int, after: int) -> list[tuple[int, int, int]]:
        """Rows behind `after`: the rowid, whether it may go, whether it is too young."""
        before_us = self._store.clock.now_us() - keep_us
        found = await self._store.read(_sql(_LOOK, rule), before_us, after, PAGE)
        return [(rowid, may_go, young) for rowid, may_go, young in found]


def _sql(statement: str, rule: Rule) -> str:
    over = rule.over.format(before="?1", us="1")
    return statement.format(table=rule.table, over=over, made=rule.made)


class WorkerFiles:
    """One step removes the files of workers whose process is gone."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def step(self, worker: Worker) -> int:
        """Returns how many files were removed."""
        alive = {worker_id for (worker_id,) in await self._store.read(_ALIVE)}
        return await asyncio.to_thread(self._store.file.tidy, alive)
