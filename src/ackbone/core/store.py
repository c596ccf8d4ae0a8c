"""The store ports: who may run a message, and what became of it.

`claim` and `finish` are the protocol that the promise rests on: batches in, one verdict per item
out, one transaction each. The engine sees `Claims` (and `Fused`, where the broker lives in the
store's database); the other roles are for relays, commands and pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
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
"""How the `parent` of a worker begins that another worker has started."""


class Offers(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can do, announced to the other workers when it registers."""

    types: Mapping[str, frozenset[str]] = {}
    """By subscription, the message types that it has handlers for; `*` stands for all types."""
    channels: frozenset[str] = frozenset()
    """The channels by which it sends replies."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process as the store knows it. The number is given out once and never again."""

    worker_id: int
    name: str = ""
    offers: Offers | None = None
    """None: the worker announced nothing. It claims messages of every type."""

    @property
    def as_parent(self) -> str:
        """The `parent` that its children register with."""
        return f"{PARENT_WORKER}{self.worker_id}"


class Token(msgspec.Struct, frozen=True):
    """Proof of a claim: a write after a run names it, and a stale one is refused."""

    worker_id: int
    epoch: int


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A broker copy that asks to be run: the delivery, and what it decoded to."""

    delivery: Delivery
    message: Message | None
    """None: undecodable; `error` says why, and the bytes are dead-lettered as they are."""
    error: DecodeError | None = None
    sha256: bytes = b""
    """Of the payload alone: the same id with another one is a conflict."""
    codec: str = "standard"
    reason: str = "undecodable"
    """Of the dead letter, where there is no message."""


Decode = Callable[[Delivery], Candidate]


class Approved(msgspec.Struct, frozen=True, kw_only=True):
    """A person's yes: for one rule, and for one payload."""

    id: str
    rule: str
    payload_sha256: bytes


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that was granted: run it, then finish it under this token."""

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
    """The message's `created_at`: whoever counts should not have to work it out again."""
    row: int = 0
    """Where the store keeps it, as a hint for `finish`."""
    delivery: Delivery | None = None
    """The broker copy to settle once finished; None: the store holds the whole message."""
    history: tuple[Mapping[str, Any], ...] = ()
    """Earlier failed attempts: attempt, at, error."""
    body: bytes = b""
    body_info: str = ""
    """How the stored body is read again; empty: as the delivery says (`store/stored.py`)."""
    codec: str = "standard"
    """By which the delivery was read."""
    approvals: tuple[Approved, ...] = ()
    """What people allowed, of a message that waited for them."""
    quotas: tuple[Quota, ...] = ()
    """What this run is counted under."""

    @property
    def failures(self) -> int:
        """Failed attempts before this one: crashes spend no retry."""
        return self.attempt - 1 - self.crashes


QuotasOf = Callable[[Run], Sequence[Quota]]
"""The quotas that a run is counted under. Pure: it is called in the store's own thread."""


class Answer(StrEnum):
    """The store's word on one candidate."""

    RUN = "run"
    DUPLICATE = "duplicate"
    """Another message with this key was done: ended here, acknowledge."""
    WAITING = "waiting"
    """Kept by the store until its key, its lane or its turn is free: acknowledge."""
    FINAL = "final"
    """Ended before: acknowledge."""
    ADOPTED = "adopted"
    """Runs elsewhere, and the store now holds the whole message: acknowledge."""
    DEAD = "dead"
    """Dead-lettered at once (undecodable, id conflict): acknowledge."""
    EXPIRED = "expired"
    KNOWN = "known"
    """A further copy of what the store holds or runs already: acknowledge."""
    PASSED_ON = "passed_on"
    """This worker has no handler for it, another living worker has. The store holds the message
    for that worker. Acknowledge this copy."""
    PARKED = "parked"
    """No living worker has a handler for it. The message is parked. Acknowledge this copy."""
    LEAVE = "leave"
    """Another fetcher owns this source: back to the broker."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Answer for one candidate, in the order of the batch."""

    answer: Answer
    run: Run | None = None
    """Set for RUN, and for PARKED as well: it says which message was parked."""
    delivery: Delivery | None = None


