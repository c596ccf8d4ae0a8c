"""The checker: was the promise kept? It asks the oracle, the senders and the database.

LOST     accepted, and no final event
DOUBLE   two final events of one task, or two committed runs of one key
GHOST    an effect of a message that nobody sent, or of an attempt that was never claimed
HOLLOW   committed as done, and the oracle saw no effect of it
STUCK    not final, and nobody is in charge of it
REPLIES  not as many replies as committed runs
CHAIN    the ledger was cut or edited
ORDER    a conversation's messages ended, or overlapped, out of order
LATE     a killed worker's task was given back after the limit
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum

import msgspec

from ackbone.core.events import CLAIMED, DUPLICATE, EVENT_OF_STATUS, LOST, SUCCEEDED
from ackbone.core.message import DEFAULT_TENANT
from ackbone.core.outcome import FINAL, Status
from ackbone.store.ledger_verifier import LedgerReport
from tests.faults.history import History, Task, TaskId
from tests.faults.oracle import Effect

SHOWN = 10


class Fault(StrEnum):
    """What can be wrong; the module's text says what each one means."""

    LOST = "LOST"
    DOUBLE = "DOUBLE"
    GHOST = "GHOST"
    HOLLOW = "HOLLOW"
    STUCK = "STUCK"
    REPLIES = "REPLIES"
    CHAIN = "CHAIN"
    ORDER = "ORDER"
    LATE = "LATE"


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was accepted. The place in the list is the place in its conversation."""

    id: str
    key: str | None = None
    conversation: str | None = None
    tenant_id: str = DEFAULT_TENANT
    subscription: str = "default"

    @property
    def task(self) -> TaskId:
        return self.tenant_id, self.subscription, self.id


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was killed, by the killer's clock."""

    worker_id: int
    at_us: int


class Finding(msgspec.Struct, frozen=True):
    """One broken promise."""

    fault: Fault
    subject: str
    detail: str


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the checker judges by."""

    history: History
    sent: Sequence[Sent]
    effects: Sequence[Effect] | None = None
    """None: there was no oracle."""
    ledger: LedgerReport | None = None
    """What `verify_ledger` says; None: it was not asked."""
    kills: Sequence[Kill] = ()
    replies_per_run: int | None = None
    """How often each committed run replied; None: not known, not checked."""
    may_park: Collection[str] = ()
    """Ids of messages that may be parked instead of ended."""
    may_be_hollow: Collection[str] = ()
    """Ids whose committed attempt need not act: an earlier one did, or a policy skipped it."""
    unsure: Collection[str] = ()
    """Ids whose send was never answered: they may exist, and need not."""
    reclaim_limit_s: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict."""

    findings: Sequence[Finding]
    sent: int
    ends: dict[str, int]
    """Final events by type."""
    effects: int
    repeats: int
    """Effects of attempts that did not commit: allowed, and counted."""
    busy_kills: int
    """Kills that hit a worker with running tasks."""
    kills: int
    reclaims_s: Sequence[float]
    """From each kill to each of the victim's tasks being given back, sorted."""
    seed: int | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def count(self, fault: Fault) -> int:
        return sum(finding.fault is fault for finding in self.findings)

    def table(self) -> str:
        """A few lines for people: counts, faults, latencies, the first findings."""
        ends = ", ".join(f"{n} {name.removeprefix('task.')}" for name, n in self.ends.items())
        lines = [
            f"seed {self.seed} | {self.sent} sent | {ends or 'nothing ended'}"
            f" | {self.effects} effects, {self.repeats} of them by attempts that did not commit",
            " | ".join(f"{fault} {self.count(fault)}" for fault in Fault),
        ]
        if self.kills:
            lines.append(
                f"{self.kills} kills, {self.busy_kills} with running tasks"
                f" | {len(self.reclaims_s)} tasks given back{_spread(self.reclaims_s)}"
            )
        shown = self.findings[:SHOWN]
        lines += [f"  {finding.fault} {finding.subject}: {finding.detail}" for finding in shown]
        if len(self.findings) > SHOWN:
            lines.append(f"  and {len(self.findings) - SHOWN} more")
        return "\n".join(lines)


