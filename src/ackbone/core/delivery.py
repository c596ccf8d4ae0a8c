"""Replies on their way out: what channels carry, and the port of the queue that they wait in.

A reply is `pending` until it is due, `sending` while somebody tries, and ends `sent` or `failed`.
`queued` ones stand behind an earlier reply of their conversation. `unknown` is a reply that may
have arrived and that nobody may send again without asking: a person decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec

from .errors import InvalidMessage
from .message import DEFAULT_TENANT
from .store import Worker

DIRECT, SCHEDULED = 2, 0
"""Priorities: answers to people go before what a timer made."""
MAX_RETRIES = 5
"""Attempts after the first one."""
MERGE_MOST = 20
"""So many replies go out by one call, at most."""
LONGEST_RECIPIENT = 2048
"""Characters: a URL fits."""


class Status(StrEnum):
    """Where a reply is."""

    PENDING = "pending"
    QUEUED = "queued"
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"
    UNKNOWN = "unknown"
    DISCARDED = "discarded"
    """A person gave it up."""


class Outbound(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that a channel has to deliver. Its id is the same however often it is tried."""

    id: str
    tenant_id: str
    channel: str
    recipient: str
    content: str
    conversation: str | None = None
    task_id: str | None = None
    priority: int = DIRECT
    expires_us: int | None = None
    """What is not there by then is not sent any more."""
    options: Mapping[str, Any] = {}
    """What else this channel understands: buttons, media, a subject."""
    receipts: Sequence[str] = ()
    """One for each part that arrived: what the channel calls it there."""
    call: int = 0
    """Which call for it this is: every one counts, whatever became of it."""
    retry_count: int = 0
    """Attempts that failed."""
    max_retries: int = MAX_RETRIES
    in_doubt: bool = False
    """It went out before and no answer came: it may be there already."""
    repeat_agreed: bool = False
    """A person wants it sent although it is in doubt: once, until that call is in doubt itself."""
    wait_s: float = 0.0
    """Its limits let it go so long after it was taken, and no sooner."""
    made_us: int = 0
    """When it was written down, by the clock of its queue; 0: that is not known."""
    is_back: bool = False
    """Its destination was down, and has answered somebody since."""