def lets_go(verdicts: Sequence[Verdict]) -> bool:
    """Does any of these answers take a broker's copy away? The claim is the only trace of such a
    message then, and must be synced before it is told; a claim that is run may be lost."""
    kept = (Answer.RUN, Answer.LEAVE)
    return any(verdict.answer not in kept for verdict in verdicts)


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What `Fused.take` found."""

    verdicts: Sequence[Verdict]
    next_due_s: float | None = None
    """Seconds until something that waits is due; None: nothing waits."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the agent, on its way to a channel."""

    channel: str
    recipient: str
    content: str
    conversation: str | None = None
    priority: int = 2
    now: bool = False
    options: Mapping[str, Any] = {}
    """What else its channel understands: buttons, media, a subject."""
    expires_s: float | None = None
    """What is not there by then is not sent any more."""


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """A follow-up message, published with the commit of the run that made it."""

    queue: str
    outgoing: Outgoing
    tenant_id: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a run cost."""

    llm_calls: int = 0
    tokens: int = 0
    cost: float = 0.0


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one attempt, with everything that commits together (P5)."""

    run: Run
    outcome: Outcome
    result: bytes | None = None
    """The handler's result as JSON, for the dedup record and duplicates."""
    started_at_us: int = 0
    finished_at_us: int = 0
    replies: Sequence[Reply] = ()
    sends: Sequence[Send] = ()
    usage: Usage | None = None
    agent_run_id: str | None = None
    dedup_window_s: float = 3600.0
    on_parked: str = "wait"
    keep_rejected: bool = False
    """A rejected message is kept as a dead letter, too (ack_policy dlq)."""
    crash_budget: int = 2
    told_on_ack: bool = False
    """The broker publishes its result with the acknowledgement: no notice in the outbox."""
    details: Mapping[str, Any] = {}
    """Added to the event's data."""
    traceback: str = ""
    """Of a failed attempt: kept in the message's history, without secrets."""


class Commit(StrEnum):
    """The store's word on one finished run."""

    COMMITTED = "committed"
    ALREADY = "already"
    """A repeat after a commit whose answer was lost."""
    BURIED = "buried"
    """It could not be stored as it was: it ended as a dead letter instead, now or before a repeat.
    Whatever its run came to, nobody may be told of that."""
    FENCED = "fenced"
    """The claim was taken away; drop everything; the broker's copy goes back."""


class Reclaimed(msgspec.Struct, frozen=True, kw_only=True):
    """What a reaper's scan found."""

    workers: Sequence[int] = ()
    tasks: int = 0
    quarantined: int = 0
    silent: Sequence[str] = ()
    """Children of the worker that asked which give no sign of life, though they have not ended."""


class Company(StrEnum):
    """Which messages may run beside a message in one process."""

    ANY = "any"
    FEW = "few"
    """Its workers died twice: it runs in a small group, in a child process."""
    NONE = "none"
    """A child process died that ran it in a small group: it runs alone, in a child process."""


GROUP = 8
"""Messages in a small group."""


class Suspects(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages wait for a child process. A store may stop counting at a thousand."""

    few: int = 0
    none: int = 0


class Claims(Protocol):
    """What the engine sees of the store."""

    @property
    def forgets_claims(self) -> bool:
        """A crash of its server may take a claim back while the worker that has it lives on. The
        same worker may then be granted it once more, under the same token."""
        ...

    async def register(
        self, name: str, offers: Offers | None = None, *, parent: str | None = None
    ) -> Worker:
        """A new worker id, alive from now on. It claims only the types that it offers.

        `parent` names the process that started it: a supervisor by a name that no other one has, a
        worker by `as_parent`. The store uses it to decide whether a death counts.
        """
        ...

    async def announce(self, worker: Worker, offers: Offers) -> Worker:
        """The worker has other handlers or channels than when it registered."""
        ...

    async def leave(self, worker: Worker, *, running: bool = False) -> None:
        """An orderly end. `running`: it is announced, and some runs go on until they or the process
        end. The worker claims nothing more. Runs that the end of the process cuts short are handed
        back then, as the others are, without spending an attempt or a crash."""
        ...

    async def identity(self) -> str:
        """The name of this store, made when it was, and never another's."""
        ...

    async def claim(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker
    ) -> Sequence[Verdict]:
        """One verdict for each broker copy. Synced before it returns if one of them `lets_go`."""
        ...

    async def claim_ready(
        self, sub: Subscription, *, limit: int, worker: Worker, company: Company = Company.ANY
    ) -> Sequence[Verdict]:
        """Work that the store itself holds and that is due: retries, resumed, adopted, lane heads.

        Only messages that belong into this `company`.
        """
        ...

    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]: ...

    async def adopt(self, batch: Sequence[Run], *, worker: Worker) -> Sequence[bool]:
        """Write the whole message into the store, so that its broker copy may go."""
        ...

    async def adopt_in_order(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker
    ) -> Sequence[Verdict] | None:
        """Write an ordered batch into its lanes; None: another worker is this source's fetcher."""
        ...

    async def next_due_s(self, sub: Subscription) -> float | None:
        """Seconds until the next waiting task of this subscription is due; None: none waits."""
        ...

    expiry_paused: bool
    """True while a jump of the clock makes times to live doubtful: nothing expires."""

    @property
    def clock_jumps(self) -> int:
        """How often the store saw its clock set, where that is not this machine's clock."""
        ...

    governed: bool
    """True: a run brings along what people answered about its message (`Run.approvals`)."""

    quotas_of: QuotasOf | None
    """Asked at each claim under which quotas a run is counted; None: there are none.

    A unit of `runs` is taken in the claim's transaction; what else the run used, and a unit that it
    did not need, in finish's. A message whose quota is used up waits, and spends nothing.
    """

    def beat(self, worker: Worker) -> None:
        """A sign of life. Called from the lease's own thread: may block, but not for long.

        Raises StoreError if it could not be given."""
        ...

    def is_registered(self, worker: Worker) -> bool:
        """False: declared dead, or gone. Called from the lease's own thread."""
        ...

    async def reap(
        self,
        *,
        worker: Worker,
        lease_s: float,
        crash_budget: int,
        ended: Mapping[str, int] | None = None,
    ) -> Reclaimed:
        """Give back what dead workers were running.

        `ended`: children of this worker whose process has ended, by name, each with its exit code
        (a signal as a negative number).
        """
        ...

    async def resolve(self, *, worker: Worker) -> int:
        """The net under keys and lanes: end or wake everything that waits for what is over."""
        ...

    async def to_cancel(self, *, worker: Worker) -> Sequence[tuple[str, str, str]]:
        """Running messages of this worker that somebody wants stopped: tenant, subscription, id."""
        ...

    async def resume_parked(
        self, kind: str, types: Sequence[str], *, subscription: str, worker: Worker
    ) -> int:
        """Messages of these types that were parked for want of a handler become ready."""
        ...

    async def suspects(self, subscriptions: Sequence[str], *, worker: Worker) -> Suspects:
        """Count the due messages that must run in a child process, and that workers like this one
        claim."""
        ...

    async def paused(self) -> frozenset[str]:
        """Subscriptions that are paused."""
        ...

    async def hold_role(self, role: str, *, worker: Worker) -> bool:
        """Take or keep a role that one worker of the fleet has at a time."""
        ...

    def on_events(self, listener: Listener) -> None:
        """`listener` hears, on the loop, what calls of this process wrote into the ledger."""
        ...

    def subscribe(self) -> asyncio.Event:
        """Set whenever there may be new work. Give it back with `unsubscribe`."""
        ...

    def unsubscribe(self, event: asyncio.Event) -> None: ...


