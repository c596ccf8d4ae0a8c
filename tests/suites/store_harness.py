"""What a store's author provides to the store suite, and what its checks work with."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.clock import from_us
from ackbone.core.codecs.codec import CODECS
from ackbone.core.events import FINAL_EVENTS, Entry, Event
from ackbone.core.ids import new_id
from ackbone.core.message import Message
from ackbone.core.outcome import Outcome
from ackbone.core.store import (
    Answer,
    Candidate,
    Claims,
    Commit,
    Company,
    Effects,
    Finished,
    Reclaimed,
    Run,
    RunWrites,
    Verdict,
    Worker,
)
from ackbone.engine.decoder import decoder
from ackbone.testing.clock import FakeClock
from ackbone.testing.harness import expect

LEASE_S = 10.0
CRASH_BUDGET = 2


class Store(Claims, Effects, RunWrites, Protocol):
    """The roles of a store that the suite looks at."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


class StoreHarness:
    """How the suite gets at a store. `make_store` and `let_die` must be written."""

    def setup_method(self) -> None:
        self.clock = FakeClock()

    async def make_store(self) -> Store:
        """A store with an empty database, not open, that gets its time from `self.clock`.

        Messages that crashed their worker twice are its suspects.
        """
        raise NotImplementedError("a store suite must define make_store()")

    async def let_die(self, store: Store, worker: Worker) -> None:
        """Make this worker look as if its process had been killed."""
        raise NotImplementedError("a store suite must define let_die()")

    def forget_all(self, store: Store) -> None:
        """Make this store object as ignorant of other workers as one in a new process."""


StoreCheck = Callable[["StoreTrial"], Awaitable[None]]
"""One check of the suite; raises AssertionError with what it saw."""


async def run_store_check(harness: StoreHarness, check: StoreCheck) -> None:
    """Run one check on a fresh store and clean up behind it."""
    store = await harness.make_store()
    await store.open()
    try:
        await check(StoreTrial(harness, store))
    finally:
        await store.close()


class StoreTrial:
    """One run of one check: the store, and the steps that all checks share."""

    def __init__(self, harness: StoreHarness, store: Store) -> None:
        self.harness = harness
        self.store = store
        self.clock = harness.clock
        self.sub = Subscription(name="s", queue="q", ordered=False)
        self.lanes = Subscription(name="lanes", queue="lanes", ordered=True)
        self.events: list[Event] = []
        self._tags = itertools.count(1)
        store.on_events(self._written)

    def _written(self, entries: Sequence[Entry]) -> None:
        self.events += heard(entries)

    async def worker(self, name: str = "suite", *, parent: str | None = None) -> Worker:
        return await self.store.register(name, parent=parent)

    async def newcomer(self, *, parent: str) -> Worker:
        """A worker of a process that was started just now, on the same machine."""
        self.harness.forget_all(self.store)
        return await self.worker("newcomer", parent=parent)

    async def die(self, worker: Worker) -> None:
        await self.harness.let_die(self.store, worker)

    async def reap(self, worker: Worker, ended: Mapping[str, int] | None = None) -> Reclaimed:
        return await self.store.reap(
            worker=worker, lease_s=LEASE_S, crash_budget=CRASH_BUDGET, ended=ended
        )

    def candidate(
        self, message_id: str | None = None, *, ttl_s: float | None = None, **fields: Any
    ) -> Candidate:
        """A broker copy of a message; the same arguments give another copy of the same one."""
        now = from_us(self.clock.now_us())
        fields.setdefault("type", "t")
        fields.setdefault("created_at", now)
        if ttl_s is not None:
            fields["expires_at"] = now + timedelta(seconds=ttl_s)
        message = Message(id=message_id or new_id(), **fields)
        body, headers = CODECS["standard"].encode(message)
        return self.decoded(body, headers, identity=message.id)

    def decoded(self, body: bytes, headers: Any = None, *, identity: str) -> Candidate:
        delivery = Delivery(
            body=body, headers=headers or {}, tag=next(self._tags), identity=identity
        )
        return decoder(self.sub)(delivery)

    async def claim(
        self, worker: Worker, *batch: Candidate, sub: Subscription | None = None
    ) -> list[Verdict]:
        verdicts = list(await self.store.claim(sub or self.sub, batch, worker=worker))
        expect(len(verdicts) == len(batch), f"{len(batch)} asked, {len(verdicts)} verdicts")
        return verdicts

    async def run(self, worker: Worker, message_id: str | None = None, **fields: Any) -> Run:
        """A claimed run of a new message."""
        (verdict,) = await self.claim(worker, self.candidate(message_id, **fields))
        return self.granted(verdict)

    def granted(self, verdict: Verdict) -> Run:
        run = verdict.run
        expect(verdict.answer is Answer.RUN and run is not None, f"to run, not {verdict.answer}")
        assert run is not None  # expect() has said so; this is for the type checker
        return run

    async def ready(
        self,
        worker: Worker,
        *,
        sub: Subscription | None = None,
        limit: int = 100,
        company: Company = Company.ANY,
    ) -> list[Run]:
        """Runs that the store holds and that are due."""
        verdicts = await self.store.claim_ready(
            sub or self.sub, limit=limit, worker=worker, company=company
        )
        return [v.run for v in verdicts if v.run is not None and v.answer is Answer.RUN]

    async def one_ready(self, worker: Worker, **options: Any) -> Run:
        runs = await self.ready(worker, **options)
        expect(len(runs) == 1, f"one run was due, {len(runs)} came")
        return runs[0]

    async def finish(
        self, worker: Worker, *ends: tuple[Run, Outcome], **options: Any
    ) -> list[Commit]:
        now = self.clock.now_us()
        options = {"crash_budget": CRASH_BUDGET, **options}
        batch = [
            Finished(run=run, outcome=outcome, started_at_us=now, finished_at_us=now, **options)
            for run, outcome in ends
        ]
        commits = list(await self.store.finish(batch, worker=worker))
        expect(len(commits) == len(batch), f"{len(batch)} finished, {len(commits)} answers")
        return commits

    async def committed(self, worker: Worker, run: Run, outcome: Outcome, **options: Any) -> None:
        (commit,) = await self.finish(worker, (run, outcome), **options)
        expect(commit is Commit.COMMITTED, f"{outcome} was {commit}")

    def finals(self, message_id: str) -> list[str]:
        """The final events of one message, of those that this process wrote."""
        return [e.type for e in self.events if e.task_id == message_id and e.type in FINAL_EVENTS]

    def expect_one_final_each(self) -> None:
        """P3: one final event per task, ever."""
        counted = Counter(
            (e.tenant_id, e.subscription, e.task_id) for e in self.events if e.type in FINAL_EVENTS
        )
        twice = {task: n for task, n in counted.items() if n > 1}
        expect(not twice, f"more than one final event: {twice}")


def heard(entries: Sequence[Entry]) -> list[Event]:
    return [
        Event(
            type=kind,
            tenant_id=tenant_id,
            subscription=subscription,
            task_id=task_id,
            data=dict(data),
        )
        for tenant_id, subscription, task_id, kind, data in entries
    ]


def answers(verdicts: Sequence[Verdict]) -> list[Answer]:
    return [verdict.answer for verdict in verdicts]


def expect_answers(verdicts: Sequence[Verdict], *wanted: Answer) -> None:
    got = answers(verdicts)
    expect(got == list(wanted), f"verdicts {[str(a) for a in got]}, not {[str(a) for a in wanted]}")