def check(story: Story, *, seed: int | None = None) -> Report:
    """Judge what happened. Call it when all is quiet: what is still on its way counts as lost."""
    history = story.history
    findings = [finding for judge in _JUDGES for finding in judge(story)]
    committed = {(event.task_id, event.data.get("attempt")) for event in history.of_type(SUCCEEDED)}
    effects = story.effects or ()
    latencies = _reclaims(story)
    return Report(
        findings=findings,
        sent=len(story.sent),
        ends=dict(Counter(e.type for ends in history.finals.values() for e in ends)),
        effects=len(effects),
        repeats=sum((effect.message_id, effect.attempt) not in committed for effect in effects),
        kills=len(story.kills),
        busy_kills=len({worker_id for worker_id, _, _ in latencies}),
        reclaims_s=sorted(seconds for _, _, seconds in latencies),
        seed=seed,
    )


def _lost(story: Story) -> Iterator[Finding]:
    for sent in story.sent:
        if sent.task in story.history.finals or sent.id in story.unsure:
            continue
        task = story.history.tasks.get(sent.task)
        if task is not None and task.status == Status.PARKED and sent.id in story.may_park:
            continue
        if task is not None:
            where = f"{task.status}, attempt {task.attempt}, worker {task.worker_id}"
        else:
            where = "waits in the queue" if sent.id in story.history.waiting else "nowhere"
        yield Finding(Fault.LOST, sent.id, f"accepted, no final event ({where})")


def _double(story: Story) -> Iterator[Finding]:
    history = story.history
    for task_id, finals in history.finals.items():
        if len(finals) > 1:
            yield Finding(Fault.DOUBLE, task_id[2], f"ended as {', '.join(e.type for e in finals)}")
        task = history.tasks.get(task_id)
        said = None if task is None else EVENT_OF_STATUS.get(Status(task.status))
        if said != finals[-1].type:
            detail = f"its row says {said}, its last final event {finals[-1].type}"
            yield Finding(Fault.DOUBLE, task_id[2], detail)
    runs: dict[TaskId, list[str]] = defaultdict(list)
    for sent in story.sent:
        if sent.key is not None:
            done = [e for e in history.finals.get(sent.task, ()) if e.type == SUCCEEDED]
            runs[(sent.tenant_id, sent.subscription, sent.key)] += [sent.id] * len(done)
    for (_, _, key), ids in runs.items():
        if len(ids) > 1:
            yield Finding(Fault.DOUBLE, key, f"{len(ids)} committed runs: {', '.join(ids[:3])}")


def _ghosts(story: Story) -> Iterator[Finding]:
    if story.effects is None:
        return
    known = {sent.id for sent in story.sent} | set(story.unsure)
    claims = {
        (event.task_id, event.data.get("attempt")) for event in story.history.of_type(CLAIMED)
    }
    for effect in story.effects:
        if effect.message_id not in known:
            detail = f"effect {effect.key} of a message that nobody sent"
            yield Finding(Fault.GHOST, effect.message_id, detail)
        elif (effect.message_id, effect.attempt) not in claims:
            detail = f"effect {effect.key} of attempt {effect.attempt}, which was never claimed"
            yield Finding(Fault.GHOST, effect.message_id, detail)


def _hollow(story: Story) -> Iterator[Finding]:
    if story.effects is None:
        return
    acted = {(effect.message_id, effect.attempt) for effect in story.effects}
    mine = {sent.task for sent in story.sent if sent.id not in story.may_be_hollow}
    for event in story.history.of_type(SUCCEEDED):
        attempt = event.data.get("attempt")
        if event.task in mine and (event.task_id, attempt) not in acted:
            detail = f"attempt {attempt} was committed, the oracle saw no effect of it"
            yield Finding(Fault.HOLLOW, event.task_id, detail)


def _stuck(story: Story) -> Iterator[Finding]:
    history = story.history
    heads: dict[TaskId, int] = {}
    for task in history.tasks.values():
        if task.lane is not None and task.lane_seq is not None and task.status not in FINAL:
            lane = (task.tenant_id, task.subscription, task.lane)
            heads[lane] = min(task.lane_seq, heads.get(lane, task.lane_seq))
    for task in history.tasks.values():
        why = None if task.status in FINAL else _abandoned(history, task, heads)
        if why is not None:
            yield Finding(Fault.STUCK, task.message_id, f"{task.status}, but {why}")
    for message_id, owner in history.waiting.items():
        if owner is not None and not history.is_alive(owner):
            detail = f"taken from the queue by worker {owner}, which is not alive"
            yield Finding(Fault.STUCK, message_id, detail)


