"""What operators see of a store and may do to it: the records, and the ports to read and to act.

Times are integer microseconds and end in `_us`; bodies are the bytes that were stored. `Records`
only looks. Every method of `Operations` is one transaction, and writes what was done, and by whom,
into the ledger.
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
    """A row as people see it."""


class DeadLetter(Record, frozen=True, kw_only=True):
    """A message that could not be processed, whole."""

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
    """The message that was sent in its place."""
    history: tuple[Mapping[str, Any], ...] = ()
    body: bytes | None = None
    body_info: str | None = None
    intact: bool = True
    """False: the body is not the one that was written."""


class LetterFilter(Record, frozen=True, kw_only=True):
    """Which dead letters; None: any."""

    queue: str | None = None
    type: str | None = None
    reason: str | None = None
    tenant_id: str | None = None
    error: str | None = None
    """Text that its error contains."""
    since_us: int | None = None
    """Failed then or later."""
    before_us: int | None = None
    """Failed earlier than that."""
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
    """A message in its broker's queue, not yet taken by anyone."""

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
    """It may have arrived."""


class LedgerEvent(Record, frozen=True, kw_only=True):
    """A row of the ledger. `position` grows: what comes later has a higher one."""

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
    """How a queue stands."""

    queue: str
    ready: int = 0
    """Sent, and free to be taken."""
    delayed: int = 0
    running: int = 0
    waiting: int = 0
    """Held by the store: retries, conversations, busy keys."""
    parked: int = 0
    dead: int = 0
    """Open dead letters."""
    oldest_age_s: float | None = None
    """Of what is ready or waiting."""
    paused_at_us: int | None = None


class WorkerState(Record, frozen=True, kw_only=True):
    """A worker that was not told to be gone."""

    worker_id: int
    name: str
    started_at_us: int
    alive: bool
    """False: it died, and nobody has noticed yet."""
    running: int
    offers: Offers | None = None
    """Its handlers and channels; None: it announced none."""


class Count(Record, frozen=True, kw_only=True):
    """How many of a kind there are in a queue."""

    queue: str
    kind: str
    count: int


class Found(Record, frozen=True, kw_only=True):
    """Something that a search came upon."""

    tenant_id: str
    message_id: str
    by: str
    """id, prefix, correlation id, trace id or idempotency key"""


class Resumption(StrEnum):
    """What an operator says about an effect that nobody knows the end of."""

    DONE = "done"
    NOT_DONE = "not-done"


class EffectWord(Record, frozen=True, kw_only=True):
    """The operator's word on one effect."""

    name: str
    word: Resumption
    value: bytes = b"null"
    """What `ctx.once` returns from now on, as JSON, if it was done."""


class Replay(Record, frozen=True, kw_only=True):
    """A dead letter, and the new message that is sent in its place."""

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
    """What came of a wish to cancel."""

    ENDED = "ended"
    """It is discarded, and will not run."""
    ASKED = "asked"
    """It runs, and was asked to stop; it ends as it ends."""
    OVER = "over"
    """It had ended before."""


class Records(Protocol):
    """Looking."""

    async def letters(
        self, where: LetterFilter, *, limit: int, before: str | None = None
    ) -> Sequence[DeadLetter]:
        """Newest first, without bodies; `before` is the id of the last one seen."""
        ...

    async def letter_ids(self, where: LetterFilter, *, limit: int | None) -> Sequence[str]:
        """Oldest first."""
        ...

    async def letters_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[DeadLetter]:
        """With bodies; by letter id, message id, or a prefix of either (exact ones first)."""
        ...

    async def letters_by_id(self, ids: Sequence[str]) -> Sequence[DeadLetter]:
        """With bodies, in this order; those that are not there are left out."""
        ...

    async def letters_of(self, tenant_id: str, message_id: str) -> Sequence[DeadLetter]:
        """Dead letters of a message, and those that it was sent in the place of."""
        ...

    async def parked(
        self,
        *,
        queue: str | None = None,
        kind: str | None = None,
        tenant_id: str | None = None,
        limit: int,
        before: int | None = None,
    ) -> Sequence[tuple[int, Task]]:
        """Newest first, without bodies, each with its place for `before`."""
        ...

    async def tasks(self, tenant_id: str | None, message_id: str) -> Sequence[Task]: ...

    async def tasks_like(
        self, prefix: str, *, tenant_id: str | None, status: str | None, limit: int
    ) -> Sequence[Task]:
        """Tasks whose message id begins so, without bodies."""
        ...

    async def tasks_correlated(self, correlation_id: str, *, limit: int) -> Sequence[Task]: ...

    async def find(self, name: str, *, tenant_id: str | None, limit: int) -> Sequence[Found]:
        """Messages by id, else by prefix, else by correlation id, trace id or idempotency key."""
        ...

    async def events_of(self, tenant_id: str, message_id: str) -> Sequence[LedgerEvent]: ...

    async def effects_of(self, tenant_id: str, message_id: str) -> Sequence[Effect]: ...

    async def replies_of(self, tenant_id: str, message_id: str) -> Sequence[Reply]: ...

    async def waiting_with(self, text: str, *, limit: int) -> Sequence[Waiting]:
        """Messages in the queue with this id, or with this text anywhere in their body."""
        ...

    async def queues(self) -> Sequence[QueueState]: ...

    async def counts(self) -> Sequence[Count]:
        """Messages by queue and status."""
        ...

    async def reply_counts(self) -> Sequence[Count]:
        """Replies by channel and status."""
        ...

    async def event_counts(self, since_us: int) -> Sequence[Count]:
        """Ledger events by queue and type, from a time on."""
        ...

    async def workers(self) -> Sequence[WorkerState]: ...

    async def events_after(
        self, position: int, *, limit: int, since_us: int | None = None
    ) -> Sequence[LedgerEvent]: ...

    async def last_position(self, *, back: int = 0) -> int:
        """Where the ledger ends, or `back` events before that."""
        ...

    def subscribe(self) -> asyncio.Event: ...

    def unsubscribe(self, event: asyncio.Event) -> None: ...


class Operations(Protocol):
    """Acting. Raises NotFound or Conflict where the state has moved on."""

    async def replay(self, batch: Sequence[Replay]) -> Sequence[AckboneError | None]:
        """Send each message and settle its letter, in one commit; one answer per item."""
        ...

    async def discard_letters(
        self, letter_ids: Sequence[str], *, reason: str
    ) -> Sequence[AckboneError | None]: ...

    async def resume(self, task: Identity, *, effects: Sequence[EffectWord] = ()) -> None:
        """A parked task becomes ready; no attempt is spent."""
        ...

    async def discard_parked(self, task: Identity, *, reason: str) -> None:
        """A parked task ends; its key and its conversation are free."""
        ...

    async def cancel(self, task: Identity, *, queue: str, reason: str) -> Cancelled:
        """End a task that does not run. One that nobody has heard of yet ends when it comes."""
        ...

    async def submitted(self, subscription: str, tasks: Sequence[Message]) -> None:
        """Write `task.created` for tasks that are about to be sent, once for each."""
        ...

    async def record(self, ends: Sequence[End]) -> int:
        """Ends of tasks that others ran, and of which nothing is known here; returns how many."""
        ...

    async def pause(self, queue: str) -> bool:
        """False: it was paused before."""
        ...

    async def unpause(self, queue: str) -> bool: ...