class Fused(Protocol):
    """Claims of a store that shares its database with the broker: receive + claim is one commit."""

    async def take(self, sub: Subscription, decode: Decode, *, limit: int, worker: Worker) -> Taken:
        """Due work of the store and new messages of the queue, by priority, claimed."""
        ...


class Copies(Protocol):
    """Messages that no worker runs and that only the broker holds (status `open`)."""

    async def waiting(
        self, subscription: str, *, for_s: float, limit: int
    ) -> Sequence[tuple[str, str]]:
        """Tenant and id of those that have waited this long for their copy, the oldest first."""
        ...

    async def end(
        self, subscription: str, lost: Sequence[tuple[str, str]], *, for_s: float, worker: Worker
    ) -> int:
        """End those that still wait as dead letters, `copy_lost`. Returns how many there were."""
        ...


class EffectState(StrEnum):
    NEW = "new"
    DONE = "done"
    UNKNOWN = "unknown"


class Effects(Protocol):
    """The guard of external effects: intent before, result after."""

    async def effect_begin(
        self, run: Run, name: str, *, again: bool = False
    ) -> tuple[EffectState, bytes | None]:
        """Write the intent (fenced). DONE: the recorded result; UNKNOWN: begun, never recorded,
        with what `effect_raised` wrote.

        `again`: this call is repeated, and its first answer was lost. An intent of the same run is
        its own then, and NEW.
        """
        ...

    async def effect_done(
        self, run: Run, name: str, result: bytes, *, again: bool = False
    ) -> None: ...

    async def effect_raised(self, run: Run, name: str, error: str) -> None:
        """The effect raised, and nobody knows whether it happened: keep the error for people."""
        ...

    async def effect_clear(self, run: Run, name: str) -> None:
        """The effect certainly did not happen (it raised before acting): forget the intent."""
        ...


class RunWrites(Protocol):
    """Writes of a run before its end, each its own fenced transaction."""

    async def heartbeat(self, run: Run, data: Mapping[str, Any]) -> None: ...

    async def reply_now(self, run: Run, reply: Reply, n: int) -> str: ...


class Store(Claims, Effects, RunWrites, Protocol):
    """A store as those see it that put a worker together."""

    @property
    def fused(self) -> bool:
        """Does the broker's queue live in the same database?"""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def hold_back(self, send: Send) -> None:
        """A message that is not due yet, for the outbox to publish when it is."""
        ...

    async def is_empty(self, subscriptions: Sequence[str]) -> bool:
        """Nothing waits, runs or is due later (parked messages aside)."""
        ...

    async def stuck(self, subscriptions: Sequence[str]) -> int:
        """How many messages are left, if no worker can do anything for any of them.

        They wait behind a parked message, or for a copy that the broker would have to bring back.
        0: something runs or will, or nothing is left.
        """
        ...

    def look_again(self) -> None:
        """Whoever waits for due work looks now: the clock was moved."""
        ...