def _abandoned(history: History, task: Task, heads: dict[TaskId, int]) -> str | None:
    """Why nobody will ever touch this task again; None: someone will."""
    match task.status:
        case Status.RUNNING if not history.is_alive(task.worker_id):
            state = history.workers.get(task.worker_id or 0, "unknown")
            return f"its worker {task.worker_id} is {state}"
        case Status.OPEN if task.message_id not in history.waiting:
            return "no broker holds a copy that could come back"
        case Status.QUEUED if task.lane is not None:
            lane = (task.tenant_id, task.subscription, task.lane)
            if heads[lane] == task.lane_seq:
                return "it is the first of its conversation and was not made ready"
        case Status.WAITING_KEY:
            key = (task.tenant_id, task.subscription, task.idem_key or "")
            holder, state = history.keys.get(key, (None, "free"))
            if state != "running":
                return f"the key that it waits for is {state}"
            holding = history.tasks.get((task.tenant_id, task.subscription, holder or ""))
            if holding is None or holding.status in FINAL:
                return f"the message {holder} that holds its key is over"
    return None


def _replies(story: Story) -> Iterator[Finding]:
    wanted = story.replies_per_run
    if wanted is None:
        return
    for sent in story.sent:
        ends = story.history.finals.get(sent.task, ())
        committed = any(event.type == SUCCEEDED for event in ends)
        found = story.history.replies.get(sent.task, 0)
        if found != wanted * committed:
            detail = f"{found} replies, {wanted * committed} were committed"
            yield Finding(Fault.REPLIES, sent.id, detail)


def _chains(story: Story) -> Iterator[Finding]:
    if story.ledger is not None:
        for found in story.ledger.findings:
            yield Finding(Fault.CHAIN, f"{found.tenant_id}/{found.worker_id}", str(found))


def _order(story: Story) -> Iterator[Finding]:
    history = story.history
    claims: dict[TaskId, int] = {}
    for event in history.of_type(CLAIMED):
        claims.setdefault(event.task, event.order)
    conversations: dict[TaskId, list[Sent]] = defaultdict(list)
    for sent in story.sent:
        if sent.conversation is not None:
            lane = (sent.tenant_id, sent.subscription, sent.conversation)
            conversations[lane].append(sent)
    for (_, _, name), messages in conversations.items():
        before: Sent | None = None
        ended = 0
        for sent in messages:
            finals = history.finals.get(sent.task)
            if not finals:
                continue  # counted as lost
            begun = finals[0].order if finals[0].type == DUPLICATE else claims.get(sent.task, 0)
            if begun < ended and before is not None:
                yield Finding(Fault.ORDER, name, f"{sent.id} began before {before.id} had ended")
                break
            before, ended = sent, finals[0].order


def _late(story: Story) -> Iterator[Finding]:
    limit = story.reclaim_limit_s
    if limit is None:
        return
    for worker_id, task_id, seconds in _reclaims(story):
        if seconds > limit:
            detail = f"given back {seconds:.2f} s after worker {worker_id} was killed"
            yield Finding(Fault.LATE, task_id, detail)


def _reclaims(story: Story) -> list[tuple[int, str, float]]:
    """Worker, task and seconds for each task of a killed worker that was given back."""
    killed = {kill.worker_id: kill.at_us for kill in story.kills}
    found = []
    for event in story.history.of_type(LOST):
        worker_id = event.data["worker"]
        if worker_id in killed:
            seconds = (event.created_at_us - killed[worker_id]) / 1e6
            found.append((worker_id, event.task_id, seconds))
    return found


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    p50, p99 = (seconds[int(len(seconds) * share)] for share in (0.5, 0.99))
    return f", after {p50:.2f} s (p50), {p99:.2f} s (p99), {seconds[-1]:.2f} s (max)"


_JUDGES: tuple[Callable[[Story], Iterator[Finding]], ...] = (
    _lost,
    _double,
    _ghosts,
    _hollow,
    _stuck,
    _replies,
    _chains,
    _order,
    _late,
)
