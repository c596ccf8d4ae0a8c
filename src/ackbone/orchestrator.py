"""`Orchestrator`: the sending side of the task protocol. Submits tasks, waits for them, cancels.

async with Orchestrator() as tasks:                    # ackbone.yaml, as a worker has it
    task = await tasks.submit("search", {"q": "kelp"})
    result = await tasks.wait(task.id, timeout_s=60)

The results of tasks are in the store. Workers that share the store write them there. Results of
other programs' workers, which know only the broker, are read from their queue and stored here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import msgspec

from ackbone.app import App
from ackbone.backends import Acting
from ackbone.core.broker import Delivery, Settlement, Subscription, Verb
from ackbone.core.clock import from_us
from ackbone.core.codecs.task import CREATED_MARK, TaskCodec
from ackbone.core.errors import AckboneError, DecodeError, StoreError
from ackbone.core.events import EVENT_OF_STATUS
from ackbone.core.ids import new_id
from ackbone.core.message import DEFAULT_TENANT, Message
from ackbone.core.notices import PROTOCOL_STATUS, End, error_text, read_result
from ackbone.core.outcome import FINAL, ParkKind, Status
from ackbone.core.records import Cancelled, Identity, Records, Task
from ackbone.core.task_protocol import TaskBroker
from ackbone.engine.sender import Receipt

log = logging.getLogger("ackbone.orchestrator")

GROUP = "cg:orchestrators"
BATCH = 500
FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 0.5
"""How often a waiter looks by itself: workers in other processes send no wake-up here."""


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a task ended, in the terms of the task protocol."""

    task_id: str
    status: str
    """`succeeded` or `failed`."""
    result: Any = None
    error: str = ""
    """Why it failed. For a rejected, expired or discarded task it begins with that word."""
    retry_count: int = 0
    idempotency_key: str | None = None
    finished_at: datetime | None = None
    duplicate_of: str | None = None
    """Id of the task with the same key that ran instead. Its result is given here."""

    @property
    def ok(self) -> bool:
        return self.status == "succeeded"


