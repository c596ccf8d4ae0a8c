"""A real app on real files, its workers, and questions about what became of its messages."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ackbone.app import App
from ackbone.config import Breaker, Config, Queue, Retry, Worker
from ackbone.core.clock import Clock
from ackbone.core.events import FINAL_EVENTS, Event
from ackbone.core.outcome import FINAL
from ackbone.engine.worker import Drained, EngineWorker
from ackbone.testing import Signal

PATIENCE_S = 30.0
"""How long something that must happen may take on a machine that many share."""

ONE_FILE = "one-file"
TWO_FILES = "two-files"
MEMORY = "memory"
MODES = (ONE_FILE, TWO_FILES, MEMORY)
"""Queue and store in one SQLite file, in two, or a memory broker beside the store."""


class Lab:
    """One home folder, one way to put broker and store together."""

    def __init__(self, home: Path, mode: str, schema: Path) -> None:
        self.home = home
        self.mode = mode
        self.events: Signal[Event] = Signal("events")
        self._schema = schema
        self._apps: list[App] = []
        self._workers: list[EngineWorker] = []

    # -- making -----------------------------------------------------------------------------------

    def config(self, **settings: Any) -> Config:
        """Short waits, and no breaker unless a test asks for one."""
        worker: dict[str, Any] = {"slots": 8, "lease_s": 5.0, "shutdown_timeout_s": 5.0}
        worker.update(settings.pop("worker", {}))
        queues = settings.pop("queues", {})
        brokers: dict[str, dict[str, Any]] = {
            ONE_FILE: {"broker": "sqlite"},
            TWO_FILES: {
                "broker": f"sqlite:///{self.home}/queue.db",
                "store": f"sqlite:///{self.home}/ackbone.db",
            },
            MEMORY: {"broker": "memory://"},
        }
        return Config(
            home=self.home,
            worker=Worker(**worker),
            queues={name: Queue(**queue) for name, queue in queues.items()},
            retry=Retry(base_delay_s=0.01, max_delay_s=0.05, jitter=0.0),
            breaker=Breaker(**settings.pop("breaker", {"failures": 1000})),
            **brokers[self.mode],
            **settings,
        )

    async def open(
        self, *, clock: Clock | None = None, target: str | None = None, **settings: Any
    ) -> App:
        """An open app whose events are seen here. `target`: where child processes find it."""
        config = self.config(**settings)
        for path in {config.store_file, *config.broker_files}:
            if not path.exists():
                shutil.copy(self._schema, path)
        app = App(config, clock=clock)
        app.target = target
        app.observe(self.events.emit)
        await app.open()
        self._apps.append(app)
        return app

    async def start(self, app: App, **options: Any) -> EngineWorker:
        worker = app.worker(**options)
        await worker.begin()
        self._workers.append(worker)
        return worker

    async def stop(self, worker: EngineWorker, timeout_s: float | None = None) -> Drained:
        self._workers.remove(worker)
        return await worker.drain(timeout_s)

    async def close(self) -> None:
        for worker in self._workers:
            await worker.drain(0.0)
        for app in self._apps:
            await app.close()

    # -- asking -----------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self.home / "ackbone.db"

    def rows(self, sql: str, *values: Any) -> list[Any]:
        conn = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
        try:
            return conn.execute(sql, values).fetchall()
        finally:
            conn.close()

    def status(self, message_id: str) -> str | None:
        found = self.rows("SELECT status FROM queue_executions WHERE message_id = ?", message_id)
        return found[0][0] if found else None

    def task(self, message_id: str) -> dict[str, Any]:
        """The whole row of a task."""
        conn = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
        conn.row_factory = sqlite3.Row
        try:
            (found,) = conn.execute(
                "SELECT * FROM queue_executions WHERE message_id = ?", (message_id,)
            ).fetchall()
            return dict(found)
        finally:
            conn.close()

    def history(self, message_id: str) -> list[tuple[str, dict[str, Any]]]:
        """The ledger's events of one message, in order."""
        found = self.rows(
            "SELECT event_type, data FROM event_log WHERE task_id = ? ORDER BY rowid", message_id
        )
        return [(kind, msgspec.json.decode(data)) for kind, data in found]

    def kinds(self, message_id: str) -> list[str]:
        return [kind for kind, _ in self.history(message_id)]

    def finals(self, message_id: str) -> list[str]:
        return [kind for kind in self.kinds(message_id) if kind in FINAL_EVENTS]

    def letters(self) -> list[dict[str, Any]]:
        """Every dead letter, oldest first."""
        found = self.rows(
            "SELECT message_id, reason, error, retry_count, history, body FROM dead_letters"
            " ORDER BY rowid"
        )
        names = ("message_id", "reason", "error", "retry_count", "history", "body")
        letters = [dict(zip(names, row, strict=True)) for row in found]
        for letter in letters:
            letter["history"] = msgspec.json.decode(letter["history"])
        return letters

    def replies(self) -> list[str]:
        return [text for (text,) in self.rows("SELECT content FROM deliveries ORDER BY rowid")]

    def statuses(self) -> dict[str, str]:
        return dict(self.rows("SELECT message_id, status FROM queue_executions"))

    # -- waiting ----------------------------------------------------------------------------------

    async def until(
        self, done: Callable[[], Any], what: str | Callable[[], object] = "the condition"
    ) -> Any:
        """Returns the first true answer of `done`."""
        end = time.monotonic() + PATIENCE_S
        while True:
            found = done()
            if found:
                return found
            if time.monotonic() > end:
                seen = what() if callable(what) else what
                raise AssertionError(f"did not happen in {PATIENCE_S:.0f} s: {seen}")
            await asyncio.sleep(0.01)

    async def ends(self, *message_ids: str) -> list[str]:
        """Waits until each message is final; returns their statuses."""

        def all_final() -> bool:
            return all(self.status(message_id) in FINAL for message_id in message_ids)

        await self.until(all_final, lambda: [(m, self.status(m)) for m in message_ids])
        return [str(self.status(message_id)) for message_id in message_ids]

    async def becomes(self, message_id: str, status: str) -> None:
        await self.until(
            lambda: self.status(message_id) == status,
            lambda: f"{message_id} is {self.status(message_id)}, not {status}",
        )

    async def has_event(self, message_id: str, kind: str, n: int = 1) -> None:
        await self.until(
            lambda: self.kinds(message_id).count(kind) >= n,
            lambda: f"{kind} × {n} of {message_id}: {self.kinds(message_id)}",
        )
