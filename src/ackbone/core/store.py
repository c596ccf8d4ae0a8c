"""The store ports: the store decides who may run a message, and records what became of it.

The promise rests on `claim` and `finish`. Each takes a batch, is one transaction, and returns one
verdict for each item. The engine uses `Claims`, and `Fused` if the broker's queue is in the store's
own database. The other roles are for relays and commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from .broker import Delivery, Outgoing, Subscription
from .errors import DecodeError
from .events import Listener
from .message import Message
from .outcome import Outcome
from .quota import Quota

PARENT_WORKER = "worker:"
"""Prefix of the `parent` of a worker that another worker has started."""


class Offers(msgspec.Struct, frozen=True, kw_only=True):
    """The handlers and channels of a worker, announced to the others when it registers."""

    types: Mapping[str, frozenset[str]] = {}
    """The message types that it has handlers for, by subscription. `*` means all types."""
    channels: frozenset[str] = frozenset()
    """The channels that it sends replies through."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process as the store knows it. A `worker_id` is never used again."""

    worker_id: int
    name: str = ""
    offers: Offers | None = None
    """None: the worker announced nothing, and claims messages of every type."""

    @property
    def as_parent(self) -> str:
        """The `parent` that its child processes register with."""
        return f"{PARENT_WORKER}{self.worker_id}"


class Token(msgspec.Struct, frozen=True):
    """The fence token of a claim. Every write of a run names it, and a stale token is refused."""

    worker_id: int
    epoch: int


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A received copy and its decoded message, for the store to decide whether it may run."""

    delivery: Delivery
    message: Message | None
    """None: the bytes cannot be decoded. `error` says why, and they become a dead letter as they
    are."""
    error: DecodeError | None = None
    sha256: bytes = b""
    """SHA-256 of the payload. A message with a known id and another hash is an id conflict."""
    codec: str = "standard"
    reason: str = "undecodable"
    """Reason of the dead letter, if there is no message."""
    minted: bool = False
    """Neither the sender nor the broker names the message. Another copy of it would have another
    id."""


Decode = Callable[[Delivery], Candidate]


def opened_parts(batch: Sequence[Candidate]) -> frozenset[str]:
    """Return the parts that a batch opens. The first copy of each part decides: later copies belong
    to the same reading of the part, or the source mixed two of them."""
    opens: dict[str, bool] = {}
    for candidate in batch:
        delivery = candidate.delivery
        if delivery.part is not None:
            opens.setdefault(delivery.part, delivery.opens_part)
    return frozenset(part for part, opened in opens.items() if opened)


class Approved(msgspec.Struct, frozen=True, kw_only=True):
    """A person's approval. It holds for one rule and one payload."""

    id: str
    rule: str
    payload_sha256: bytes


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A granted claim: run the message, then finish it under this token."""

    subscription: str
    queue: str
    idem_key: str | None = None
    lane: str | None = None
    message: Message
    token: Token
    attempt: int
    crashes: int
    claimed_at_us: int
    created_at_us: int
    """The message's `created_at`, converted once for the metrics."""
    row: int = 0
    """The store's row of the task, which saves `finish` a search."""
    delivery: Delivery | None = None
    """The broker copy to settle after the finish. None: the store holds the whole message."""
    history: tuple[Mapping[str, Any], ...] = ()
    """The failed attempts so far, each with attempt, at and error."""
    body: bytes = b""
    body_info: str = ""
    """How to read the stored body (`store/tasks.py`). Empty: as the delivery says."""
    codec: str = "standard"
    """The codec that decoded the delivery."""
    approvals: tuple[Approved, ...] = ()
    """The approvals that the message waited for."""
    quotas: tuple[Quota, ...] = ()
    """The quotas that this run uses."""

    @property
    def failures(self) -> int:
        """Failed attempts before this one. Crashes do not count as failures."""
        return self.attempt - 1 - self.crashes


QuotasOf = Callable[[Run], Sequence[Quota]]
"""Returns the quotas that a run uses. It must be pure: the store calls it in its own thread."""


