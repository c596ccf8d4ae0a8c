"""The settler: commits the runs that ended, then settles their broker copies.

Steps 6 and 7 (`steps.py`) for everything that ended while the last batch was written. The broker
settles one batch while the store commits the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from ackbone.core.broker import Settlement, Subscription, Verb
from ackbone.core.errors import StoreError
from ackbone.core.message import current_message
from ackbone.core.notices import Notice, success_notice
from ackbone.core.outcome import UNSTORABLE, Dead, Done, Expired, Outcome, Released
from ackbone.core.store import Commit, Finished, Run

from .handlers import LOST
from .outages import STORE
from .steps import Steps

if TYPE_CHECKING:
    from .flow import Flow

log = logging.getLogger("ackbone.engine")

BATCH = 1000
COMMITTING = "committing finished runs"
_ACK = Verb.ACK
"""Used for every message. Before Python 3.12, reading a member from its enum costs more than a
call."""


class Settler:
    """Takes ended runs, commits them, settles their copies, then reports.

    While the store is away ended runs wait here and nothing is settled. Once a slot's worth waits,
    no further messages are fetched.
    """

    def __init__(self, steps: Steps, flow: Flow) -> None:
        self._steps = steps
        self._flow = flow
        self._waiting: list[tuple[Finished, Subscription]] = []
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._flushing: Sequence[tuple[Finished, Subscription]] = ()
        self._settling: asyncio.Task[None] | None = None
        self._committed: Sequence[tuple[Finished, Subscription]] = ()
        """Runs whose copies are being settled."""

    @property
    def waiting(self) -> int:
        """Runs that ended and are not committed or not settled yet."""
        return len(self._waiting) + len(self._flushing) + len(self._committed)

    @property
    def behind(self) -> int:
        """Runs that ended while the batch before them is still being written."""
        return len(self._waiting)

    @property
    def unsettled(self) -> list[tuple[Run, Subscription]]:
        """All runs that wait here, each with its subscription."""
        held = (*self._committed, *self._flushing, *self._waiting)
        return [(item.run, sub) for item, sub in held]

    def add(self, finished: Finished, sub: Subscription) -> None:
        self._waiting.append((finished, sub))
        if self._task is None:
            self._begin()

    async def drain(self) -> None:
        """Wait until everything that ended is committed and settled, or until that failed: then
        `waiting` is not 0."""
        if self._waiting:
            self._begin()
        await self._idle.wait()

    def stop(self) -> int:
        """Give up the runs that are not committed. Returns how many there are."""
        left = len(self._waiting) + len(self._flushing)
        self._waiting.clear()
        for task in (self._task, self._settling):
            if task is not None:
                task.cancel()
        return left

    def _begin(self) -> None:
        if self._task is None:
            self._idle.clear()
            self._task = asyncio.create_task(self._run(), name="ackbone-settler")

    async def _run(self) -> None:
        current_message.set(None)  # the task was made by a run, but belongs to no message
        again = True
        try:
            # One turn of the loop later the fetcher, woken by the same ends, asks for the next
            # messages: where queue and store are one file, both become one transaction.
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
        except Exception as error:  # nobody awaits this task: its error must be reported
            again = False
            self._flow.failed(error)
        finally:
            self._task = None
            if self._waiting and again:
                self._begin()
            else:
                self._rest()

    def _rest(self) -> None:
        if self._task is None and self._settling is None:
            self._idle.set()

    async def _flush(self, batch: Sequence[tuple[Finished, Subscription]]) -> None:
        """Finish a batch, then begin to settle it."""
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
            self._flow.fenced(finished, sub)
            if finished.run.delivery is not None:
                # Released without a fence: the store recognizes the copy, whatever became of the
                # message. Kept, it would come again only when the broker misses this worker.
                _, batch_of = settled.setdefault(sub.name, (sub, []))
                batch_of.append(Settlement(delivery=finished.run.delivery, verb=Verb.RELEASE))
        if not settled:  # queue and store are one file: the commit was the end
            if items:
                self._flow.committed(items, commits)
            return
        if self._settling is not None:  # the broker gets one batch after the other
            await asyncio.wait({self._settling})
        self._committed = batch
        settling = self._settle(settled.values(), items, commits)
        self._settling = asyncio.create_task(settling, name="ackbone-settler-broker")

    async def _settle(
        self,
        settled: Iterable[tuple[Subscription, Sequence[Settlement]]],
        items: Sequence[Finished],
        commits: Sequence[Commit],
    ) -> None:
        try:
            for sub, settlements in settled:
                await self._steps.settle(sub, settlements)
            if items:
                self._flow.committed(items, commits)
        except Exception as error:  # as above. The copies come again, and the store knows them
            self._flow.failed(error)
        finally:
            self._settling, self._committed = None, ()
            self._rest()

    async def _commit(self, items: Sequence[Finished]) -> Sequence[Commit]:
        """Ask until the store answers. A repeat after a commit without an answer is ALREADY."""
        outages, pause = self._steps.outages, 0.05
        while True:
            try:
                commits = await self._steps.finish(items)
                outages.worked(COMMITTING, STORE)
                return commits
            except StoreError as error:
                outages.failed(COMMITTING, error)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)

    def _settlement(self, finished: Finished, sub: Subscription) -> Settlement:
        delivery = finished.run.delivery
        assert delivery is not None  # noqa: S101 - the caller has checked
        notices = self._notices(finished, sub) if finished.told_on_ack else ()
        if type(finished.outcome) is Done:
            return Settlement(delivery=delivery, verb=_ACK, notices=notices)
        verb, reason = self._verb(finished.outcome, sub)
        return Settlement(delivery=delivery, verb=verb, reason=reason, notices=notices)

    def _verb(self, outcome: Outcome, sub: Subscription) -> tuple[Verb, str]:
        """Return how to settle the copy of a run that did not succeed, and the reason to give."""
        if isinstance(outcome, Released):
            # A message that must wait is held by the store, never by a broker.
            return (Verb.ACK if outcome.after_s > 0 else Verb.RELEASE), ""
        if isinstance(outcome, Dead | Expired):
            broker = self._steps.broker
            can_reject = broker is not None and broker.capabilities.reject
            if sub.ack_policy == "nack" and can_reject:
                return Verb.REJECT, getattr(outcome, "reason", "expired")
            if sub.ack_policy == "requeue":
                return Verb.RELEASE, ""
        return Verb.ACK, ""

    def _notices(self, finished: Finished, sub: Subscription) -> Sequence[Notice]:
        """Return the notices that the broker publishes together with the acknowledgement. That
        spares a success the way through the outbox."""
        run = finished.run
        assert sub.notices is not None  # noqa: S101 - told_on_ack says so
        if sub.notices.results is None:
            return ()
        message = run.message
        told = success_notice(
            (message.tenant_id, run.subscription, message.id),
            finished.result,
            run.failures,
            message.idempotency_key,
            finished.finished_at_us,
            self._steps.worker.name,
        )
        return ((sub.notices.results, told),)


def _as_kept(finished: Finished, commit: Commit) -> Finished:
    """Return the run as the store recorded it: a dead letter if its outcome was unstorable."""
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
