"""A ledger on PostgreSQL, written as the engine writes it, by a clock that the test moves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg

from ackbone.core import events
from ackbone.core.store import Worker
from ackbone.store.anchors import Anchors
from ackbone.store.ledger_verifier import LedgerReport
from ackbone.store.postgres.partitions import PartitionMaker
from ackbone.store.postgres.prune import Pruner
from ackbone.store.postgres.seals import PostgresChainEnds
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.postgres.verify import verify_ledger
from tests.servers.postgres_clock import ServerClock

KEY = b"k" * 32
DAY_S = 86_400.0


class PostgresBook:
    """Several tenants, several workers, and a partition for each month of the clock's."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self.anchor_file = home / "ledger.anchors"
        self.clock = ServerClock(url)
        self.store = PostgresStore(url, lease_s=1e9, clock=self.clock)
        self.workers: list[Worker] = []
        ends = PostgresChainEnds(self.store)
        self.anchors = Anchors(self.store, ends, key=KEY, anchor_file=self.anchor_file)

    async def open(self) -> None:
        await self.store.open()
        self.workers = [await self.store.register(f"w{n}") for n in range(2)]
        await PartitionMaker(self.store).step(self.workers[0])

    async def close(self) -> None:
        await self.store.close()
        self.clock.close()

    async def write(self, count: int, *, tenants: tuple[str, ...] = ("acme", "zeta")) -> None:
        """`count` events in each chain."""
        for n in range(count):
            for worker in self.workers:
                await self.one(worker, *tenants, task=f"m{n}")

    async def one(self, worker: Worker, *tenants: str, task: str = "m") -> None:
        async def op(tx: Any, change: Any) -> None:
            data = {"status": "success", "text": "é"}
            change.entries += [(t, "orders", task, events.SUCCEEDED, data) for t in tenants]

        await self.store.write(op, worker_id=worker.worker_id)

    async def anchor(self) -> None:
        self.clock.advance(90)
        assert await self.anchors.step(self.workers[0]) is not None

    async def days(self, count: int, *, each: int = 5, apart: int = 1) -> None:
        """So many times events and an anchor, some days apart."""
        for _ in range(count):
            await self.write(each)
            await self.anchor()
            self.clock.advance(apart * DAY_S - 90)
            await PartitionMaker(self.store).step(self.workers[0])

    def pruner(self, keep_days: float) -> Pruner:
        return Pruner(self.store, key=KEY, keep_days=keep_days)

    def verify(self) -> LedgerReport:
        return verify_ledger(self.url, KEY, self.anchor_file)

    def assert_whole(self) -> LedgerReport:
        report = self.verify()
        assert report.ok, [str(each) for each in report.findings]
        return report

    def rows(self, sql: str, *values: Any) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as conn:
            cursor = conn.execute(sql, values)
            return cursor.fetchall() if cursor.description else [(cursor.rowcount,)]

    def count(self, where: str = "true") -> int:
        ((found,),) = self.rows(f"SELECT count(*) FROM event_log WHERE {where}")
        return int(found)

    def left_over(self) -> int:
        """Rows before the checkpoint that are still there; the rest of the ledger must be whole."""
        notes = " ".join(self.assert_whole().notes)
        found = re.search(r"(\d+) events before the checkpoint", notes)
        return int(found[1]) if found else 0

    def months(self) -> list[str]:
        found = self.rows(
            "SELECT relname FROM pg_class WHERE relname ~ '^event_log_2026_0' AND relkind = 'r'"
            " ORDER BY 1"
        )
        return [name[-2:] for (name,) in found]