class Answer(StrEnum):
    """The store's decision about one candidate. All but RUN and LEAVE mean: acknowledge the
    copy."""

    RUN = "run"
    """Run the message under the token of `Verdict.run`."""
    DUPLICATE = "duplicate"
    """Another message with this idempotency key was done. This one has ended as a duplicate."""
    WAITING = "waiting"
    """The store keeps the message until its key, its conversation or its quota allows a run."""
    FINAL = "final"
    """The task has already ended."""
    ADOPTED = "adopted"
    """Another worker runs the message, and the store now holds the whole of it."""
    DEAD = "dead"
    """The message became a dead letter at once (undecodable, id conflict)."""
    EXPIRED = "expired"
    """The message's time to live was over. It has ended."""
    KNOWN = "known"
    """Another copy of a message that the store holds, or that runs."""
    PASSED_ON = "passed_on"
    """Another living worker has a handler for the message, this one has not. The store holds it
    for that worker."""
    PARKED = "parked"
    """No living worker has a handler for the message. It is parked."""
    LEAVE = "leave"
    """Another worker reads this ordered queue, or this part of it. Release the copy."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The store's answer for one candidate. Verdicts are in the order of the batch."""

    answer: Answer
    run: Run | None = None
    """Set for RUN, and for PARKED, to say which message was parked."""
    delivery: Delivery | None = None
    failure: str | None = None
    """Why the message ended without success, if its copies are to be settled by that: for EXPIRED,
    and for FINAL where `Subscription.ack_policy` is `nack`."""


def lets_go(verdicts: Sequence[Verdict]) -> bool:
    """Return True if one of these answers removes a copy from the broker.

    The store then has the only trace of that message, and its commit must be synced before the
    answer is given. A claim that is run may be lost: the broker still has the message."""
    kept = (Answer.RUN, Answer.LEAVE)
    return any(verdict.answer not in kept for verdict in verdicts)


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `Fused.take`."""

    verdicts: Sequence[Verdict]
    next_due_s: float | None = None
    """Seconds until the next waiting message is due. None: no message waits."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the handler, to be sent through a channel."""

    channel: str
    recipient: str
    content: str
    conversation: str | None = None
    priority: int = 2
    now: bool = False
    options: Mapping[str, Any] = {}
    """Options of the channel: buttons, media, a subject."""
    expires_s: float | None = None
    """Do not send the reply after this many seconds."""


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """A follow-up message. It is published with the commit of the run that sent it."""

    queue: str
    outgoing: Outgoing
    tenant_id: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a run."""

    llm_calls: int = 0
    tokens: int = 0
    cost: float = 0.0


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one attempt, with everything that is committed together (P5)."""

    run: Run
    outcome: Outcome
    result: bytes | None = None
    """The handler's result as JSON. Duplicates get it, too."""
    started_at_us: int = 0
    finished_at_us: int = 0
    replies: Sequence[Reply] = ()
    sends: Sequence[Send] = ()
    usage: Usage | None = None
    agent_run_id: str | None = None
    dedup_window_s: float = 3600.0
    on_parked: str = "wait"
    keep_rejected: bool = False
    """Keep a rejected message as a dead letter as well (`ack_policy: dlq`)."""
    crash_budget: int = 2
    told_on_ack: bool = False
    """The broker publishes the result with the acknowledgement, so the outbox gets no notice."""
    details: Mapping[str, Any] = {}
    """More data for the event."""
    traceback: str = ""
    """Traceback of a failed attempt, without secrets. It is kept in the message's history."""


class Commit(StrEnum):
    """The store's decision about one finished run."""

    COMMITTED = "committed"
    """The outcome is stored."""
    ALREADY = "already"
    """The outcome was stored by an earlier call whose answer was lost."""
    BURIED = "buried"
    """The outcome could not be stored as it was, so the message ended as a dead letter, now or in
    an earlier call. The run's own outcome must not be published."""
    FENCED = "fenced"
    """The claim was taken away. Drop the outcome and release the broker's copy."""


