"""The partitions of `event_log`: one for each month, made ahead; a default one catches the rest."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg

from ackbone.core.errors import StoreError
from ackbone.core.store import Worker
from ackbone.store.unit import Change, Operation, Tx

if TYPE_CHECKING:
    from .store import PostgresStore

log = logging.getLogger("ackbone.store")

MISSING: LiteralString = (
    "SELECT to_char(m, '\"event_log_\"YYYY_MM') AS name, to_char(m, 'YYYY-MM-DD\"T00:00:00Z\"'),"
    " to_char(m + interval '1 month', 'YYYY-MM-DD\"T00:00:00Z\"')"
    " FROM generate_series(date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC'),"
    " date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC') + interval '3 months',"
    " interval '1 month') m"
    " WHERE to_regclass(to_char(m, '\"event_log_\"YYYY_MM')) IS NULL"
)
"""The next months that have no partition: its name, where it begins, where the next one begins."""


def statements(name: str, begin: str, end: str) -> list[str]:
    """The statements that make one partition. Rows of that month move over from the default one.

    The table is made by itself and then attached: writers wait only while the default partition is
    searched. Only its owner may use it by its own name, because the policies that keep tenants
    apart belong to `event_log`.
    """
    month = f"created_at >= '{begin}' AND created_at < '{end}'"
    return [
        f"CREATE TABLE {name} (LIKE event_log INCLUDING DEFAULTS,"
        f" CONSTRAINT {name}_month CHECK (created_at IS NOT NULL AND {month}))",
        f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY",
        "LOCK TABLE event_log_default IN ACCESS EXCLUSIVE MODE",
        f"WITH caught AS (DELETE FROM event_log_default WHERE {month} RETURNING *)"
        f" INSERT INTO {name} SELECT * FROM caught",
        f"ALTER TABLE event_log ATTACH PARTITION {name} FOR VALUES FROM ('{begin}') TO ('{end}')",
        f"ALTER TABLE {name} DROP CONSTRAINT {name}_month",
    ]


def make_partitions(conn: psycopg.Connection[Any]) -> int:
    """Make the missing partitions in a transaction of the caller; returns how many."""
    missing = conn.execute(MISSING).fetchall()
    for name, begin, end in missing:
        for statement in statements(name, begin, end):
            conn.execute(statement)
    return len(missing)


class PartitionMaker:
    """One step makes the partitions of the next months. Run it under the role `upkeep`."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def step(self, worker: Worker) -> int:
        """Returns how many partitions were made. Until a month has one, the default catches its
        events."""
        made = 0
        for name, begin, end in await self._store.read(MISSING):
            try:
                await self._store.write(_making(name, begin, end), worker_id=worker.worker_id)
                made += 1
            except StoreError as error:
                log.warning("event_log has no partition %s yet: %s", name, error)
        return made


def _making(name: str, begin: str, end: str) -> Operation[None]:
    async def op(tx: Tx, change: Change) -> None:
        await tx.send("SET LOCAL lock_timeout = '2s'")
        for statement in statements(name, begin, end):
            await tx.send(statement)

    return op
