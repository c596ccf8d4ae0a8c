"""A queue trigger on the real engine, one example at a time, in a folder in memory."""

from __future__ import annotations

import asyncio
import functools
import logging
import shutil
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ackbone import (
    IdempotencyStore,
    MockQueueAdapter,
    QueueTrigger,
    QueueTriggerConfig,
    RawMessage,
)
from ackbone.config import Worker
from ackbone.core.clock import Clock
from ackbone.core.events import Entry
from ackbone.core.store import Verdict
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore
from ackbone.testing import (
    MockAgentRuntime,
    MockGovernanceLayer,
    MockIdempotencyStore,
    MockLedger,
    Signal,
)

PATIENCE_S = 60.0
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
START = datetime(2026, 1, 1, tzinfo=UTC)
STEADY = Worker(lease_s=86_400.0, stall_limit_s=31_536_000.0)
"""For a clock that is moved by hours: neither lease nor watchdog may take it for a standstill."""

POLICIES = ("ack", "nack", "requeue", "dlq")


class WatchedStore(SqliteStore):
    """The real store; each look for due work, and each event of its ledger, can be waited for."""

    def __init__(self, path: Path, clock: Clock | None) -> None:
        super().__init__(path, clock=clock)
        self.looks: Signal[int] = Signal("looks for due work")
        self.told: Signal[Entry] = Signal("ledger events")
        self.on_events(self._tell)

    def _tell(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.told.emit(entry)

    async def claim_ready(self, *args: Any, **options: Any) -> Sequence[Verdict]:
        verdicts = await super().claim_ready(*args, **options)
        self.looks.emit(len(verdicts))
        return verdicts

    async def look(self) -> None:
        """Returns after a look for due work that began after this call."""
        for _ in range(2):  # one may be under way already
            seen = self.looks.count
            self.look_again()
            await self.looks.wait(seen + 1, timeout=PATIENCE_S)


_worlds: list[World] = []
"""Of the example under way: what it leaves open when it fails is closed after it."""


class World:
    """One trigger with everything around it. `async with` starts and stops it."""

    def __init__(
        self,
        *,
        adapter: Any = None,
        runtime: MockAgentRuntime | None = None,
        clock: Clock | None = None,
        shutdown_timeout_s: float = 30.0,
        folder: Path | None = None,
        keys: IdempotencyStore | None = None,
        **config: Any,
    ) -> None:
        _worlds.append(self)
        self.folder = folder or fresh_folder()
        self.adapter = adapter or MockQueueAdapter()
        self.runtime = runtime or MockAgentRuntime()
        self.governance = MockGovernanceLayer()
        self.ledger = MockLedger()
        self.keys: Any = keys or MockIdempotencyStore(clock=clock)
        self.config = QueueTriggerConfig(
            **{"queue_name": "orders", "consumer_group": "agents", "concurrency": 8, **config}
        )
        self.store = WatchedStore(self.folder / "t.db", clock)
        self.trigger = QueueTrigger(
            self.config,
            self.adapter,
            self.runtime,
            self.governance,
            self.ledger,
            self.keys,
            store=self.store,
            worker=STEADY,
            clock=clock,
            shutdown_timeout_s=shutdown_timeout_s,
        )

    async def __aenter__(self) -> World:
        await self.trigger.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.trigger.stop()
        await self.close()

    async def close(self) -> None:
        """Idempotent; a trigger that an example left running ends at once."""
        self.trigger._shutdown_timeout_s = 0.0
        await self.trigger.stop()
        await self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def put(self, *messages: RawMessage) -> None:
        for message in messages:
            self.adapter.enqueue(message)

    async def settled(self, count: int) -> None:
        await self.adapter.wait_settled(count, timeout=PATIENCE_S)

    async def calm(self) -> None:
        """Room for whatever would happen now to happen: turns of the loop and of the writer."""
        for _ in range(10):
            for _ in range(20):
                await asyncio.sleep(0)
            await self.store.file.write(lambda conn: None, durable=False)

    def runs(self) -> list[str]:
        """Ids of the messages that the agent ran for, in order."""
        return [event.message_id for event in self.runtime.get_triggered_events()]

    def rows(self, sql: str, *values: Any) -> list[Any]:
        conn = sqlite3.connect(f"file:{self.store.path}?mode=ro", uri=True)
        try:
            return conn.execute(sql, values).fetchall()
        finally:
            conn.close()


def message(
    message_id: str,
    body: bytes = b"{}",
    headers: dict[str, str] | None = None,
    *,
    at: datetime = START,
) -> RawMessage:
    return RawMessage(message_id, body, dict(headers or {}), at, {})


def fresh_folder() -> Path:
    """With an empty database in it."""
    folder = Path(tempfile.mkdtemp(prefix="ab-", dir=MEMORY))
    (folder / "t.db").write_bytes(_schema())
    return folder


@functools.cache
def _schema() -> bytes:
    """An empty database, migrated once for all examples."""
    with tempfile.TemporaryDirectory(prefix="ab-", dir=MEMORY) as folder:
        path = Path(folder) / "schema.db"
        ensure_schema(path)
        return path.read_bytes()


class Lines(logging.Handler):
    """Every line that the package logs, at the lowest level."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []
        self._logger = logging.getLogger("ackbone")

    def emit(self, record: logging.LogRecord) -> None:
        # A copy: other handlers rewrite the record, and what counts is what the code said.
        self.records.append(logging.makeLogRecord(record.__dict__))

    def __enter__(self) -> Lines:
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)

    def text(self) -> str:
        """As a formatter writes them, with tracebacks and everything that was attached."""
        formatter = logging.Formatter("%(levelname)s %(name)s %(message)s")
        return "\n".join(f"{formatter.format(r)} {r.__dict__!r}" for r in self.records)


# -- properties -----------------------------------------------------------------------------------

PROPERTIES: dict[int, Callable[[settings], None]] = {}
"""By number: checks the property anew under other settings, for the planted faults."""


def queue_property(
    number: int, text: str, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., Awaitable[None]]], Callable[[], None]]:
    """Makes a test of one of the 24 properties from a coroutine that checks one example of it."""

    def register(check: Callable[..., Awaitable[None]]) -> Callable[[], None]:
        def example(**values: Any) -> None:
            async def run() -> None:
                try:
                    await check(**values)
                finally:
                    while _worlds:
                        await _worlds.pop().close()

            asyncio.run(run())

        example.__name__ = example.__qualname__ = check.__name__
        example.__module__ = check.__module__
        example.__doc__ = f"Feature: triggers-queue, Property {number}: {text}"

        def again(chosen: settings) -> None:
            chosen(given(**strategies)(example))()

        PROPERTIES[number] = again
        test: Callable[[], None] = given(**strategies)(example)
        return test

    return register


QUICK = settings(
    max_examples=300,
    derandomize=True,  # a planted fault is found or not, the same on every machine
    phases=[Phase.generate],
    database=None,
    report_multiple_bugs=False,
    deadline=None,
)
"""To show that a planted fault is found: nobody needs the smallest example."""


# -- what messages are made of --------------------------------------------------------------------

words = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=8)
any_text = st.text(max_size=12)
ids = st.text(min_size=1, max_size=20)
printable = st.text(min_size=1, max_size=30).filter(str.isprintable)
tenants = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,12}", fullmatch=True)
plain_headers = st.dictionaries(
    any_text.filter(lambda name: not name.lower().startswith("x-")), any_text, max_size=4
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)
moments = st.datetimes(
    min_value=datetime(1971, 1, 1),  # noqa: DTZ001 - Hypothesis wants them naive
    max_value=datetime(2099, 12, 31),  # noqa: DTZ001
    timezones=st.sampled_from([UTC, None]),
)