class New(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that nobody's run made, to be written down. The same id again changes nothing."""

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
    """What is not there by then is not sent any more."""


def check_recipient(recipient: Any) -> str:
    """Raises InvalidMessage for one that no row holds: half a URL leads elsewhere."""
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
    """None: as many as one likes, but it can be blocked."""
    per_s: float = 0.0
    whole_channel: bool = False
    """It holds for everything that the channel sends, not for one chat of many."""


Limits = Callable[[Outbound], Sequence[Limit]]
"""Those that a call for this reply counts for, the narrowest first, each under a key of its own.

Pure: it is called inside a transaction. They go by the place, not by the text: before a reply is
taken, its `content` is empty here, and it has no `receipts`.
"""


def unlimited(reply: Outbound) -> Sequence[Limit]:
    """The limits of a channel that has none."""
    return ()


# -- how an attempt ended -------------------------------------------------------------------------


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """It arrived; or its next part did, and `more` are to come."""

    receipt: str = ""
    more: bool = False
    seen: bool = False
    """Nothing was sent: the channel was asked and knows that it had arrived before."""


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """It did not arrive, or nobody knows; it is due again after `wait_s`."""

    error: str
    wait_s: float
    costs: bool = True
    """It spent an attempt."""
    in_doubt: bool = False
    """It may have arrived."""
    blocks: Limit | None = None
    """Nothing that counts for this one goes out before `block_s` is over, or somebody frees it."""
    block_s: float | None = None
    """None: `wait_s`."""
    tried: bool = True
    """False: no call was made. It counts for no limit, and nothing is told of it."""


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """It never will arrive; it is kept, with the reason."""

    error: str
    in_doubt: bool = False
    """This last attempt may have arrived all the same."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """It may have arrived, and its channel must not repeat itself: a person decides."""

    error: str
    called: bool = True
    """False: it was in doubt before, and nothing was sent."""


Result = Sent | Again | Failed | Held


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an attempt."""

    reply: Outbound
    result: Result
    ago_s: float = 0.0
    """How long ago the answer came: limits count from there."""
    counts: bool = True
    """Its call counts for its limits. False: it went out by another's, which does."""
    frees: Limit | None = None
    """Blocked until now: its destination was down, and answers again."""


class Taken(msgspec.Struct, frozen=True):
    """What may be sent now, most urgent first, and when to look again if nothing rings before."""

    replies: Sequence[Outbound]
    next_s: float | None = None
    """None: nothing waits. 0: there may be more."""


# -- ports ----------------------------------------------------------------------------------------


class Channel(Protocol):
    """Carries replies to one kind of place. What it raises says what becomes of a reply."""

    @property
    def name(self) -> str:
        """What a reply calls it."""
        ...

    async def send(self, reply: Outbound) -> str | None:
        """Returns once the other side has taken it, with its name there, if it has one.

        Raises RateLimited (not now), SendUnknown (no answer came: it may have been taken),
        FinalError (it never will be); any other error means that it was not taken.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Splits(Protocol):
    """A channel that sends long replies in parts, each by a call of its own."""

    def parts(self, reply: Outbound) -> Sequence[Outbound]:
        """At least one; the same for every attempt. Pure."""
        ...


@runtime_checkable
class Merges(Protocol):
    """A channel that can say in one message what several replies to one place say."""

    @property
    def merges(self) -> bool:
        """False: it does not want to."""
        ...

    def merged(self, replies: Sequence[Outbound]) -> Outbound | None:
        """One reply of one part, under the id of the first, that says it all in this order.

        None: too long together, or not of one kind. Pure: it is called inside a transaction.
        """
        ...


@runtime_checkable
class Limited(Protocol):
    """A channel that may only be called so often."""

    def limits(self, reply: Outbound) -> Sequence[Limit]:
        """Pure."""
        ...


@runtime_checkable
class Destined(Protocol):
    """A channel to many places that fail each by itself."""

    def destination(self, reply: Outbound) -> str:
        """Where it goes: when that is down, everything for it waits. Pure."""
        ...


@runtime_checkable
class Reconciles(Protocol):
    """A channel that can be asked whether a reply arrived; not, if it has `reconciles = False`."""

    async def arrived(self, reply: Outbound) -> bool | None:
        """None: it cannot tell, either."""
        ...


Fits = Callable[[Sequence[Outbound]], bool]
"""Whether these, a head and what follows it, can go by one call. Pure: it is called inside a
transaction."""


class Deliveries(Protocol):
    """The replies of one store. What is taken is this worker's until it is settled."""

    async def put(self, replies: Sequence[New], *, worker: Worker | None = None) -> None:
        """Durable when it returns. The ledger tells of each when it is first taken."""
        ...

    async def due_in_s(self, channels: Mapping[str, Limits]) -> float | None:
        """Seconds until there may be something to take; None: nothing waits. It only looks."""
        ...

    async def take(self, channels: Mapping[str, Limits], *, limit: int, worker: Worker) -> Taken:
        """Due heads of their conversations, within the limits; now `sending`, and durably so.

        A caller that is cancelled does not stop it: what it took nobody would send. Shield it.
        """
        ...

    async def follow(
        self, head: Outbound, fits: Fits, *, limit: int, worker: Worker
    ) -> Sequence[Outbound]:
        """Those that wait right behind a reply that this worker is sending, in order, as long as
        they fit; now `sending` by the same call, and durably so.

        Only what was never called for, has no options and did not expire.
        """
        ...

    async def settle(
        self, channels: Mapping[str, Limits], batch: Sequence[Settled], *, worker: Worker
    ) -> None:
        """Writes down how attempts ended; what is not this worker's any more is left alone."""
        ...

    async def recover(self, *, worker: Worker) -> int:
        """What dead workers were sending is due again, in doubt. How many these were."""
        ...

    def subscribe(self) -> asyncio.Event:
        """Set whenever there may be a new one. Give it back with `unsubscribe`."""
        ...

    def unsubscribe(self, event: asyncio.Event) -> None: ...