class Reclaimed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one `Claims.reap`."""

    workers: Sequence[int] = ()
    tasks: int = 0
    quarantined: int = 0
    silent: Sequence[str] = ()
    """Names of the caller's child processes that give no sign of life, though they have not
    ended."""


class Company(StrEnum):
    """How many other messages may run in the same process as a message."""

    ANY = "any"
    FEW = "few"
    """A suspect: two workers died while they ran it. It runs in a small group in a child
    process."""
    NONE = "none"
    """A child process died while it ran the group. The message runs alone in a child process."""


GROUP = 8
"""Number of messages in a small group."""


class Suspects(msgspec.Struct, frozen=True, kw_only=True):
    """How many suspects wait for a child process. A store may stop counting at a thousand."""

    few: int = 0
    none: int = 0


class Claims(Protocol):
    """The store as the engine uses it."""

    @property
    def forgets_claims(self) -> bool:
        """True if a crash of the database server can undo a claim while its worker lives on. The
        same worker may then get the claim again, under the same token."""

    async def register(
        self, name: str, offers: Offers | None = None, *, parent: str | None = None
    ) -> Worker:
        """Register a worker under a new id. It claims only messages of the types that it offers.

        `parent` names the process that started it: the unique name of a supervisor, or `as_parent`
        of a worker. The store uses it to decide whether a death counts as a crash.
        """

    async def announce(self, worker: Worker, offers: Offers) -> Worker:
        """Replace the offers of a worker whose handlers or channels have changed."""

    async def leave(self, worker: Worker, *, running: bool = False) -> None:
        """End a worker in an orderly way. It claims nothing more.

        `running`: the end is announced, and some runs continue until they or the process end. Runs
        that the end of the process interrupts are given back without using up an attempt or crash
        budget.
        """

    async def identity(self) -> str:
        """Return the unique name of this store. It was made with the database."""

    async def claim(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker, adopt: bool = False
    ) -> Sequence[Verdict]:
        """Decide about each received copy, in one transaction. Returns one verdict for each, in
        order.

        `adopt`: the store takes whole messages, so that every copy may be acknowledged, that of a
        granted run, too. The transaction is synced before this returns if `adopt` or
        `lets_go(verdicts)`.
        """

    async def claim_ready(
        self, sub: Subscription, *, limit: int, worker: Worker, company: Company = Company.ANY
    ) -> Sequence[Verdict]:
        """Claim messages that the store holds and that are due: retries, resumed and adopted
        messages, and the first of each conversation.

        Only messages with this `company` are claimed.
        """

    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        """Store the outcomes of runs, with their replies and follow-ups, in one transaction.

        Returns one decision for each run, in order. A run whose token is stale is left out of the
        transaction (FENCED). Repeating a call whose answer was lost does no harm (ALREADY).
        """

    async def adopt(self, batch: Sequence[Run], *, worker: Worker) -> Sequence[bool]:
        """Store the whole messages, so that their broker copies can be acknowledged."""

    async def adopt_in_order(
        self,
        sub: Subscription,
        batch: Sequence[Candidate],
        *,
        worker: Worker,
        opened: Collection[str] = (),
    ) -> Sequence[Verdict] | None:
        """Store a batch of an ordered queue, each message behind its conversation.

        Returns None if another worker reads this queue. In a queue with parts (`Delivery.part`)
        each part has an owner. The worker becomes the owner of the parts in `opened`, and copies of
        parts that it does not own are answered by LEAVE.
        """

    async def next_due_s(self, sub: Subscription) -> float | None:
        """Return the seconds until the subscription's next waiting task is due. None: no task
        waits."""

    expiry_paused: bool
    """True after a jump of the clock, while times to live are doubtful. No message expires."""

    @property
    def clock_jumps(self) -> int:
        """How often somebody set the store's clock, if that is not this machine's clock."""

    governed: bool
    """True: `Run.approvals` is filled in."""

    quotas_of: QuotasOf | None
    """Called at each claim for the quotas that the run uses. None: there are no quotas.

    The claim's transaction takes one unit of `runs`. The finish's transaction takes what else the
    run used, and returns a unit that it did not need. A message whose quota is exhausted waits
    without using up an attempt.
    """

    def beat(self, worker: Worker) -> None:
        """Give a sign of life. Raises StoreError if that failed.

        Called from the lease's own thread, so it may block, but not for long.
        """

    def is_registered(self, worker: Worker) -> bool:
        """Return False if the worker was declared dead. Called from the lease's own thread."""

    async def reap(
        self,
        *,
        worker: Worker,
        lease_s: float,
        crash_budget: int,
        ended: Mapping[str, int] | None = None,
    ) -> Reclaimed:
        """Declare workers dead whose lease is over, and give back the messages that they ran.

        `ended`: child processes of this worker that have ended, by name, with their exit codes (a
        signal as a negative number).
        """

    async def ended(self, names: Collection[str]) -> frozenset[str]:
        """Return those of the names whose workers have died or left. A name that no worker of this
        store has had, or had too long ago, is not among them."""

    async def resolve(self, *, worker: Worker) -> int:
        """End or wake messages that wait for a key or a conversation that is free.

        This is a safety net: normally the commit that frees them does it. Returns how many.
        """

    async def to_cancel(self, *, worker: Worker) -> Sequence[tuple[str, str, str]]:
        """Return this worker's runs that somebody wants to cancel: tenant, subscription and id."""

    async def resume_parked(
        self, kind: str, types: Sequence[str], *, subscription: str, worker: Worker
    ) -> int:
        """Make messages of these types ready that were parked because no worker had a handler."""

    async def suspects(self, subscriptions: Sequence[str], *, worker: Worker) -> Suspects:
        """Count the due suspects that workers with the same offers as this one would claim."""

    async def paused(self) -> frozenset[str]:
        """Return the names of paused subscriptions."""

    async def hold_role(self, role: str, *, worker: Worker) -> bool:
        """Take or keep a role that only one worker of the fleet has at a time. Returns False if
        another worker has it."""

    def on_events(self, listener: Listener) -> None:
        """Call `listener`, on the event loop, with the events that calls of this process wrote."""

    def subscribe(self) -> asyncio.Event:
        """Return an event that is set whenever there may be new work, until `unsubscribe`."""

    def unsubscribe(self, event: asyncio.Event) -> None: ...


