"""An operator's desk: a real app on a real file, its records and the operations on them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

from ackbone import App, Context, FinalError
from ackbone.admin.causes import Handled
from ackbone.admin.dead_letters import DeadLetters
from ackbone.admin.parked import Parked
from ackbone.backends import Acting, Looking
from ackbone.cli.session import encoder, operating
from ackbone.composition.background import relays_of
from ackbone.config import Config, Queue, Retry
from ackbone.core.records import LedgerEvent
from ackbone.store.postgres.store import PostgresStore


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that must happen, however slow the machine is."""
    async with asyncio.timeout(60):
        while not await happened():  # noqa: ASYNC110 - the store is asked, it tells nobody
            await asyncio.sleep(0.005)


class Sent(NamedTuple):
    """A message on its way."""

    queue: str
    priority: int
    ordering_key: str | None


class Desk:
    """What an operator has in front of them."""

    def __init__(self, app: App, records: Looking, operations: Acting) -> None:
        self.app = app
        self.records = records
        self.operations = operations
        self.seen: list[Any] = []
        """Payloads that the handler of `good` was given."""
        self.letters = DeadLetters(
            records,
            operations,
            encode=encoder(app),
            codec_of=lambda queue: app.config.queue(queue).codec,
        )
        self.parked = Parked(records, operations)
        self._handlers()

    def _handlers(self) -> None:
        async def good(ctx: Context) -> dict[str, Any]:
            self.seen.append(ctx.payload)
            return {"seen": len(self.seen)}

        async def bad(ctx: Context) -> None:
            if ctx.payload == {"mended": True}:
                self.seen.append(ctx.payload)
                return
            raise FinalError("it is broken")

        for queue in ("default", "other"):
            self.app.on("good", queue=queue)(good)
            self.app.on("bad", queue=queue)(bad)

    async def work(self) -> None:
        """Run a worker until nothing is left to do."""
        # What is sent again goes through the outbox, unless the queue is in the store's file.
        relays = () if self.app.store.holds("default") else relays_of(self.app, spawn_solo=False)
        worker = self.app.worker(relays=relays)
        await worker.begin()
        try:
            async with asyncio.timeout(60):
                await self.app.idle(worker)
        finally:
            await worker.drain()
        assert worker.failure is None

    async def events(self, message_id: str, tenant_id: str = "default") -> list[str]:
        return [event.type for event in await self.events_of(message_id, tenant_id)]

    async def events_of(self, message_id: str, tenant_id: str = "default") -> Sequence[LedgerEvent]:
        return await self.records.events_of(tenant_id, message_id)

    async def replayed(self, letters: Any, **options: Any) -> list[Handled]:
        ids = await self.letters.chosen(letters, limit=options.pop("limit", None))
        return [each async for each in self.letters.replay(ids, **options)]

    async def discarded(self, letters: Any, **options: Any) -> list[Handled]:
        ids = await self.letters.chosen(letters)
        return [each async for each in self.letters.discard(ids, **options)]

    async def has_seen(self, *payloads: Any) -> None:
        """Wait until the handlers were given exactly these, in any order."""
        wanted = sorted(map(repr, payloads))

        async def seen() -> bool:
            return sorted(map(repr, self.seen)) == wanted

        await until(seen)

    async def sent(self, text: str) -> list[Sent]:
        """What waits, in its queue or to be published, and has this text in its id or body."""
        store = self.app.store
        if not isinstance(store, PostgresStore):
            found = await self.records.waiting_with(text, limit=100)
            return [Sent(each.queue, each.priority, each.ordering_key) for each in found]
        statement = (
            "SELECT queue_name, priority, ordering_key FROM outbox WHERE message_id = $1"
            " OR position($1::text::bytea IN body) > 0"
        )
        return [Sent(*row) for row in await store.read(statement, text)]

    async def spoil_letters(self) -> None:
        """One more byte in every body, as no statement of ours would write it."""
        store = self.app.store
        if isinstance(store, PostgresStore):
            await store.read("UPDATE dead_letters SET body = body || '\\x20'::bytea")
            return
        with closing(sqlite3.connect(self.app.config.store_file, isolation_level=None)) as conn:
            conn.execute("UPDATE dead_letters SET body = body || X'20'")

    async def status(self, message_id: str) -> str:
        (task,) = await self.records.tasks(None, message_id)
        return task.status


@asynccontextmanager
async def open_desk(
    home: Path, *, two_files: bool = False, store: str | None = None, **queues: Queue
) -> AsyncIterator[Desk]:
    """Everything opened, and closed again. `store`: the URL of another one than the file."""
    places: dict[str, Any] = {} if store is None else {"store": store}
    if two_files:
        places = {"broker": f"sqlite:///{home}/queue.db", "store": f"sqlite:///{home}/store.db"}
    config = Config(
        home=home, queues=queues, retry=Retry(base_delay_s=0.01, max_delay_s=0.02), **places
    )
    async with App(config) as app, operating(app) as (records, operations):
        yield Desk(app, records, operations)