class Orchestrator:
    """Use it as an async context manager. It opens the app that it is given, or one of its own.

    An app that is open already, for a worker say, stays open when the orchestrator is closed.
    """

    def __init__(self, app: App | None = None, *, queue: str | None = None) -> None:
        """`queue`: where tasks are sent. Default: the app's default queue."""
        self._app = App(name="orchestrator") if app is None else app
        self._named_queue = queue
        self._operations: Acting | None = None
        self._open = AsyncExitStack()
        self._reading: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()
        """Set, and replaced by a new one, when results arrive."""

    @property
    def _queue(self) -> str:
        return self._named_queue or self._app.config.default_queue

    async def __aenter__(self) -> Orchestrator:
        async with AsyncExitStack() as opened:
            app = await opened.enter_async_context(self._app)
            operations = app.storage.operations(app.store, by=app.name)
            self._operations = await opened.enter_async_context(operations)
            self._open = opened.pop_all()
        results = self._results()
        if results is not None:
            self._reading = asyncio.create_task(self._read(results), name="ackbone results")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        self._operations = None
        await self._open.aclose()

    # -- sending ----------------------------------------------------------------------------------

    async def submit(
        self, tool_name: str, payload: Mapping[str, Any] | None = None, **options: Any
    ) -> Receipt:
        """Submit a task. Returns when it is durable. Options: those of `App.send`.

        Without an `idempotency_key` the task runs once under its `id`. The event `task.created` is
        written before the task is sent.
        """
        options["id"] = options.get("id") or new_id()
        options["created_at"] = options.get("created_at") or datetime.now(UTC)
        marked = {**options, "extra": self._marked(options.get("extra"), options["id"])}
        body = payload or {}
        # Raises if the task cannot be sent: then no event must be written.
        self._app.outgoing(tool_name, body, queue=self._queue, **marked)
        task = Message(
            type=tool_name,
            id=options["id"],
            tenant_id=options.get("tenant_id") or DEFAULT_TENANT,
            created_at=options["created_at"],
        )
        if await self._write_created([task]):
            options = marked
        return await self._app.send(tool_name, body, queue=self._queue, **options)

    async def submit_many(self, tasks: Sequence[Message]) -> list[Receipt]:
        """As `submit`, for many at once. If one is invalid, none is accepted."""
        marked = [
            msgspec.structs.replace(task, extra=self._marked(task.extra, task.id)) for task in tasks
        ]
        self._app._encoded_many(marked, queue=self._queue)
        if await self._write_created(tasks):
            tasks = marked
        return await self._app.send_many(tasks, queue=self._queue)

    def _marked(self, extra: Mapping[str, Any] | None, task_id: str) -> dict[str, Any]:
        """Mark a task whose `task.created` is written. Its worker does not write it again."""
        marks = self._app.config.queue(self._queue).codec == TaskCodec.name
        return {**(extra or {}), **({CREATED_MARK: task_id} if marks else {})}

    async def _write_created(self, tasks: Sequence[Message]) -> bool:
        """Write `task.created`. Returns False if the store is away: then the worker that claims the
        task writes it."""
        own = self._app.config.queue(self._queue).tenant
        if own is not None:  # the queue's tenant, whatever the message names
            tasks = [msgspec.structs.replace(task, tenant_id=own) for task in tasks]
        try:
            await self._desk.submitted(self._queue, tasks)
        except StoreError as error:
            log.warning(
                "task.created of %d tasks for %s is left to the worker that claims them: %s",
                len(tasks),
                self._queue,
                error,
            )
            return False
        return True

    # -- asking -----------------------------------------------------------------------------------

    async def status(self, task_id: str, *, tenant_id: str = DEFAULT_TENANT) -> str:
        """Return queued, running, waiting_approval, succeeded, failed or unknown.

        `unknown`: there is neither a row nor an event of this id. Either it was never submitted, or
        another program sent it and no worker has claimed it yet, or it is past its retention.
        """
        task = await self._task(task_id, tenant_id)
        if task is not None:
            return _word(task)
        found = await self._records.events_of(tenant_id, task_id)
        kinds = {event.type for event in found if event.subscription == self._queue}
        if not kinds:
            return "unknown"
        ended = next((s for s, kind in EVENT_OF_STATUS.items() if kind in kinds), None)
        return "queued" if ended is None else PROTOCOL_STATUS.get(ended, "failed")

    async def result(self, task_id: str, *, tenant_id: str = DEFAULT_TENANT) -> TaskResult | None:
        """Return how the task ended. None: it has not ended yet."""
        task = await self._task(task_id, tenant_id)
        if task is None or task.status not in FINAL:
            return None
        first = None
        if task.status == Status.DUPLICATE:
            events = await self._records.events_of(tenant_id, task_id)
            first = next((e.data["first_id"] for e in events if "first_id" in e.data), None)
        return _result(task, first)

    async def wait(
        self, task_id: str, *, timeout_s: float | None = None, tenant_id: str = DEFAULT_TENANT
    ) -> TaskResult:
        """Wait until the task has ended. Raises TimeoutError, but the task goes on."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ended(task_id, tenant_id)
        except TimeoutError:
            word = await self.status(task_id, tenant_id=tenant_id)
            raise TimeoutError(f"task {task_id} is {word} after {timeout_s:g} s") from None

    async def _ended(self, task_id: str, tenant_id: str) -> TaskResult:
        pause = FIRST_LOOK_S
        while True:
            heard = self._heard
            found = await self.result(task_id, tenant_id=tenant_id)
            if found is not None:
                return found
            try:
                async with asyncio.timeout(pause):
                    await heard.wait()
            except TimeoutError:
                pause = min(LONGEST_LOOK_S, pause * 1.5)

    async def cancel(
        self, task_id: str, *, reason: str = "cancelled", tenant_id: str = DEFAULT_TENANT
    ) -> Cancelled:
        """Cancel a task. `ended`: it will not run. `asked`: it runs, and was asked to stop. `over`:
        it had ended before."""
        name = Identity(tenant_id=tenant_id, subscription=self._queue, message_id=task_id)
        return await self._desk.cancel(name, queue=self._queue, reason=reason)

    async def _task(self, task_id: str, tenant_id: str) -> Task | None:
        found = await self._records.tasks(tenant_id, task_id)
        return next((task for task in found if task.subscription == self._queue), None)

    @property
    def _records(self) -> Records:
        return self._app.storage.records(self._app.store)

    @property
    def _desk(self) -> Acting:
        if self._operations is None:
            raise RuntimeError("the orchestrator is not open: use 'async with Orchestrator()'")
        return self._operations

    # -- results of other people's workers --------------------------------------------------------

    def _results(self) -> Subscription | None:
        """Return the queue of results, if other programs may write into it."""
        notices = self._app.config.queue(self._queue).notices
        if notices is None or notices.results is None or self._app.store.holds(notices.results):
            return None
        to = notices.results
        return Subscription(name=to, queue=to, group=GROUP)

    async def _read(self, sub: Subscription) -> None:
        broker, pause = self._app.brokers.of(sub.queue), 0.05
        subscribe = broker.subscribe
        if isinstance(broker, TaskBroker):  # other programs read the results, too
            subscribe = broker.subscribe_beside
        found: Sequence[Delivery] = ()  # kept while the store is away
        while True:
            try:
                source = await subscribe(sub, room=BATCH)
                found = found or await source.receive(limit=BATCH, wait=1.0)
                if found:
                    await self._write_down(found)
                    acks = [Settlement(delivery=each, verb=Verb.ACK) for each in found]
                    found = ()
                    await source.settle(acks)
                pause = 0.05
            except AckboneError as error:
                log.warning("reading results from %s: %s", sub.queue, error)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)

    async def _write_down(self, found: Sequence[Delivery]) -> None:
        ends: list[End] = []
        for delivery in found:
            try:
                ends.append(read_result(delivery.body, self._queue))
            except DecodeError as error:
                log.warning("ignored entry %s on the result stream: %s", delivery.identity, error)
        if ends:
            await self._desk.record(ends)
        heard, self._heard = self._heard, asyncio.Event()
        heard.set()


def _word(task: Task) -> str:
    if task.status in FINAL:
        return PROTOCOL_STATUS.get(Status(task.status), "failed")
    if task.status == Status.RUNNING:
        return "running"
    if task.status == Status.PARKED and task.parked_kind == ParkKind.WAITING_APPROVAL:
        return "waiting_approval"
    return "queued"


def _result(task: Task, duplicate_of: str | None) -> TaskResult:
    status = Status(task.status)
    finished = task.completed_at_us
    return TaskResult(
        task_id=task.message_id,
        status=PROTOCOL_STATUS.get(status, "failed"),
        result=None if task.result is None else msgspec.json.decode(task.result),
        error=error_text(status, task.error or ""),
        retry_count=task.retry_count,
        idempotency_key=task.idempotency_key,
        finished_at=None if finished is None else from_us(finished),
        duplicate_of=duplicate_of,
    )
