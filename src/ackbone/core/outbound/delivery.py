"""Outgoing replies: their values, and the ports of channels and of the store's deliveries.

A reply is `pending` until it is due, `sending` during an attempt, and ends as `sent` or `failed`.
A `queued` reply waits for an earlier reply of the same conversation. An `unknown` reply may have
arrived, and is sent again only if an operator decides so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec

from ackbone.core.errors import InvalidMessage
from ackbone.core.message import DEFAULT_TENANT
from ackbone.core.store import Worker

DIRECT, SCHEDULED = 2, 0
"""Priorities: answers to people go before replies of scheduled work."""
MAX_RETRIES = 5
"""Attempts after the first one."""
MERGE_MOST = 20
"""Largest number of replies in one call."""
LONGEST_RECIPIENT = 2048
"""Largest length of a recipient in characters: a URL fits."""


class Status(StrEnum):
    """The state of a reply."""

    PENDING = "pending"
    QUEUED = "queued"
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"
    UNKNOWN = "unknown"
    DISCARDED = "discarded"
    """An operator gave it up."""


class Outbound(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that a channel sends. Its id is the same on every attempt."""

    id: str
    tenant_id: str
    channel: str
    recipient: str
    content: str
    conversation: str | None = None
    task_id: str | None = None
    priority: int = DIRECT
    expires_us: int | None = None
    """Do not send the reply after this moment."""
    options: Mapping[str, Any] = {}
    """Further settings for this channel: buttons, media, a subject."""
    receipts: Sequence[str] = ()
    """One for each part that arrived: the service's name for it."""
    call: int = 0
    """The number of this call. Every call counts, whatever its result."""
    retry_count: int = 0
    """Number of failed attempts."""
    max_retries: int = MAX_RETRIES
    in_doubt: bool = False
    """It was sent before and no answer came: it may have arrived."""
    repeat_agreed: bool = False
    """An operator wants it sent once more although it is in doubt."""
    wait_s: float = 0.0
    """Its limits allow the call this many seconds after it was taken."""
    made_us: int = 0
    """When the store wrote it, by the clock of the store; 0 if that is not known."""
    is_back: bool = False
    """Its destination was down, and has answered a call since."""


class New(msgspec.Struct, frozen=True, kw_only=True):
    """A new reply that no run made. Storing the same id again changes nothing."""

    id: str
    tenant_id: str = DEFAULT_TENANT
    channel: str
    recipient: str
    content: str
    conversation: str | None = None
    priority: int = DIRECT
    options: Mapping[str, Any] = {}
    max_retries: int = MAX_RETRIES
    expires_s: float | None = None
    """Do not send the reply after this many seconds."""


def check_recipient(recipient: Any) -> str:
    """Return the recipient. Raises InvalidMessage if it is too long to be stored: a shortened URL
    would lead elsewhere."""
    if not isinstance(recipient, str) or not 0 < len(recipient) <= LONGEST_RECIPIENT:
        raise InvalidMessage(
            f"a recipient is a text of 1 to {LONGEST_RECIPIENT} characters, not {recipient!r:.80}"
        )
    return recipient


# -- limits ---------------------------------------------------------------------------------------


class Limit(msgspec.Struct, frozen=True):
    """At most `count` calls in any `per_s` seconds, of all processes together."""

    key: str
    count: int | None = None
    """None: any number, but the limit can be blocked."""
    per_s: float = 0.0
    whole_channel: bool = False
    """It applies to everything that the channel sends, not to one chat of many."""


Limits = Callable[[Outbound], Sequence[Limit]]
"""Returns the limits that a call for this reply counts for, the narrowest first, each with its own
key.

It must be pure, because it is called inside a transaction. It is called before the reply is taken:
`content` and `receipts` are still empty.
"""


def unlimited(reply: Outbound) -> Sequence[Limit]:
    """The limits of a channel that has none."""
    return ()


# -- results of an attempt ------------------------------------------------------------------------


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The reply arrived, or its next part did."""

    receipt: str = ""
    more: bool = False
    """There are further parts."""
    seen: bool = False
    """Nothing was sent: the channel confirmed that it had arrived before."""


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """The reply did not arrive, or it is unknown whether it did. It is due again after `wait_s`."""

    error: str
    wait_s: float
    costs: bool = True
    """The attempt counts as a retry."""
    in_doubt: bool = False
    """It may have arrived."""
    blocks: Limit | None = None
    """Block this limit for `block_s`, unless a later result frees it."""
    block_s: float | None = None
    """None: `wait_s`."""
    tried: bool = True
    """False: no call was made. It counts for no limit, and there is no event."""


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The reply is given up and kept with the reason."""

    error: str
    in_doubt: bool = False
    """The last attempt may have arrived."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The reply may have arrived, and its channel must not send repeats: an operator decides."""

    error: str
    called: bool = True
    """False: it was in doubt before, and nothing was sent now."""