class Fused(Protocol):
    """Claims of a store whose database also holds the queue: receive and claim are one commit."""

    async def take(self, sub: Subscription, decode: Decode, *, limit: int, worker: Worker) -> Taken:
        """Claim due messages of the store and new messages of the queue, by priority."""


class Copies(Protocol):
    """Messages that no worker runs and whose body only the broker has (status `open`)."""

    async def waiting(
        self, subscription: str, *, for_s: float, limit: int
    ) -> Sequence[tuple[str, str]]:
        """Return tenant and id of messages that have waited this long for their copy, oldest
        first."""

    async def end(
        self, subscription: str, lost: Sequence[tuple[str, str]], *, for_s: float, worker: Worker
    ) -> int:
        """End messages that still wait as dead letters (`copy_lost`). Returns how many."""


class EffectState(StrEnum):
    """The state of an effect of `ctx.once`."""

    NEW = "new"
    DONE = "done"
    UNKNOWN = "unknown"


class Effects(Protocol):
    """External effects of `ctx.once`: the intent is stored before, the result after."""

    async def effect_begin(
        self, run: Run, name: str, *, again: bool = False
    ) -> tuple[EffectState, bytes | None]:
        """Store the intent (fenced). Returns what is known about the effect.

        NEW: it has not begun. DONE: with its recorded result. UNKNOWN: an earlier attempt began it
        and recorded no result; with the error that `effect_raised` stored, if any.

        `again`: this call repeats one whose answer was lost, so an intent of the same run is NEW.
        """

    async def effect_done(self, run: Run, name: str, result: bytes, *, again: bool = False) -> None:
        """Store the result of the effect (fenced)."""

    async def effect_raised(self, run: Run, name: str, error: str) -> None:
        """Store the error of an effect that may or may not have happened, for the operator."""

    async def effect_clear(self, run: Run, name: str) -> None:
        """Delete the intent of an effect that certainly did not happen."""


class RunWrites(Protocol):
    """Writes of a run before its end. Each is a fenced transaction of its own."""

    async def heartbeat(self, run: Run, data: Mapping[str, Any]) -> None:
        """Store the progress that the handler reports."""

    async def reply_now(self, run: Run, reply: Reply, n: int) -> str:
        """Queue a reply before the run ends. `n` numbers the run's replies. Returns its id."""


class Store(Claims, Effects, RunWrites, Protocol):
    """The store as the code sees it that puts a worker together."""

    def holds(self, queue: str) -> bool:
        """Return True if the queue is in the same database."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def hold_back(self, send: Send) -> None:
        """Keep a delayed message. The outbox publishes it when it is due."""

    async def is_empty(self, subscriptions: Sequence[str]) -> bool:
        """Return True if no message waits, runs or is due later. Parked messages do not count."""

    async def stuck(self, subscriptions: Sequence[str]) -> int:
        """Return how many messages are left, if no worker can make progress with any of them.

        They wait behind a parked message, or for a copy that the broker would have to redeliver.
        Returns 0 if a message runs or will run, and if no message is left.
        """

    def look_again(self) -> None:
        """Wake everyone who waits for due work, because the clock was moved."""
