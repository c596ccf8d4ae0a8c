"""Finish and settle: everything that ended meanwhile goes to the store as one batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from holdfast.core.broker import Broker, Settlement, Subscription, Verb
from holdfast.core.current import current_message
from holdfast.core.errors import BrokerError, StoreError
from holdfast.core.notices import End, Notice, success_notices
from holdfast.core.outcome import Dead, Expired, Released, Status
from holdfast.core.store import Claims, Commit, Finished, Run, Worker

from .executor import LOST

log = logging.getLogger("holdfast.engine")

BATCH = 500


class Settler:
    """Takes ended runs, commits them, tells the broker, then reports.

    While the store is away ended runs wait here (once a slot's worth waits, none are fetched), and
    nothing is settled. The broker hears of one batch while the next is committed.
    """

    def __init__(
        self,
        store: Claims,
        broker: Broker | None,
        worker: Callable[[], Worker],
        *,
        committed: Callable[[Sequence[Finished], Sequence[Commit]], None],
        fenced: Callable[[Finished], None],
    ) -> None:
        self._store = store
        self._broker = broker
        self._worker = worker
        self._committed = committed
        self._fenced = fenced
        self._waiting: list[tuple[Finished, Subscription]] = []
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._flushing: Sequence[tuple[Finished, Subscription]] = ()
        self._telling: asyncio.Task[None] | None = None
        self._told_of: Sequence[tuple[Finished, Subscription]] = ()
        """Committed; the broker is being told."""

    @property
    def waiting(self) -> int:
        """Runs that ended, of which store or broker do not know yet."""
        return len(self._waiting) + len(self._flushing) + len(self._told_of)

    @property
    def behind(self) -> int:
        """Runs that ended while the batch before them is still being written."""
        return len(self._waiting)

    @property
    def unsettled(self) -> list[tuple[Run, Subscription]]:
        """All that wait here, each run with its subscription."""
        held = (*self._told_of, *self._flushing, *self._waiting)
        return [(item.run, sub) for item, sub in held]

    def add(self, finished: Finished, sub: Subscription) -> None:
        self._waiting.append((finished, sub))
        if self._task is None:
            self._idle.clear()
            self._task = asyncio.create_task(self._run(), name="holdfast-settler")

    async def drain(self) -> None:
        """Wait until everything that ended is committed, and the broker knows."""
        await self._idle.wait()

    def stop(self) -> int:
        """Give up on what is not committed (its claim is lost anyway); returns how many."""
        left = len(self._waiting) + len(self._flushing)
        self._waiting.clear()
        for task in (self._task, self._telling):
            if task is not None:
                task.cancel()
        return left

    async def _run(self) -> None:
        current_message.set(None)  # the task was made by a run, and is nobody's
        try:
            # A turn of the loop later the fetcher, woken by the same ends, asks for the next ones:
            # where queue and store are one file, both are then one transaction.
            await asyncio.sleep(0)
            while self._waiting:
                self._flushing, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
                try:
                    await self._flush(self._flushing)
                finally:
                    self._flushing = ()
        finally:
            self._task = None
            if self._waiting:
                self._task = asyncio.create_task(self._run(), name="holdfast-settler")
            else:
                self._rest()

    def _rest(self) -> None:
        if self._task is None and self._telling is None:
            self._idle.set()

    async def _flush(self, batch: Sequence[tuple[Finished, Subscription]]) -> None:
        alive = [(f, sub) for f, sub in batch if f.outcome is not LOST]
        gone = [(f, sub) for f, sub in batch if f.outcome is LOST]
        items = [f for f, _ in alive]
        commits = await self._commit(items) if items else []
        settled: dict[str, tuple[Subscription, list[Settlement]]] = {}
        for (finished, sub), commit in zip(alive, commits, strict=True):
            if commit is Commit.FENCED:
                log.warning(
                    "message %s: worker %d no longer owns it, its result was refused",
                    finished.run.message.id,
                    finished.run.token.worker_id,
                )
                gone.append((finished, sub))
                continue
            if finished.run.delivery is not None:
                _, batch_of = settled.setdefault(sub.name, (sub, []))
                batch_of.append(self._settlement(finished, sub))
        for finished, sub in gone:
            self._fenced(finished)
            if finished.run.delivery is not None:
                # It needs no fence: whatever became of the message, the store knows its copies.
                # Kept, the copy would come again only when the broker itself misses us, if ever.
                _, batch_of = settled.setdefault(sub.name, (sub, []))
                batch_of.append(Settlement(delivery=finished.run.delivery, verb=Verb.RELEASE))
        if not settled:  # on one file there is nobody to tell
            if items:
                self._committed(items, commits)
            return
        if self._telling is not None:  # batches come to the broker one after the other
            await asyncio.wait({self._telling})
        self._told_of = batch
        told = self._tell(settled.values(), items, commits)
        self._telling = asyncio.create_task(told, name="holdfast-settler-broker")

    async def _tell(
        self,
        settled: Iterable[tuple[Subscription, Sequence[Settlement]]],
        items: Sequence[Finished],
        commits: Sequence[Commit],
    ) -> None:
        try:
            for sub, settlements in settled:
                await self.settle(sub, settlements)
            if items:
                self._committed(items, commits)
        finally:
            self._telling, self._told_of = None, ()
            self._rest()

    async def _commit(self, items: Sequence[Finished]) -> Sequence[Commit]:
        """Ask until the store answers: a repeat after an unknown commit is ALREADY."""
        pause = 0.05
        while True:
            try:
                return await self._store.finish(items, worker=self._worker())
            except StoreError as error:
                log.warning("%d finished runs wait for the store: %s", len(items), error)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)

    async def settle(self, sub: Subscription, batch: Sequence[Settlement]) -> None:
        """Tell the broker. A failure is harmless: the copy comes back and is known."""
        if self._broker is None or not batch:
            return
        try:
            await self._broker.settle(sub, batch)
        except BrokerError as error:
            log.warning("settling %d messages of %s failed: %s", len(batch), sub.queue, error)

    def _settlement(self, finished: Finished, sub: Subscription) -> Settlement:
        delivery = finished.run.delivery
        assert delivery is not None  # noqa: S101 - asked for only then
        verb, reason = Verb.ACK, ""
        if isinstance(finished.outcome, Released):
            # With a wait the store keeps it: no broker is asked to hold a message back.
            verb = Verb.ACK if finished.outcome.after_s > 0 else Verb.RELEASE
        elif isinstance(finished.outcome, Dead | Expired):
            if sub.ack_policy == "nack" and self._can_reject:
                verb, reason = Verb.REJECT, getattr(finished.outcome, "reason", "expired")
            elif sub.ack_policy == "requeue":
                verb = Verb.RELEASE
        notices = self._notices(finished, sub) if finished.told_on_ack else ()
        return Settlement(delivery=delivery, verb=verb, reason=reason, notices=notices)

    def _notices(self, finished: Finished, sub: Subscription) -> Sequence[Notice]:
        """A success is told with its acknowledgement: that spares it the way through the outbox."""
        run = finished.run
        assert sub.notices is not None  # noqa: S101 - it said that it is told
        end = End(
            tenant_id=run.message.tenant_id,
            subscription=run.subscription,
            task_id=run.message.id,
            status=Status.SUCCEEDED,
            result=finished.result,
            retry_count=run.failures,
            idempotency_key=run.message.idempotency_key,
            finished_at_us=finished.finished_at_us,
            consumer=self._worker().name,
        )
        return success_notices(sub.notices, end)

    @property
    def _can_reject(self) -> bool:
        return self._broker is not None and self._broker.capabilities.reject