Result = Sent | Again | Failed | Held


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that has ended."""

    reply: Outbound
    result: Result
    ago_s: float = 0.0
    """Seconds since the answer came: limits count from there."""
    counts: bool = True
    """Its call counts for its limits. False: it was sent with another reply, whose call counts."""
    frees: Limit | None = None
    """The limit of a destination that was down and answers again."""


class Taken(msgspec.Struct, frozen=True):
    """The replies to send now, the most urgent first, and when to look again."""

    replies: Sequence[Outbound]
    next_s: float | None = None
    """Seconds until the next look. None: nothing waits. 0: there may be more."""


# -- ports ----------------------------------------------------------------------------------------


class Channel(Protocol):
    """Sends replies to one kind of place. Its errors decide what happens to a reply."""

    @property
    def name(self) -> str:
        """The name by which replies choose the channel."""

    async def send(self, reply: Outbound) -> str | None:
        """Return when the service has accepted the reply, with the service's name for it, if any.

        Raises RateLimited (wait), SendUnknown (no answer came: it may have arrived) or FinalError
        (it will never be accepted). Any other error means that it was not accepted.
        """

    async def close(self) -> None: ...


@runtime_checkable
class Splits(Protocol):
    """A channel that sends long replies in parts, each with its own call."""

    def parts(self, reply: Outbound) -> Sequence[Outbound]:
        """Return at least one part, the same ones for every attempt. Must be pure."""


@runtime_checkable
class Merges(Protocol):
    """A channel that can send several replies to one place as one message."""

    @property
    def merges(self) -> bool:
        """False if merging is turned off."""

    def merged(self, replies: Sequence[Outbound]) -> Outbound | None:
        """Return one reply of one part with all contents in order, under the id of the first.

        None if they are too long together, or of different kinds. Must be pure, because it is
        called inside a transaction.
        """


@runtime_checkable
class Limited(Protocol):
    """A channel whose calls are limited."""

    def limits(self, reply: Outbound) -> Sequence[Limit]:
        """See `Limits`. Must be pure."""


@runtime_checkable
class Destined(Protocol):
    """A channel to many places that fail independently."""

    def destination(self, reply: Outbound) -> str:
        """Return the place. While it is down, all replies to it wait. Must be pure."""


@runtime_checkable
class Reconciles(Protocol):
    """A channel that can tell whether a reply arrived, unless it has `reconciles = False`."""

    async def arrived(self, reply: Outbound) -> bool | None:
        """Return None if the channel does not know, either."""


Fits = Callable[[Sequence[Outbound]], bool]
"""Returns True if these replies, a head and its followers, fit into one call. It must be pure,
because it is called inside a transaction."""


class Deliveries(Protocol):
    """The replies of one store. A worker owns a reply from `take` until `settle`."""

    async def put(self, replies: Sequence[New], *, worker: Worker | None = None) -> None:
        """Store new replies; they are durable when this returns. `delivery.created` is recorded
        when a reply is first taken."""

    async def due_in_s(self, channels: Mapping[str, Limits]) -> float | None:
        """Return the seconds until there may be something to take, or None if nothing waits. This
        changes nothing."""

    async def take(self, channels: Mapping[str, Limits], *, limit: int, worker: Worker) -> Taken:
        """Take replies that are due, first in their conversation and within their limits. They are
        `sending` from now on, durably.

        Shield this call from cancellation: no other process would send what it took.
        """

    async def follow(
        self, head: Outbound, fits: Fits, *, limit: int, worker: Worker
    ) -> Sequence[Outbound]:
        """Take the replies that wait right behind one that this worker is sending, in order, as
        long as they fit. They are `sending` by the same call from now on, durably.

        Only replies that were never sent, have no options and did not expire are taken.
        """

    async def settle(
        self, channels: Mapping[str, Limits], batch: Sequence[Settled], *, worker: Worker
    ) -> None:
        """Record the ends of attempts. Replies that no longer belong to this worker stay as they
        are."""

    async def recover(self, *, worker: Worker) -> int:
        """Make replies due again, in doubt, that dead workers were sending; return their number."""

    def subscribe(self) -> asyncio.Event:
        """Return an event that is set when there may be a new reply. End it with `unsubscribe`."""

    def unsubscribe(self, event: asyncio.Event) -> None: ...
