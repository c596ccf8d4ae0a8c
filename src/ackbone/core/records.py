"""Records of a store for operators, and the ports to read them and to act on them.

Times are integer microseconds and their names end in `_us`. Bodies are the bytes that were stored.
`Records` only reads. Every method of `Operations` is one transaction, and writes into the ledger
what was done and who did it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from .errors import AckboneError
from .message import Message
from .notices import End
from .store import Offers, Send


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A row as operators see it."""


class DeadLetter(Record, frozen=True, kw_only=True):
    """A dead letter, with the whole message."""

    id: str
    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    type: str | None
    reason: str
    error: str
    retry_count: int
    state: str
    """open, replayed or discarded"""
    failed_at_us: int
    settled_at_us: int | None = None
    replay_id: str | None = None
    """Id of the message that was sent instead."""
    history: tuple[Mapping[str, Any], ...] = ()
    body: bytes | None = None
    body_info: str | None = None
    intact: bool = True
    """False if the body is not the one that was written."""


class LetterFilter(Record, frozen=True, kw_only=True):
    """Conditions for dead letters. None: any."""

    queue: str | None = None
    type: str | None = None
    reason: str | None = None
    tenant_id: str | None = None
    error: str | None = None
    """Text that the error contains."""
    since_us: int | None = None
    """Earliest time of the failure."""
    before_us: int | None = None
    """The failure is earlier than this time."""
    state: str | None = "open"


class Task(Record, frozen=True, kw_only=True):
    """A message that the store knows: running, waiting, parked or ended."""

    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    type: str | None
    status: str
    held: str
    worker_id: int | None
    attempt: int
    crashes: int
    retry_count: int
    priority: int
    created_at_us: int | None
    started_at_us: int
    completed_at_us: int | None = None
    due_at_us: int | None = None
    expires_at_us: int | None = None
    duration_ms: int | None = None
    parked_kind: str | None = None
    error: str | None = None
    ordering_key: str | None = None
    idempotency_key: str | None = None
    correlation_id: str | None = None
    trace_id: str | None = None
    history: tuple[Mapping[str, Any], ...] = ()
    result: bytes | None = None
    body: bytes | None = None
    body_info: str | None = None
    intact: bool = True


class Waiting(Record, frozen=True, kw_only=True):
    """A message in the broker's queue that no worker has received."""

    queue: str
    message_id: str
    state: str
    """ready, delayed or taken"""
    priority: int
    ordering_key: str | None
    sent_at_us: int
    due_at_us: int | None
    expires_at_us: int | None
    headers: Mapping[str, str]
    body: bytes
    intact: bool


class Effect(Record, frozen=True, kw_only=True):
    """An external effect guarded by `ctx.once`."""

    name: str
    state: str
    """begun or done"""
    value: bytes | None
    worker_id: int
    begun_at_us: int
    done_at_us: int | None


class Reply(Record, frozen=True, kw_only=True):
    """A row of `deliveries`."""

    id: str
    tenant_id: str
    subscription: str | None
    task_id: str | None
    channel: str
    recipient: str
    content: str
    status: str
    retry_count: int
    created_at_us: int
    last_attempt_at_us: int | None
    last_error: str | None
    in_doubt: bool
    """True if the reply may have arrived."""


class LedgerEvent(Record, frozen=True, kw_only=True):
    """A row of the ledger. Later events have a higher `position`."""

    position: int
    at_us: int
    type: str
    tenant_id: str
    subscription: str
    task_id: str
    worker_id: int
    seq: int
    data: Mapping[str, Any]


class QueueState(Record, frozen=True, kw_only=True):
    """The counts of a queue."""

    queue: str
    broker: str = "default"
    """Name of the broker that the queue is on."""
    ready: int = 0
    """Messages that a worker can receive now."""
    delayed: int = 0
    running: int = 0
    waiting: int = 0
    """Messages that the store holds: retries, conversations, busy keys."""
    parked: int = 0
    dead: int = 0
    """Open dead letters."""
    oldest_age_s: float | None = None
    """Age of the oldest ready or waiting message."""
    paused_at_us: int | None = None


class WorkerState(Record, frozen=True, kw_only=True):
    """A worker that has neither left nor been declared dead."""

    worker_id: int
    name: str
    started_at_us: int
    alive: bool
    """False if it died and has not been declared dead yet."""
    running: int
    offers: Offers | None = None
    """Its handlers and channels. None: it announced nothing."""


class Count(Record, frozen=True, kw_only=True):
    """The number of items of one kind in a queue."""

    queue: str
    kind: str
    count: int


class Found(Record, frozen=True, kw_only=True):
    """A message that a search found."""

    tenant_id: str
    message_id: str
    by: str
    """id, prefix, correlation id, trace id or idempotency key"""


class Resumption(StrEnum):
    """An operator's answer for an effect whose outcome is unknown."""

    DONE = "done"
    NOT_DONE = "not-done"


class EffectWord(Record, frozen=True, kw_only=True):
    """An operator's answer for one effect."""

    name: str
    word: Resumption
    value: bytes = b"null"
    """The JSON value that `ctx.once` returns from now on, if the effect was done."""


