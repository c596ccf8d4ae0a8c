"""Queue and store in one PostgreSQL database, drained by workers of ours; times and counts by the
database's own clock and ledger."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psycopg

from ackbone import App, Config

from . import processes, workload
from .postgres_server import PostgresServer
from .sections.drain import MANY_SLOTS

_CHUNK = 5000
BEGINNING = datetime.fromtimestamp(0, UTC)
_SEEN = (
    "SELECT count(*), min(started_at) FILTER (WHERE started_at > %(after)s), max(completed_at)"
    " FROM (SELECT started_at, completed_at FROM queue_executions"
    " WHERE status = 'succeeded' AND completed_at > %(after)s"
    " ORDER BY completed_at LIMIT %(first)s) t"
)
_FINALS = (
    "SELECT count(*), count(DISTINCT task_id) FROM event_log WHERE event_type = 'task.succeeded'"
)


@dataclass(frozen=True)
class Stage:
    """A server and a folder for what a worker keeps."""

    home: Path
    server: PostgresServer

    @property
    def env(self) -> dict[str, str]:
        return {
            "ACKBONE__STORE": self.server.url,
            "ACKBONE__BROKER": "postgresql",
            "ACKBONE__WORKER__SLOTS": str(MANY_SLOTS),
        }

    def fill(self, count: int) -> None:
        asyncio.run(self._fill(count))

    async def _fill(self, count: int) -> None:
        config = Config(home=self.home, store=self.server.url, broker="postgresql")
        async with App(config, name="bench-sender") as app:
            await workload.publish(app, workload.QUEUE, range(count), _CHUNK)

    def rate(self, *, after: datetime = BEGINNING, first: int | None = None) -> float:
        """Messages a second, from the first claim to the last finish of the `first` ones."""
        with psycopg.connect(self.server.url) as conn:
            values = {"after": after, "first": first}
            count, begun, last = conn.execute(_SEEN, values).fetchone() or (0, None, None)
        if not count:
            raise processes.ProcessFailed("nothing was drained")
        return float(count / (last - begun).total_seconds())

    def now(self) -> datetime:
        with psycopg.connect(self.server.url) as conn:
            row = conn.execute("SELECT clock_timestamp()").fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]


def drain(stage: Stage, count: int, *, workers: int = 1) -> float:
    """Let workers empty the queue; raises if a message lacks its one final event."""
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(processes.worker(stage.home, env=stage.env)) for _ in range(workers)
        ]
        for child in running:
            child.wait()
        with psycopg.connect(stage.server.url) as conn:
            finals = conn.execute(_FINALS).fetchone()
        if finals != (count, count):
            raise processes.ProcessFailed(f"{count} messages, {finals} ends\n{running[0].tail}")
    return stage.rate()


def drain_for(stage: Stage, seconds: float, *, first: int) -> tuple[float, float]:
    """One worker for a while: the rate of its first messages, and the most memory it held (MB)."""
    begun = stage.now()
    with processes.worker(stage.home, until_idle=False, env=stage.env) as child:
        deadline = time.monotonic() + seconds
        peak = 0.0
        while time.monotonic() < deadline:
            child.check()
            peak = max(peak, child.peak_mb())
            time.sleep(0.05)
        child.stop()
    return stage.rate(after=begun, first=first), peak
