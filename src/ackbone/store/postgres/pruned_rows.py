"""The deletion of pruned rows: whole months with their partition, the others row by row.

A row may be deleted if the checkpoint lists its chain at its number or a later one. Other rows of
an old month move to the default partition before the month is dropped. They are the ends of
living chains, which a writer that forgot a chain reads from the table.

All of it uses a connection of its own: the advisory lock that keeps other processes out belongs to
the connection and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
from psycopg import AsyncConnection, errors

from ackbone.core.clock import to_us
from ackbone.pgserver import arrays
from ackbone.pgserver.arrays import moment
from ackbone.pgserver.connections import Row
from ackbone.pgserver.failures import translate
from ackbone.store.ledger import PRUNED_TASK, TENANT
from ackbone.store.retention import DAY_US

from .database import Database
from .seals import LATE_US

log = logging.getLogger("ackbone.ledger")

BATCH = 20_000
FIRST_US, WIDEST_US = 600_000_000, DAY_US
"""How many microseconds of events one statement looks at: it adapts to `BATCH`, up to a day."""
MOST_MOVED = 5000
"""A month with more rows to keep than this is not dropped."""
TRIES = 5
_SETTINGS = {
    "TimeZone": "UTC",
    "statement_timeout": "15min",
    # Writers queue up behind a statement that waits to drop a month.
    "lock_timeout": "300ms",
    # A deletion that a crash of the server undoes is made again.
    "synchronous_commit": "off",
}
_ONLY_ONE = "SELECT pg_try_advisory_lock(7310579635104525)"
_LIVING = "SELECT worker_id FROM workers WHERE state IN ('alive', 'leaving')"
_PARTITIONS = (
    "SELECT p.oid::regclass::text, p.relname, pg_has_role(p.relowner, 'USAGE')"
    " AND pg_has_role(e.relowner, 'USAGE') FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhrelid"
    " JOIN pg_class e ON e.oid = i.inhparent WHERE e.oid = 'event_log'::regclass ORDER BY 2"
)
_HEADS = (
    "heads AS MATERIALIZED (SELECT h ->> 0 AS tenant_id, (h ->> 1)::bigint AS worker_id,"
    " (h ->> 2)::bigint AS seq FROM event_log c, json_array_elements(c.data -> 'chains') h"
    f" WHERE c.tenant_id = '{TENANT}' AND c.task_id = '{PRUNED_TASK}' AND c.id = $1::uuid)"
)
_MAY_GO = "e.seq < h.seq OR (e.seq = h.seq AND e.worker_id <> ALL($2::bigint[]))"
_KEPT = (
    f"WITH {_HEADS} SELECT e.ctid::text FROM {{name}} e LEFT JOIN heads h USING (tenant_id,"
    f" worker_id) WHERE ({_MAY_GO}) IS NOT TRUE LIMIT $3::int"
)
_SPAN = (
    f"e.created_at >= {moment('$3::bigint')} AND e.created_at < {moment('$4::bigint')} AND {{here}}"
)
_DELETE = (
    f"WITH {_HEADS}, found AS MATERIALIZED (SELECT e.ctid AS at FROM {{table}} e JOIN heads h"
    f" USING (tenant_id, worker_id) WHERE {_SPAN} AND ({_MAY_GO}) LIMIT $5::int),"
    f" gone AS (DELETE FROM {{table}} e WHERE {_SPAN} AND ctid = ANY(ARRAY(SELECT at FROM found))"
    " RETURNING 1) SELECT (SELECT count(*) FROM found), (SELECT count(*) FROM gone)"
)
_OLDEST = "SELECT min(e.created_at) FROM {table} e WHERE {here}"
_MONTH = re.compile(r"event_log_(\d{4})_(\d\d)")


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """How much was deleted."""

    rows: int = 0
    """One by one."""
    months: int = 0
    """Dropped with all their rows."""
    all: bool = True
    """False if a lock was in the way and some rows are left for the next step."""

    def __add__(self, other: Gone) -> Gone:
        return Gone(
            rows=self.rows + other.rows,
            months=self.months + other.months,
            all=self.all and other.all,
        )


class _Partition(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """The name as it is written in SQL."""
    month: tuple[int, int] | None
    """When it begins and ends (µs); None for the default partition."""
    ours: bool
    """Whether this role may drop it."""

    def sql(self, statement: str) -> str:
        """The statement for the rows of this partition. Only its owner may use its name."""
        here = f"e.tableoid = '{self.name}'::regclass"
        return statement.format(table=self.name if self.ours else "event_log", here=here)


@asynccontextmanager
async def pruned_rows(database: Database) -> AsyncIterator[PrunedRows | None]:
    """The rows, for one step; None if another process prunes them. Raises StoreError if the server
    is away."""
    conn: AsyncConnection[Row] | None = None
    try:
        conn = await database.connect()
        names = ", ".join(f"set_config('{k}', '{v}', false)" for k, v in _SETTINGS.items())
        await conn.execute(f"SELECT {names}")
        ((alone,),) = await _all(conn, _ONLY_ONE)
        yield PrunedRows(conn) if alone else None
    except (psycopg.Error, OSError) as error:
        translated = translate(error, database.address)
        if translated is None:
            raise
        raise translated from error
    finally:
        if conn is not None:
            await conn.close()


class PrunedRows:
    """Deletes rows that a checkpoint lists, and no others."""

    def __init__(self, conn: AsyncConnection[Row]) -> None:
        self._conn = conn

    async def remove(self, checkpoint_id: str, at_us: int) -> Gone:
        """Delete every row that this checkpoint covers. Its anchor was made at `at_us`."""
        living = arrays.numbers(worker_id for (worker_id,) in await _all(self._conn, _LIVING))
        given = (checkpoint_id, living)
        gone = Gone()
        for part in await self._partitions():
            if part.month is not None and part.month[1] <= at_us - LATE_US and part.ours:
                gone += await self._month(part, given)
            elif part.month is None or part.month[0] < at_us + LATE_US:
                gone += await self._rows(part, given, at_us + LATE_US)
        if gone.rows or gone.months:
            log.info("pruned: %d months of events, and %d single events", gone.months, gone.rows)
        return gone

    async def _partitions(self) -> list[_Partition]:
        return [
            _Partition(name=name, month=_month_of(short), ours=ours)
            for name, short, ours in await _all(self._conn, _PARTITIONS)
        ]

    # -- months -----------------------------------------------------------------------------------

    async def _month(self, part: _Partition, given: tuple[str, str]) -> Gone:
        found = await _all(self._conn, _KEPT.format(name=part.name), *given, str(MOST_MOVED + 1))
        kept = [ctid for (ctid,) in found]
        if len(kept) > MOST_MOVED:
            assert part.month is not None  # noqa: S101 - it is one
            return await self._rows(part, given, part.month[1])
        for attempt in range(TRIES):
            try:
                await self._drop(part, kept)
            except (errors.LockNotAvailable, errors.DeadlockDetected):
                await asyncio.sleep(random.uniform(0.1, 0.3) * (attempt + 1))
            else:
                return Gone(months=1)
        log.info("%s is not dropped yet: another connection is reading the ledger", part.name)
        return Gone(all=False)

    async def _drop(self, part: _Partition, kept: Sequence[str]) -> None:
        """Drop a month in one transaction."""
        async with self._conn.transaction():
            await self._conn.execute(f"ALTER TABLE event_log DETACH PARTITION {part.name}")
            if kept:
                await self._conn.execute(
                    f"INSERT INTO event_log SELECT * FROM {part.name} WHERE ctid = ANY($1::tid[])",
                    (arrays.texts(kept),),
                )
            await self._conn.execute(f"DROP TABLE {part.name}")

    # -- rows -------------------------------------------------------------------------------------

    async def _rows(self, part: _Partition, given: tuple[str, str], end_us: int) -> Gone:
        """Delete from the oldest row on, span by span, so that deleted rows are not read again."""
        at_us = part.month[0] if part.month is not None else await self._oldest(part)
        if at_us is None:
            return Gone()
        statement = part.sql(_DELETE)
        end_us = end_us if part.month is None else min(end_us, part.month[1])
        gone, width_us = 0, FIRST_US
        while at_us < end_us:
            upto_us = min(at_us + width_us, end_us)
            span = (str(at_us), str(upto_us), str(BATCH))
            ((found, deleted),) = await _all(self._conn, statement, *given, *span)
            gone += deleted
            if found < BATCH:
                at_us, width_us = upto_us, min(WIDEST_US, width_us * 2)
            else:
                width_us = max(1, width_us // 2)
        return Gone(rows=gone)

    async def _oldest(self, part: _Partition) -> int | None:
        ((oldest,),) = await _all(self._conn, part.sql(_OLDEST))
        return None if oldest is None else to_us(oldest)


async def _all(conn: AsyncConnection[Row], statement: str, *values: Any) -> list[Row]:
    cursor = await conn.execute(statement, values)
    return await cursor.fetchall()


def _month_of(table: str) -> tuple[int, int] | None:
    named = _MONTH.fullmatch(table)
    if named is None:
        return None
    year, month = int(named[1]), int(named[2])
    begin = datetime(year, month, 1, tzinfo=UTC)
    end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return to_us(begin), to_us(end)
