"""The port of replies over a folder of JSON files: one process sends from it, many at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.delivery import Fits, Limits, New, Outbound, Settled, Taken
from holdfast.core.errors import StoreUnavailable
from holdfast.core.events import Listener
from holdfast.core.store import Worker

from .file_queue import DeliveryQueue
from .filed import filed_again, filed_new
from .filing import Filing
from .folder_desk import FolderDesk
from .folder_thread import FolderThread

T = TypeVar("T")


class FileDeliveries:
    """`Deliveries` in the folder of a `DeliveryQueue`, for a `Carrier`.

    Anybody may put replies in, by `put`, by `DeliveryQueue.enqueue` or by hand. Taking them needs
    the folder open, and that one process does: a second one is refused.
    """

    def __init__(self, queue_dir: Path | str | None = None, *, clock: Clock | None = None) -> None:
        """`queue_dir`: as for `DeliveryQueue`."""
        self.queue = DeliveryQueue(queue_dir)
        self._filing = Filing(self.queue, clock or SystemClock())
        self._thread = self._new_thread()
        self._listeners: list[Listener] = []
        self._bells: set[asyncio.Event] = set()
        self._numbers = itertools.count(1)
        self._lock = ExitStack()
        self._is_open = False

    async def open(self) -> None:
        """Raises StoreError if another process sends from this folder."""
        if self._is_open:
            return
        with ExitStack() as lock:
            lock.enter_context(self.queue.only_runner())
            await self._thread.run(self._filing.open)
            self._lock = lock.pop_all()
        self._is_open = True

    async def close(self) -> None:
        """What is under way and not settled is in doubt for whoever comes next."""
        thread, self._thread = self._thread, self._new_thread()
        self._is_open = False
        await thread.close()
        self._filing.close()
        self._lock.close()

    async def __aenter__(self) -> FileDeliveries:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- who sends --------------------------------------------------------------------------------

    async def register(self, name: str = "") -> Worker:
        """A sender of this process. What it takes is its own until it leaves."""
        self._require_open()
        worker = Worker(worker_id=next(self._numbers), name=name)
        self._filing.alive.add(worker.worker_id)
        return worker

    async def leave(self, worker: Worker) -> None:
        """What it was sending is given to others, in doubt."""
        self._filing.alive.discard(worker.worker_id)

    @property
    def expiry_paused(self) -> bool:
        """True while times to live are doubtful: nothing expires."""
        return self._filing.expiry_paused

    @expiry_paused.setter
    def expiry_paused(self, paused: bool) -> None:
        self._filing.expiry_paused = paused

    # -- the port ---------------------------------------------------------------------------------

    async def put(self, replies: Sequence[New], *, worker: Worker | None = None) -> None:
        filing = self._filing
        if replies:
            found = [filed_new(each, filing.now_us()) for each in replies]
            await self._thread.run(lambda: filing.put(found), alone=False)

    async def hand_on(self, reply: Outbound, *, channel: str) -> None:
        """Put in what another queue sends here, with what that one knows of it.

        The same id again changes nothing; as with `put`, the folder need not be open.
        """
        found = filed_again(reply, channel, self._filing.now_us())
        await self._thread.run(lambda: self._filing.put([found]), alone=False)

    async def holds(self, delivery_id: str) -> bool:
        """It waits here, was given up, or was sent from here lately."""
        return await self._thread.run(lambda: self._filing.holds(delivery_id), alone=False)

    def desk(self, *, by: str) -> FolderDesk:
        """Where people look at the replies of this folder and act on them, by the name of `by`.

        The folder need not be open: another process may be sending from it.
        """

        async def run(job: Callable[[], T]) -> T:
            return await self._thread.run(job)

        return FolderDesk(self._filing.desk(by), run)

    async def due_in_s(self, channels: Mapping[str, Limits]) -> float | None:
        return await self._run(lambda: self._filing.due_in_s(channels))

    async def take(self, channels: Mapping[str, Limits], *, limit: int, worker: Worker) -> Taken:
        filing = self._filing
        if limit < 1:
            return Taken((), await self.due_in_s(channels))
        return await self._run(
            lambda: filing.take(channels, limit, worker.worker_id),
            undo=lambda taken: filing.give_back(taken.replies),
        )

    async def follow(
        self, head: Outbound, fits: Fits, *, limit: int, worker: Worker
    ) -> Sequence[Outbound]:
        filing = self._filing
        return await self._run(
            lambda: filing.follow(head, fits, limit, worker.worker_id), undo=filing.give_back
        )

    async def settle(
        self, channels: Mapping[str, Limits], batch: Sequence[Settled], *, worker: Worker
    ) -> None:
        if batch:
            await self._run(lambda: self._filing.settle(channels, batch, worker.worker_id))

    async def recover(self, *, worker: Worker) -> int:
        return await self._run(lambda: self._filing.recover(worker.worker_id))

    async def _run(self, job: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        self._require_open()
        return await self._thread.run(job, undo=undo)

    def _require_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailable(f"{self.queue.queue_dir} is not open")

    def _new_thread(self) -> FolderThread:
        return FolderThread(self.queue.queue_dir, self._filing.changed, collect=self._collect)

    # -- being told -------------------------------------------------------------------------------

    def on_events(self, listener: Listener) -> None:
        """Call it with what became of replies, once that is on the disk."""
        self._listeners.append(listener)

    def subscribe(self) -> asyncio.Event:
        event = asyncio.Event()
        self._bells.add(event)
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._bells.discard(event)

    def _collect(self) -> Callable[[], None]:
        entries, rings = self._filing.collect()

        def tell() -> None:
            if entries:
                for listener in self._listeners:
                    listener(entries)
            if rings:
                for bell in self._bells:
                    bell.set()

        return tell
