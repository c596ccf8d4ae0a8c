"""The world of the protocol model: workers that die, stand still or are asked to stop, a machine
whose power fails, a queue that delivers again, and a scheduler that lets any of them take the next
step. One seed, one story.

Everything that decides who may run a message is the real store (and, in `fused` worlds, the real
queue); only the processes, the foreign broker and the passing of time are played.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import msgspec

from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.broker import Delivery, Outgoing, Subscription
from ackbone.core.clock import from_us
from ackbone.core.codecs.codec import CODECS
from ackbone.core.errors import Conflict, LeaseLost, StoreUnavailable
from ackbone.core.message import Message
from ackbone.core.outcome import (
    Dead,
    Discarded,
    Done,
    Outcome,
    Park,
    ParkKind,
    Rejected,
    Released,
    Retry,
)
from ackbone.core.records import EffectWord, Identity, Resumption
from ackbone.core.store import (
    Answer,
    Commit,
    Company,
    EffectState,
    Finished,
    Reply,
    Run,
    Send,
    Verdict,
    Worker,
)
from ackbone.engine.decoder import decoder
from ackbone.sqlitefile.file import SqliteFile
from ackbone.store.operations import StoreOperations
from ackbone.store.sqlite.store import SqliteStore
from ackbone.testing.clock import FakeClock
from tests.property.protocol_file import Fault, InlineFile

T = TypeVar("T")
TENANTS = ("acme", "zeta")
RESULTS = "results"
"""The queue that follow-up messages go to; nobody reads it."""
FAULTY_STEPS = 140
CALM_ROUNDS = 250


class Mode(StrEnum):
    """Where messages come from."""

    FUSED = "fused"
    """The queue lives in the store's file; conversations keep their order."""
    BROKER = "broker"
    """A foreign broker that delivers any unacknowledged copy to anyone, at any time."""
    ORDERED = "ordered"
    """A foreign broker with an ordered log, read by one fetcher at a time."""


