"""The flow of messages through a worker: from their claim to their commit.

`Flow` stands between the loops that make the steps (`steps.py`): it starts the runs that fetchers
were granted, passes ended runs to the settler, frees their slots, and counts and logs both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ackbone.core.broker import Subscription
from ackbone.core.outcome import Park, Released, Retry
from ackbone.core.store import GROUP, Answer, Commit, Company, Finished, Run, Verdict

from .executor import Executor
from .settler import Settler
from .steps import Steps
from .wiring import Handling, Ports, WorkerSettings

log = logging.getLogger("ackbone.engine")

_NOT_ENDED = frozenset({Retry, Park, Released})
"""Outcomes after which a message waits for another attempt or for a person."""
_COPIES = frozenset({Answer.FINAL, Answer.ADOPTED, Answer.KNOWN})
"""Verdicts for further copies of a message that the store knows."""
_Claim = tuple[str, str, str, int, int]


class Slots:
    """Room for the runs of one subscription. Fetchers wait for it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def free(self) -> int:
        return self.size - self.taken

    def take(self, n: int) -> None:
        self.taken += n
        if self.taken >= self.size:
            self._room.clear()

    def give(self, n: int) -> None:
        was_full = self.taken >= self.size
        self.taken -= n
        if was_full and self.taken < self.size:
            self._room.set()

    def widen(self, size: int) -> None:
        """Make room for more runs."""
        self.size = max(self.size, size)
        if self.taken < self.size:
            self._room.set()

    async def room(self) -> int:
        """Wait until at least one slot is free. Returns how many are."""
        while self.free <= 0:  # another fetcher may have been woken first
            await self._room.wait()
        return self.free

    async def reserve(self, wanted: int) -> int:
        """Wait for a free slot, then take up to `wanted` of them. Returns how many it took."""
        taken = min(wanted, await self.room())
        self.take(taken)
        return taken


class Life(Protocol):
    """The worker, which ends if something in it fails."""

    def fail(self, what: str, error: BaseException) -> None: ...

    def recycle_soon(self) -> None:
        """Ask for this process to be replaced, because a handler cannot be stopped."""
        ...