class Replay(Record, frozen=True, kw_only=True):
    """A dead letter, and the new message that is sent instead."""

    letter_id: str
    send: Send
    changed: tuple[str, ...] = ()
    """Fields that an operator edited."""


class Identity(Record, frozen=True, kw_only=True):
    """The name of a task."""

    tenant_id: str
    subscription: str
    message_id: str


class Cancelled(StrEnum):
    """The result of a cancel."""

    ENDED = "ended"
    """The task is discarded and will not run."""
    ASKED = "asked"
    """The task runs and was asked to stop. Its own outcome counts."""
    OVER = "over"
    """The task had already ended."""


class Records(Protocol):
    """Reading the store."""

    async def letters(
        self, where: LetterFilter, *, limit: int, before: str | None = None
    ) -> Sequence[DeadLetter]:
        """Return dead letters, newest first, without bodies. `before`: the last id of the last
        page."""

    async def letter_ids(self, where: LetterFilter, *, limit: int | None) -> Sequence[str]:
        """Return the ids of dead letters, oldest first."""

    async def letters_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[DeadLetter]:
        """Return dead letters, with bodies, by letter id, message id or a prefix; exact ones
        first."""

    async def letters_by_id(self, ids: Sequence[str]) -> Sequence[DeadLetter]:
        """Return dead letters, with bodies, in the order of `ids`. Unknown ids are left out."""

    async def letters_of(self, tenant_id: str, message_id: str) -> Sequence[DeadLetter]:
        """Return the dead letters of a message, and those that it was sent to replace."""

    async def parked(
        self,
        *,
        queue: str | None = None,
        kind: str | None = None,
        tenant_id: str | None = None,
        limit: int,
        before: int | None = None,
    ) -> Sequence[tuple[int, Task]]:
        """Return parked tasks, newest first, without bodies, each with its position for
        `before`."""

    async def tasks(self, tenant_id: str | None, message_id: str) -> Sequence[Task]: ...

    async def tasks_like(
        self, prefix: str, *, tenant_id: str | None, status: str | None, limit: int
    ) -> Sequence[Task]:
        """Return tasks whose message id begins with `prefix`, without bodies."""

    async def tasks_correlated(self, correlation_id: str, *, limit: int) -> Sequence[Task]: ...

    async def find(self, name: str, *, tenant_id: str | None, limit: int) -> Sequence[Found]:
        """Find messages by id, else by prefix, else by correlation id, trace id or idempotency
        key."""

    async def events_of(self, tenant_id: str, message_id: str) -> Sequence[LedgerEvent]: ...

    async def effects_of(self, tenant_id: str, message_id: str) -> Sequence[Effect]: ...

    async def replies_of(self, tenant_id: str, message_id: str) -> Sequence[Reply]: ...

    async def waiting_with(self, text: str, *, limit: int) -> Sequence[Waiting]:
        """Return messages of the queue with this id, or with this text in their body."""

    async def queues(self) -> Sequence[QueueState]: ...

    async def counts(self) -> Sequence[Count]:
        """Count messages by queue and status."""

    async def reply_counts(self) -> Sequence[Count]:
        """Count replies by channel and status."""

    async def event_counts(self, since_us: int) -> Sequence[Count]:
        """Count ledger events since a time, by queue and type."""

    async def workers(self) -> Sequence[WorkerState]: ...

    async def events_after(
        self, position: int, *, limit: int, since_us: int | None = None
    ) -> Sequence[LedgerEvent]: ...

    async def last_position(self, *, back: int = 0) -> int:
        """Return the position of the ledger's last event, or of `back` events before it."""

    def subscribe(self) -> asyncio.Event: ...

    def unsubscribe(self, event: asyncio.Event) -> None: ...


class Operations(Protocol):
    """Actions of operators. They raise NotFound or Conflict if the state has changed meanwhile."""

    async def replay(self, batch: Sequence[Replay]) -> Sequence[AckboneError | None]:
        """Send each message and settle its dead letter, in one commit. Returns one answer per
        item."""

    async def discard_letters(
        self, letter_ids: Sequence[str], *, reason: str
    ) -> Sequence[AckboneError | None]: ...

    async def resume(self, task: Identity, *, effects: Sequence[EffectWord] = ()) -> None:
        """Make a parked task ready, without using up an attempt."""

    async def discard_parked(self, task: Identity, *, reason: str) -> None:
        """End a parked task, and free its key and its conversation."""

    async def cancel(self, task: Identity, *, queue: str, reason: str) -> Cancelled:
        """Cancel a task. One that the store does not know yet ends when it is claimed."""

    async def submitted(self, subscription: str, tasks: Sequence[Message]) -> None:
        """Write `task.created` for tasks that are about to be sent, once for each task."""

    async def record(self, ends: Sequence[End]) -> int:
        """Store the ends of tasks that other programs ran and this store does not know. Returns how
        many."""

    async def pause(self, queue: str) -> bool:
        """Pause a queue. Returns False if it was already paused."""

    async def unpause(self, queue: str) -> bool: ...