class State(StrEnum):
    ALIVE = "alive"
    STALLED = "stalled"
    """Stands still past its lease for everyone else, and still acts: a zombie."""
    GONE = "gone"


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A message as its producer knows it."""

    id: str
    tenant: str
    lane: str | None
    key: str | None
    payload: dict[str, Any]
    outgoing: Outgoing
    forged: bool = False
    """The id of another message with another payload."""
    garbage: bool = False
    """No message at all."""


class Copy(msgspec.Struct, kw_only=True, eq=False):
    """One copy in the foreign broker."""

    delivery: Delivery
    acked: bool = False


class Process(msgspec.Struct, kw_only=True, eq=False):
    """A worker process: what it holds in memory, lost when it is killed."""

    worker: Worker
    state: State = State.ALIVE
    received: list[Copy] = []
    runs: list[Run] = []
    ended: list[Finished] = []
    acks: list[Copy] = []

    def forget(self) -> None:
        self.received, self.runs, self.ended, self.acks = [], [], [], []


class World:
    """Runs one story. `violations` holds what was seen to be wrong on the way."""

    def __init__(self, seed: int, mode: Mode) -> None:
        self.seed, self.mode = seed, mode
        self.rng = random.Random(f"{mode}:{seed}")
        self.clock = FakeClock()
        self.file = InlineFile(self.clock)
        self.violations: list[str] = []
        self.window_s = self.rng.choice((20.0, 3600.0))
        self.crash_budget = self.rng.choice((1, 2, 3, 3))
        self.on_parked = self.rng.choice(("wait", "skip"))
        self.power_cuts = self.rng.choice((0.0, 0.0, 0.3))
        """How often; other stories have none, so that what only goes on for long is told, too."""
        self.file.remembers = self.power_cuts > 0
        self.sub = Subscription(name="jobs", queue="jobs", ordered=mode is not Mode.BROKER)
        self.decode = decoder(self.sub)
        self.processes: list[Process] = []
        self.copies: list[Copy] = []
        self.sent: list[Sent] = []
        self.unsent = self._messages()
        self.commits: set[tuple[str, str, int, int]] = set()
        """Tokens whose end was really committed."""
        self.granted: Counter[tuple[str, str, int, int]] = Counter()
        self.performed: Counter[tuple[str, str]] = Counter()
        """How often the guarded effect of a message happened."""
        self.calm = False
        self.queue, self.store = self._machine()

    def _machine(self) -> tuple[SqliteBroker | None, SqliteStore]:
        """Queue and store as processes find them after the machine was started."""
        path, clock = self.file.path, self.clock
        queue = SqliteBroker(path, clock) if self.mode is Mode.FUSED else None
        return queue, SqliteStore(path, queue=queue, clock=clock)

    # -- the story --------------------------------------------------------------------------------

    async def run(self) -> None:
        """A time of faults, then calm until nothing moves any more."""
        with self._real_store():
            await self._boot()
            for _ in range(FAULTY_STEPS):
                await self._step()
            await self._calm_down()

    async def _boot(self) -> None:
        if self.queue is not None:
            await self.queue.open()
        await self.store.open()
        for _ in range(2):
            await self._start_process()

    @contextlib.contextmanager
    def _real_store(self) -> Any:
        """The store and queue as they are, on our file, with our word on who is alive."""
        queue = "ackbone.brokers.sqlite"
        store, leases = "ackbone.store.sqlite.store", "ackbone.store.sqlite.leases"

        def opened(path: Path, clock: object = None) -> SqliteFile:
            return cast(SqliteFile, self.file)

        def alive(folder: Path, worker_id: int, **_: object) -> bool:
            return self._is_alive(worker_id)

        with (
            mock.patch(f"{store}.open_file", opened),
            mock.patch(f"{leases}.is_alive", alive),
            mock.patch(f"{leases}.forget"),
            mock.patch(f"{leases}.Beat"),
            mock.patch(f"{queue}.open_file", opened),
        ):
            yield

    async def _step(self) -> None:
        """Whoever the scheduler picks does one thing."""
        steps: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (6, self._work),
            (3, self._send),
            (1, self._pass_time),
            (0.6, self._reap),
            (0.3, self._resolve),
            (0.3, self._resume),
            (0.4, self._operate),
            (0.3, self._kill),
            (0.3, self._stall),
            (0.3, self._notice),
            (0.25, self._drain),
            (self.power_cuts, self._cut_power),
        ]
        weights = [weight for weight, _ in steps]
        (_, chosen), *_ = self.rng.choices(steps, weights)
        await chosen()

    async def _calm_down(self) -> None:
        """No more faults: what was begun must come to its end."""
        self.calm = True
        self.store.expiry_paused = False
        while self.unsent:
            await self._send()
        for process in self._acting():
            if process.state is State.STALLED:
                await self._notice_of(process)
        if not self._acting():
            await self._start_process()
        for _ in range(CALM_ROUNDS):
            await self._reap()
            await self._resolve()
            for process in self._acting():
                await self._fetch(process)
                await self._claim(process)
                process.ended += [self._ended(run) for run in process.runs]
                process.runs = []
                await self._commit(process)
                self._acknowledge(process)
            if self._is_quiet():
                return
            await self._resume()
            await self._operate()
            self.clock.advance(self.rng.uniform(1, 20))
        self.violations.append(f"never came to rest: {self._restless()}")

    # -- producers --------------------------------------------------------------------------------

    def _messages(self) -> list[Sent]:
        made = [self._message(n) for n in range(self.rng.randint(6, 12))]
        if self.rng.random() < 0.3:
            twin = self.rng.choice(made)
            made.append(
                self._encoded(twin.id, twin.tenant, None, None, {"forged": True}, forged=True)
            )
        if self.rng.random() < 0.3:
            out = Outgoing(id="garbage", body=b"\x00{", headers={})
            made.append(
                Sent(
                    id="garbage",
                    tenant="default",
                    lane=None,
                    key=None,
                    payload={},
                    outgoing=out,
                    garbage=True,
                )
            )
        return made

    def _message(self, n: int) -> Sent:
        rng = self.rng
        lane = rng.choice(("red", "blue")) if self.mode is not Mode.BROKER else None
        lane = lane if self.mode is Mode.ORDERED or rng.random() < 0.6 else None
        key = f"k{rng.randrange(3)}" if rng.random() < 0.6 else None
        return self._encoded(f"m{n}", rng.choice(TENANTS), lane, key, {"n": n})

    def _encoded(
        self,
        message_id: str,
        tenant: str,
        lane: str | None,
        key: str | None,
        payload: dict[str, Any],
        *,
        forged: bool = False,
    ) -> Sent:
        ttl = self.rng.choice((None, None, None, 15.0))
        message = Message(
            type="job",
            id=message_id,
            tenant_id=tenant,
            payload=payload,
            ordering_key=lane,
            idempotency_key=key,
            priority=self.rng.choice((1, 1, 1, 2)),
            created_at=from_us(self.clock.now_us()),
        )
        body, headers = CODECS["standard"].encode(message)
        outgoing = Outgoing(
            id=message_id,
            body=body,
            headers=headers,
            priority=message.priority,
            delay_s=5.0 if lane is None and self.rng.random() < 0.2 else 0.0,
            ttl_s=ttl,
            key=lane,
        )
        return Sent(
            id=message_id,
            tenant=tenant,
            lane=lane,
            key=key,
            payload=payload,
            outgoing=outgoing,
            forged=forged,
        )

    async def _send(self) -> None:
        """The next message, or one more copy of an earlier one (a producer repeats itself)."""
        again = bool(self.sent) and (not self.unsent or self.rng.random() < 0.15) and not self.calm
        if not again and not self.unsent:
            return
        sent = self.rng.choice(self.sent) if again else self.unsent[0]
        if self.queue is not None:
            self._break_sometimes()
            (result,) = await self.queue.publish(self.sub.queue, [sent.outgoing])
            if result.error is not None and not self.file.committed:
                return  # nothing was accepted: the producer will come again
            if result.error is not None:
                await self.queue.publish(self.sub.queue, [sent.outgoing])
        else:
            self.copies.append(Copy(delivery=self.delivery_of(sent)))
        if not again:
            self.sent.append(self.unsent.pop(0))

    def delivery_of(self, sent: Sent) -> Delivery:
        out = sent.outgoing
        expires = None if out.ttl_s is None else self.clock.now_us() + int(out.ttl_s * 1e6)
        return Delivery(
            body=out.body,
            headers=out.headers,
            tag=len(self.copies),
            identity=out.id,
            priority=out.priority,
            key=out.key,
            expires_at_us=expires,
        )

    # -- processes --------------------------------------------------------------------------------

    def _acting(self) -> list[Process]:
        return [p for p in self.processes if p.state is not State.GONE]

    def _is_alive(self, worker_id: int) -> bool:
        return any(
            p.worker.worker_id == worker_id and p.state is State.ALIVE for p in self.processes
        )

    async def _start_process(self) -> None:
        worker = await self.store.register("model")
        self.processes.append(Process(worker=worker))

    async def _kill(self) -> None:
        victim = self.rng.choice(self._acting())
        victim.state = State.GONE
        victim.forget()
        await self._start_process()

    async def _stall(self) -> None:
        self.rng.choice(self._acting()).state = State.STALLED
        if not any(p.state is State.ALIVE for p in self.processes):
            await self._start_process()

    async def _notice(self) -> None:
        await self._notice_of(self.rng.choice(self._acting()))

    async def _notice_of(self, process: Process) -> None:
        """It goes on; if it was declared dead it drops everything and begins under a new number."""
        if self.store.is_registered(process.worker):
            process.state = State.ALIVE
            return
        process.state = State.GONE
        process.forget()
        await self._start_process()

    async def _drain(self) -> None:
        """An orderly stop, with a fetch under way whose answer nobody waits for any more."""
        process = self.rng.choice(self._acting())
        if self.rng.random() < 0.5:
            await self._fetch(process)
            self.file.fault = Fault.UNKNOWN
            with contextlib.suppress(StoreUnavailable):
                await self._claim_unguarded(process)
            self.file.fault = Fault.NONE
        outcomes: list[Outcome] = [Released(), Done()]
        process.ended += [self._ended(run, self.rng.choice(outcomes)) for run in process.runs]
        process.runs = []
        await self._commit(process)
        self._acknowledge(process)
        await self.store.leave(process.worker)
        process.state = State.GONE
        process.forget()
        await self._start_process()

    async def _cut_power(self) -> None:
        """Every process is gone, and so is what was not synced; the foreign broker has no part in
        it, and keeps what was acknowledged to it.
        """
        for process in self._acting():
            if self.rng.random() < 0.5:  # it acts on what is not on the disk yet
                await self._fetch(process)
                await self._claim(process)
                self._acknowledge(process)
            process.state = State.GONE
            process.forget()
        self.file.cut_power(self.rng)
        self.queue, self.store = self._machine()
        await self._boot()

    async def _reap(self) -> None:
        await self._tried(
            self.store.reap(
                worker=self.rng.choice(self._acting()).worker,
                lease_s=10.0,
                crash_budget=self.crash_budget,
            )
        )

    async def _resolve(self) -> None:
        await self._tried(self.store.resolve(worker=self.rng.choice(self._acting()).worker))

    async def _resume(self) -> None:
        """A handler appears: what was parked for want of one goes on."""
        worker = self.rng.choice(self._acting()).worker
        kind = ParkKind.WORKFLOW_PENDING
        await self._tried(
            self.store.resume_parked(kind, ["*"], subscription=self.sub.name, worker=worker)
        )

    async def _operate(self) -> None:
        """A person looks at a parked message: it goes on, or ends here."""
        parked = self.file.conn.execute(
            "SELECT tenant_id, subscription, message_id, parked_kind FROM queue_executions"
            " WHERE status = 'parked' ORDER BY rowid"
        ).fetchall()
        if not parked:
            return
        *names, kind = self.rng.choice(parked)
        task = Identity(tenant_id=names[0], subscription=names[1], message_id=names[2])
        async with StoreOperations(self.store, by="a person") as person:
            if self.rng.random() < 0.3:
                await self._tried(person.discard_parked(task, reason="not wanted"))
                return
            happened = self.performed[(task.tenant_id, task.message_id)] > 0
            word = Resumption.DONE if happened else Resumption.NOT_DONE
            effects = [EffectWord(name="charge", word=word)]
            try:
                effects = effects if kind == ParkKind.EFFECT_UNKNOWN else []
                await self._tried(person.resume(task, effects=effects))
            except Conflict:  # its worker lived on and recorded the end meanwhile
                await self._tried(person.resume(task))

    async def _pass_time(self) -> None:
        self.clock.advance(self.rng.choice((0.5, 2.0, 8.0, 25.0)))
        self.store.expiry_paused = self.rng.random() < 0.1

    # -- the work of a process --------------------------------------------------------------------

    async def _work(self) -> None:
        process = self.rng.choice(self._acting())
        await self.rng.choice(
            (
                self._fetch,
                self._claim,
                self._run_on,
                self._run_on,
                self._end_some,
                self._commit,
                self._acknowledge_later,
            )
        )(process)

    async def _fetch(self, process: Process) -> None:
        """Receive; where the queue is the store's own, receiving is claiming."""
        if self.mode is Mode.FUSED:
            await self._claim(process)
            return
        free = [c for c in self.copies if not c.acked and c not in process.received]
        if self.mode is Mode.ORDERED:
            # Only the source's fetcher reads, and the oldest unacknowledged entries first.
            with contextlib.suppress(StoreUnavailable):  # declared dead, and has not noticed
                owned = await self.store.adopt_in_order(self.sub, [], worker=process.worker)
                if owned is not None:
                    process.received += free[: self.rng.randint(1, 3)]
        elif free:
            process.received.append(self.rng.choice(free))

    async def _claim(self, process: Process) -> None:
        """A claim that fails was not written: the file promises that to a living process."""
        if not self.calm and self.rng.random() < 0.1:
            self.file.fault = Fault.UNDONE
        with contextlib.suppress(StoreUnavailable):
            await self._claim_unguarded(process)
        self.file.fault = Fault.NONE

    async def _claim_unguarded(self, process: Process) -> None:
        limit = self.rng.randint(1, 3)
        worker = process.worker
        if self.rng.random() < 0.3:
            company = self.rng.choice((Company.FEW, Company.NONE))
            found = await self.store.claim_ready(
                self.sub, limit=limit, worker=worker, company=company
            )
            self._take_up(process, found)
        elif self.queue is not None:
            taken = await self.store.take(self.sub, self.decode, limit=limit, worker=worker)
            self._take_up(process, taken.verdicts)
        elif process.received:
            await self._claim_received(process)
        else:
            self._take_up(
                process, await self.store.claim_ready(self.sub, limit=limit, worker=worker)
            )

    async def _claim_received(self, process: Process) -> None:
        batch = [self.decode(copy.delivery) for copy in process.received]
        verdicts: Sequence[Verdict] | None
        if self.mode is Mode.ORDERED:
            verdicts = await self.store.adopt_in_order(self.sub, batch, worker=process.worker)
        else:
            verdicts = await self.store.claim(self.sub, batch, worker=process.worker)
        copies, process.received = process.received, []
        if verdicts is None:
            return  # another fetcher has this source: not ours to settle
        if len(verdicts) != len(copies):
            self.violations.append(f"{len(copies)} copies, {len(verdicts)} verdicts")
        for copy, verdict in zip(copies, verdicts, strict=False):
            if verdict.answer not in (Answer.RUN, Answer.LEAVE):
                process.acks.append(copy)
        self._take_up(process, verdicts)

    def _take_up(self, process: Process, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.run is not None:
                process.runs.append(verdict.run)
                token = _token(verdict.run)
                self.granted[token] += 1
                if self.granted[token] > 1:
                    self.violations.append(f"token {token} was given out twice")
                if verdict.run.message.payload != self._payload(verdict.run):
                    self.violations.append(f"{token} runs another payload than was sent")

    async def _run_on(self, process: Process) -> None:
        """Something a handler does before its end: a guarded effect, a long run, an early word."""
        if not process.runs:
            return
        run = self.rng.choice(process.runs)
        self._break_sometimes()
        try:
            match self.rng.randrange(4):
                case 0:
                    await self._effect(process, run)
                case 1:
                    await self.store.adopt([run], worker=process.worker)
                case 2:
                    await self.store.heartbeat(run, {"at": "half way"})
                case 3:
                    reply = Reply(channel="early", recipient="r", content="soon", now=True)
                    await self.store.reply_now(run, reply, 1)
        except StoreUnavailable:
            return
        except LeaseLost:
            if self._owns(run):
                self.violations.append(f"{_token(run)} owns its message and was refused")
            process.runs.remove(run)
        finally:
            self.file.fault = Fault.NONE

    async def _effect(self, process: Process, run: Run) -> None:
        state, _value = await self.store.effect_begin(run, "charge")
        if state is EffectState.UNKNOWN:
            process.runs.remove(run)
            outcome = Park(kind=ParkKind.EFFECT_UNKNOWN, reason="begun by an attempt that died")
            process.ended.append(self._ended(run, outcome))
        elif state is EffectState.NEW:
            self.performed[(run.message.tenant_id, run.message.id)] += 1
            if self.rng.random() < 0.7:
                await self.store.effect_done(run, "charge", b"1")

    async def _end_some(self, process: Process) -> None:
        while process.runs and self.rng.random() < 0.7:
            run = process.runs.pop(self.rng.randrange(len(process.runs)))
            process.ended.append(self._ended(run))

    def _ended(self, run: Run, outcome: Outcome | None = None) -> Finished:
        """An attempt's end. Result, reply and follow-up bear the token, to see whose was kept."""
        name = f"{run.token.worker_id}:{run.token.epoch}"
        follow_up = Outgoing(id=f"{run.message.id}#{name}", body=name.encode())
        return Finished(
            run=run,
            outcome=self._outcome() if outcome is None else outcome,
            result=msgspec.json.encode(name),
            replies=[Reply(channel="test", recipient="r", content=name)],
            sends=[Send(queue=RESULTS, outgoing=follow_up, tenant_id=run.message.tenant_id)],
            dedup_window_s=self.window_s,
            on_parked=self.on_parked,
            keep_rejected=True,
            crash_budget=self.crash_budget,
        )

    def _outcome(self) -> Outcome:
        outcomes: list[tuple[float, Outcome]] = [
            (5, Done()),
            (1.5, Retry(after_s=self.rng.choice((0.0, 3.0)), reason="no luck")),
            (1, Dead(reason="failed", error="no hope")),
            (0.3, Rejected(reason="not allowed")),
            (0.3, Discarded(reason="cancelled")),
            (0 if self.calm else 1, Park(kind=ParkKind.WORKFLOW_PENDING, reason="no handler")),
            (0 if self.calm else 0.5, Retry(after_s=0.0, reason="child died", crashed=True)),
            (0 if self.calm else 0.5, Released(after_s=self.rng.choice((0.0, 2.0)))),
        ]
        return self.rng.choices([o for _, o in outcomes], [w for w, _ in outcomes])[0]

    async def _commit(self, process: Process) -> None:
        """Finish what ended; a batch whose answer was lost is finished again later."""
        if not process.ended:
            return
        batch = process.ended[: self.rng.randint(1, len(process.ended))]
        if self.calm:
            batch = list(process.ended)
        before = set(self.commits)
        self._break_sometimes()
        try:
            commits = await self.store.finish(batch, worker=process.worker)
        except StoreUnavailable:
            self._note_commits(batch, self.file.result or ())
            return
        self._note_commits(batch, commits)
        process.ended = [item for item in process.ended if item not in batch]
        for item, commit in zip(batch, commits, strict=True):
            token = _token(item.run)
            if commit is Commit.ALREADY and token not in before:
                self.violations.append(f"{token} is told ALREADY and never committed")
            settled = commit is not Commit.FENCED and not isinstance(item.outcome, Released)
            if settled and item.run.delivery is not None:
                process.acks.append(self.copies[item.run.delivery.tag])

    def _note_commits(self, batch: Sequence[Finished], commits: Sequence[Commit]) -> None:
        for item, commit in zip(batch, commits, strict=False):
            if commit is Commit.COMMITTED:
                token = _token(item.run)
                if token in self.commits:
                    self.violations.append(f"{token} was committed twice")
                self.commits.add(token)

    async def _acknowledge_later(self, process: Process) -> None:
        if self.rng.random() < 0.1:
            process.acks = []  # the broker was away: the copies come back
        self._acknowledge(process)

    def _acknowledge(self, process: Process) -> None:
        for copy in process.acks:
            copy.acked = True
        process.acks = []

    # -- what the scheduler knows -----------------------------------------------------------------

    def _break_sometimes(self) -> None:
        if not self.calm:
            self.file.fault = self.rng.choices(list(Fault), (8, 1, 1))[0]

    async def _tried(self, work: Awaitable[T]) -> None:
        self._break_sometimes()
        with contextlib.suppress(StoreUnavailable):
            await work
        self.file.fault = Fault.NONE

    def _owns(self, run: Run) -> bool:
        found = self.file.conn.execute(
            "SELECT worker_id, epoch, status FROM queue_executions WHERE tenant_id = ?"
            " AND message_id = ?",
            (run.message.tenant_id, run.message.id),
        ).fetchone()
        return bool(found == (run.token.worker_id, run.token.epoch, "running"))

    def _payload(self, run: Run) -> Any:
        payload = run.message.payload
        known = [s for s in self.sent if s.id == run.message.id and s.payload == payload]
        return payload if known else None

    def _is_quiet(self) -> bool:
        if any(not copy.acked for copy in self.copies):
            return False
        return not self._restless() and not any(p.runs or p.ended for p in self._acting())

    def _restless(self) -> list[Any]:
        """Rows that are not final, and messages that nobody took."""
        conn = self.file.conn
        rows = conn.execute(
            "SELECT message_id, status, held, worker_id, idem_key, lane, crashes"
            " FROM queue_executions WHERE status NOT IN ('succeeded', 'failed', 'rejected',"
            " 'expired', 'discarded', 'duplicate')"
        ).fetchall()
        waiting = conn.execute(
            "SELECT message_id, state FROM messages WHERE queue = ?", (self.sub.queue,)
        ).fetchall()
        return [*rows, *waiting, *(c.delivery.identity for c in self.copies if not c.acked)]


def _token(run: Run) -> tuple[str, str, int, int]:
    return (run.message.tenant_id, run.message.id, run.token.worker_id, run.token.epoch)
