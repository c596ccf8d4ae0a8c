"""Finish and settle: everything that ended meanwhile goes to the store as one batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ackbone.core.broker import Broker, Settlement, Subscription, Verb
from ackbone.core.current import current_message
from ackbone.core.errors import BrokerError, StoreError
from ackbone.core.notices import Notice, success_notice
from ackbone.core.outcome import UNSTORABLE, Dead, Done, Expired, Outcome, Released
from ackbone.core.store import Claims, Commit, Finished, Run, Worker

from .outages import STORE, Outages
from .results import LOST

log = logging.getLogger("ackbone.engine")

BATCH = 1000
COMMITTING = "committing finished runs"
_ACK = Verb.ACK
"""Asked of its class, a member takes longer than a call (before Python 3.12), and this one is asked
for with every message."""


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
        fenced: Callable[[Finished, Subscription], None],
        failed: Callable[[Exception], None],
        outages: Outages | None = None,
    ) -> None:
        """`failed` hears of an error that neither store nor broker know: whoever runs the settler
        stops then. What is not committed is kept, for `drain` or the next end to try again."""
        self._store = store
        self._broker = broker
        self._worker = worker
        self._committed = committed
        self._fenced = fenced
        self._failed = failed
        self._outages = outages or Outages()
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
            self._begin()

    async def drain(self) -> None:
        """Wait until everything that ended is committed, and the broker knows; or until that
        failed: see `waiting`."""
        if self._waiting:
            self._begin()
        await self._idle.wait()

    def stop(self) -> int:
        """Give up on what is not committed (its claim is lost anyway); returns how many."""
        left = len(self._waiting) + len(self._flushing)
        self._waiting.clear()
        for task in (self._task, self._telling):
            if task is not None:
                task.cancel()
        return left

    def _begin(self) -> None:
        if self._task is None:
            self._idle.clear()
            self._task = asyncio.create_task(self._run(), name="ackbone-settler")

    async def _run(self) -> None:
        current_message.set(None)  # the task was made by a run, and is nobody's
        again = True
        try:
            # A turn of the loop later the fetcher, woken by the same ends, asks for the next ones:
            # where queue and store are one file, both are then one transaction.
            await asyncio.sleep(0)
            while self._waiting:
                self._flushing, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
                try:
                    await self._flush(self._flushing)
                except Exception:
                    self._waiting[:0] = self._flushing
                    raise
                finally:
                    self._flushing = ()
        except Exception as error:  # a task that nobody waits for would die without a word
            again = False
            self._failed(error)
        finally:
            self._task = None
            if self._waiting and again:
                self._begin()
            else:
                self._rest()

    def _rest(self) -> None:
        if self._task is None and self._telling is None:
            self._idle.set()

    async def _flush(self, batch: Sequence[tuple[Finished, Subscription]]) -> None:
        alive, gone = batch, [(f, sub) for f, sub in batch if f.outcome is LOST]
        if gone:
            alive = [(f, sub) for f, sub in batch if f.outcome is not LOST]
        items = [f for f, _ in alive]
        commits = await self._commit(items) if items else []
        if Commit.BURIED in commits:
            items = [_as_kept(f, commit) for f, commit in zip(items, commits, strict=True)]
            alive = [(f, sub) for f, (_, sub) in zip(items, alive, strict=True)]
        settled: dict[str, tuple[Subscription, list[Settlement]]] = {}
        fenced = Commit.FENCED
        known: Subscription | None = None
        batch_of: list[Settlement] = []
        for (finished, sub), commit in zip(alive, commits, strict=True):
            if commit is fenced:
                log.warning(
                    "message %s: worker %d no longer owns it, its result was refused",
                    finished.run.message.id,
                    finished.run.token.worker_id,
                )
                gone.append((finished, sub))
                continue
            if finished.run.delivery is not None:
                if sub is not known:
                    known, (_, batch_of) = sub, settled.setdefault(sub.name, (sub, []))
                batch_of.append(self._settlement(finished, sub))
        for finished, sub in gone:
            self._fenced(finished, sub)
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
        self._telling = asyncio.create_task(told, name="ackbone-settler-broker")

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
        except Exception as error:  # as above; the copies come again, and are known
            self._failed(error)
        finally:
            self._telling, self._told_of = None, ()
            self._rest()

    async def _commit(self, items: Sequence[Finished]) -> Sequence[Commit]:
        """Ask until the store answers: a repeat after an unknown commit is ALREADY."""
        pause = 0.05
        while True:
            try:
                commits = await self._store.finish(items, worker=self._worker())
                self._outages.worked(COMMITTING, STORE)
                return commits
            except StoreError as error:
                self._outages.failed(COMMITTING, error)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)

    async def settle(self, sub: Subscription, batch: Sequence[Settlement]) -> None:
        """Tell the broker. A failure is harmless: the copy comes back and is known."""
        if self._broker is None or not batch:
            return
        try:
            await self._broker.settle(sub, batch)
        except BrokerError as error:
            caller = f"settling {len(batch)} messages of {sub.queue}"
            self._outages.failed(caller, error, asks_again=False)

    def _settlement(self, finished: Finished, sub: Subscription) -> Settlement:
        delivery = finished.run.delivery
        assert delivery is not None  # noqa: S101 - asked for only then
        notices = self._notices(finished, sub) if finished.told_on_ack else ()
        if type(finished.outcome) is Done:
            return Settlement(delivery=delivery, verb=_ACK, notices=notices)
        verb, reason = self._verb(finished.outcome, sub)
        return Settlement(delivery=delivery, verb=verb, reason=reason, notices=notices)

    def _verb(self, outcome: Outcome, sub: Subscription) -> tuple[Verb, str]:
        """What the broker is told of a run that did not succeed, and why."""
        if isinstance(outcome, Released):
            # With a wait the store keeps it: no broker is asked to hold a message back.
            return (Verb.ACK if outcome.after_s > 0 else Verb.RELEASE), ""
        if isinstance(outcome, Dead | Expired):
            if sub.ack_policy == "nack" and self._can_reject:
                return Verb.REJECT, getattr(outcome, "reason", "expired")
            if sub.ack_policy == "requeue":
                return Verb.RELEASE, ""
        return Verb.ACK, ""

    def _notices(self, finished: Finished, sub: Subscription) -> Sequence[Notice]:
        """A success is told with its acknowledgement: that spares it the way through the outbox."""
        run = finished.run
        assert sub.notices is not None  # noqa: S101 - it said that it is told
        if sub.notices.results is None:
            return ()
        message = run.message
        told = success_notice(
            (message.tenant_id, run.subscription, message.id),
            finished.result,
            run.failures,
            message.idempotency_key,
            finished.finished_at_us,
            self._worker().name,
        )
        return ((sub.notices.results, told),)

    @property
    def _can_reject(self) -> bool:
        return self._broker is not None and self._broker.capabilities.reject


def _as_kept(finished: Finished, commit: Commit) -> Finished:
    """The end that the store has, which is not the run's own if that was buried."""
    if commit is not Commit.BURIED:
        return finished
    return msgspec.structs.replace(
        finished,
        outcome=Dead(reason=UNSTORABLE),
        result=None,
        replies=(),
        sends=(),
        told_on_ack=False,
    )