class Flow:
    """The messages of one worker between claim and commit."""

    def __init__(
        self,
        ports: Ports,
        steps: Steps,
        handling: Handling,
        subscriptions: Sequence[Subscription],
        settings: WorkerSettings,
        *,
        life: Life,
        on_work: Callable[[], None] | None = None,
    ) -> None:
        """`on_work` is called once, before the first run starts."""
        self.subscriptions = list(subscriptions)
        self.executor = Executor(
            handling,
            steps,
            self,
            clock=ports.clock,
            crash_budget=settings.crash_budget,
            recycle_grace_s=settings.recycle_grace_s,
        )
        self.settler = Settler(steps, self)
        self.finished = 0
        """Messages that ended in this worker."""
        self.is_open = False
        """True between the start of the worker and its drain."""
        self.halted = False
        """True while `EngineWorker.pause` holds back new runs."""
        self.paused = settings.paused
        """Subscriptions from which nothing is fetched."""
        self.unbound: set[str] = set()
        """Subscriptions whose broker does not know yet which store its workers use."""
        self.lost_worker_id = 0
        """Id of the last worker registration that was declared dead."""
        self._steps = steps
        self._meter = ports.meter
        self._life = life
        self._on_work = on_work
        self._is_child = settings.is_child
        shared = Slots(GROUP if settings.company is Company.FEW else 1)
        self.slots = {
            sub.name: shared
            if settings.is_child
            else Slots(settings.own_slots.get(sub.name, settings.slots))
            for sub in self.subscriptions
        }
        self.repeated = RepeatedClaims() if ports.store.forgets_claims else None

    @property
    def is_idle(self) -> bool:
        """Return True if nothing runs, and nothing waits to be committed or settled."""
        return self.executor.running == 0 and self.settler.waiting == 0

    def serving(self) -> dict[str, int]:
        """Return the slots that take messages, by queue. A paused queue has 0."""
        open_to_all = self.is_open and not self.halted
        found: dict[str, int] = {}
        for sub in self.subscriptions:
            taking = open_to_all and sub.name not in self.paused
            found[sub.queue] = found.get(sub.queue, 0) + taking * self.slots[sub.name].size
        return found

    # -- into the worker --------------------------------------------------------------------------

    def wait_s(self, sub: Subscription) -> float:
        """Return how many seconds not to fetch. 0: fetch now."""
        if self.halted:
            return 0.05
        if not self.is_open or sub.name in self.paused or sub.name in self.unbound:
            return 1.0
        if self.settler.behind > self.slots[sub.name].size:
            return 0.05
        return self.executor.breaker_wait_s(sub.queue) or 0.0

    def start(self, verdicts: Sequence[Verdict], sub: Subscription) -> int:
        """Start the runs that the store granted. Returns how many slots they take."""
        granted = Answer.RUN
        runs = [v.run for v in verdicts if v.run is not None and v.answer is granted]
        started = self._start(runs, sub)
        if len(runs) < len(verdicts):
            self._count_others(sub, verdicts)
        return started

    def _start(self, runs: Sequence[Run], sub: Subscription) -> int:
        if self.repeated is not None:
            runs = [run for run in runs if self.repeated.begin(run)]
        if runs and self._on_work is not None:
            self._on_work()
            self._on_work = None
        if log.isEnabledFor(logging.DEBUG):
            for run in runs:
                _log_stage("message.consumed", run)
                _log_stage("message.parsed", run)
        # A claim may be answered after the lease was lost: its runs belong to another worker.
        late = bool(runs) and runs[0].token.worker_id == self.lost_worker_id
        self.executor.start(runs, sub, cause="lost" if late else "")
        return len(runs)

    def _count_others(self, sub: Subscription, verdicts: Sequence[Verdict]) -> None:
        """Count copies of known messages, and log messages that were parked."""
        if self._meter is not None:
            copies = sum(verdict.answer in _COPIES for verdict in verdicts)
            if copies:
                self._meter.recognized(sub.queue, copies)
        parked = [v.run for v in verdicts if v.answer is Answer.PARKED and v.run is not None]
        if parked:
            types = sorted({run.message.type for run in parked})
            log.warning(
                "no living worker has a handler for %s: parked message %s of queue %s%s until one"
                " starts. See: ackbone parked list",
                ", ".join(types[:5]) + (" and others" if len(types) > 5 else ""),
                parked[0].message.id,
                sub.queue,
                f" and {len(parked) - 1} more" if len(parked) > 1 else "",
            )

    def unclaimed(self, sub: Subscription, messages: int) -> None:
        """Count messages that were received while the store is away."""
        if self._meter is not None:
            self._meter.dedup_unavailable(sub.queue, messages)

    # -- out of the worker ------------------------------------------------------------------------

    def ended(self, finished: Finished, sub: Subscription) -> None:
        """Free the slot of an ended run and pass its outcome on to be committed.

        A suspect keeps its slot until it is committed: the next suspect may kill the process, and
        with it everything that is not committed.
        """
        if not self._is_child:
            self.slots[sub.name].give(1)
        self.settler.add(finished, sub)

    def stuck(self) -> None:
        self._life.recycle_soon()

    def committed(self, items: Sequence[Finished], commits: Sequence[Commit]) -> None:
        """Count and log the runs that are committed and settled."""
        fenced = Commit.FENCED
        done = [
            finished
            for finished, commit in zip(items, commits, strict=True)
            if commit is not fenced
        ]
        if self._is_child:
            for finished in done:
                self.slots[finished.run.subscription].give(1)
        if self.repeated is not None:
            for finished in done:
                self.repeated.end(finished.run)
        if self._meter is not None:
            self._meter.ran(done)
        if log.isEnabledFor(logging.DEBUG):
            for finished in done:
                _log_stage("message.executed", finished.run)
                _log_stage("message.acked", finished.run)
        ended = sum([type(finished.outcome) not in _NOT_ENDED for finished in done])
        if ended < len(done):
            for finished in done:
                if type(finished.outcome) is Park:
                    _log_parked(finished.run, finished.outcome)
        if ended:
            self.finished += ended
            log.info("finished %d %s", ended, "message" if ended == 1 else "messages")

    def fenced(self, finished: Finished, sub: Subscription) -> None:
        """Drop a run whose claim was lost. If the claim was granted again here, start that run."""
        run = finished.run
        if self._is_child:
            self.slots[sub.name].give(1)
        second = None if self.repeated is None else self.repeated.end(run)
        if run.token.worker_id != self._steps.worker.worker_id:
            return
        log.warning("message %s: dropped, its claim is gone", run.message.id)
        if second is not None:
            self.slots[sub.name].take(self._start([second], sub))

    def failed(self, error: Exception) -> None:
        self._life.fail("the settler", error)


class RepeatedClaims:
    """Claims of runs in this process, from their start until the store has recorded their end.

    A store that forgot a claim in a crash grants it again, with the same token. The first run may
    go on and commit. Only if it is refused, the second run starts.
    """

    def __init__(self) -> None:
        self._second: dict[_Claim, Run | None] = {}

    def begin(self, run: Run) -> bool:
        """Return True if the run may start. Otherwise it is kept until the first run has ended."""
        claim = _claim_of(run)
        if claim in self._second:
            self._second[claim] = run
            return False
        self._second[claim] = None
        return True

    def end(self, run: Run) -> Run | None:
        """Forget a run that the store has answered. Returns the second run, if one was kept."""
        return self._second.pop(_claim_of(run), None)


def _claim_of(run: Run) -> _Claim:
    message, token = run.message, run.token
    return message.tenant_id, run.subscription, message.id, token.worker_id, token.epoch


def _log_parked(run: Run, park: Park) -> None:
    """Log what a parked message waits for, and which command shows it."""
    command = "parked" if park.question is None else "approvals"
    log.warning(
        "message %s: parked (%s): %s; see: ackbone %s show %s",
        run.message.id,
        park.kind,
        park.reason or "no reason was given",
        command,
        run.message.id,
        extra={"trace_id": run.message.trace_id},
    )


def _log_stage(name: str, run: Run) -> None:
    """Log one line per stage of a message, at DEBUG. At INFO there is one line per batch."""
    log.debug(
        "%s %s",
        name,
        run.message.id,
        extra={"event": name, "trace_id": run.message.trace_id, "queue": run.queue},
    )
