"""The settler: commits the runs that ended, then settles their broker copies.

Steps 6 and 7 (`steps.py`) for everything that ended while the last batch was written. A broker
settles one batch while the store commits the next, and no broker waits for another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ackbone.core.broker import Outgoing, Settlement, Subscription, Verb
from ackbone.core.errors import StoreError
from ackbone.core.message import current_message
from ackbone.core.notices import success_notice
from ackbone.core.outcome import UNSTORABLE, Dead, Done, Expired, Outcome, Released
from ackbone.core.store import Commit, Finished, Run
from ackbone.core.task_protocol import AckWithNotices

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


_Settled = tuple[Finished, Subscription, Settlement, Commit | None]
"""A committed run, and how its copy is settled. Without a commit its claim was lost, and nothing of
the run was written."""
_Copies = dict[str, list[_Settled]]
"""By the name of their subscription."""


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
        self._settling: dict[int, asyncio.Task[None]] = {}
        """The task that settles with each broker, by `id(broker)`."""
        self._committed: dict[int, _Copies] = {}
        """Runs whose copies are to be settled, by the same."""
        self._telling: dict[int, _Copies] = {}
        """Those that are being settled."""

    @property
    def waiting(self) -> int:
        """Runs that ended and are not committed or not settled yet."""
        return len(self._waiting) + len(self._flushing) + len(self._copies())

    @property
    def behind(self) -> int:
        """Runs that ended while the batch before them is still being written."""
        return len(self._waiting)

    @property
    def unsettled(self) -> list[tuple[Run, Subscription]]:
        """All runs that wait here, each with its subscription."""
        held = [(run, sub) for run, sub, _, _ in self._copies()]
        return [(item.run, sub) for item, sub in (*held, *self._flushing, *self._waiting)]

    def _copies(self) -> list[_Settled]:
        """Return the committed runs whose copies are not settled yet."""
        batches = (*self._telling.values(), *self._committed.values())
        return [each for batch in batches for some in batch.values() for each in some]

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
        self._committed.clear()
        for task in (self._task, *self._settling.values()):
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
        if self._task is None and not self._settling:
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
        here: list[Finished] = []
        as_here: list[Commit] = []
        fenced = Commit.FENCED
        known: Subscription | None = None
        copies: list[_Settled] = []
        for (finished, sub), commit in zip(alive, commits, strict=True):
            if commit is fenced:
                log.warning(
                    "message %s: worker %d no longer owns it, its result was refused",
                    finished.run.message.id,
                    finished.run.token.worker_id,
                )
                gone.append((finished, sub))
            elif finished.run.delivery is None:  # the commit was the end
                here.append(finished)
                as_here.append(commit)
            else:
                if sub is not known:
                    known, copies = sub, self._copies_of(sub)
                copies.append((finished, sub, self._settlement(finished, sub), commit))
        for finished, sub in gone:
            self._flow.fenced(finished, sub)
            if finished.run.delivery is not None:
                # Released without a fence: the store recognizes the copy, whatever became of the
                # message. Kept, it would come again only when the broker misses this worker.
                back = Settlement(delivery=finished.run.delivery, verb=Verb.RELEASE)
                self._copies_of(sub).append((finished, sub, back, None))
        if here:
            self._flow.committed(here, as_here)
        for key in self._committed.keys() - self._settling.keys():
            settling = self._settle(key)
            self._settling[key] = asyncio.create_task(settling, name="ackbone-settler-broker")

    def _copies_of(self, sub: Subscription) -> list[_Settled]:
        key = id(self._steps.sources.broker(sub))
        return self._committed.setdefault(key, {}).setdefault(sub.name, [])

    async def _settle(self, key: int) -> None:
        """Settle with one broker, one batch after the other, until nothing is left."""
        try:
            while batch := self._committed.pop(key, None):
                self._telling[key] = batch
                for copies in batch.values():
                    await self._steps.settle(copies[0][1], [each[2] for each in copies])
                    ended = [(each[0], each[3]) for each in copies if each[3] is not None]
                    if ended:
                        self._flow.committed([run for run, _ in ended], [how for _, how in ended])
        except Exception as error:  # as above. The copies come again, and the store knows them
            self._flow.failed(error)
        finally:
            del self._settling[key]
            self._telling.pop(key, None)
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
        if finished.told_on_ack:
            # That spares a success the way through the outbox.
            notices = ((self._steps.results_on_ack[sub.name], self._result(finished)),)
            return AckWithNotices(delivery=delivery, verb=_ACK, notices=notices)
        if type(finished.outcome) is Done:
            return Settlement(delivery=delivery, verb=_ACK)
        verb, reason = self._verb(finished.outcome, sub)
        return Settlement(delivery=delivery, verb=verb, reason=reason)

    def _verb(self, outcome: Outcome, sub: Subscription) -> tuple[Verb, str]:
        """Return how to settle the copy of a run that did not succeed, and the reason to give."""
        if isinstance(outcome, Released):
            # A message that must wait is held by the store, never by a broker.
            return (Verb.ACK if outcome.after_s > 0 else Verb.RELEASE), ""
        if isinstance(outcome, Dead | Expired):
            verb = self._steps.sources.verb_of_failure(sub)
            reason = getattr(outcome, "reason", "expired")
            return verb, (reason if verb is Verb.REJECT else "")
        return Verb.ACK, ""

    def _result(self, finished: Finished) -> Outgoing:
        """Return the result that the broker publishes together with the acknowledgement."""
        run, message = finished.run, finished.run.message
        return success_notice(
            (message.tenant_id, run.subscription, message.id),
            finished.result,
            run.failures,
            message.idempotency_key,
            finished.finished_at_us,
            self._steps.worker.name,
        )


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
