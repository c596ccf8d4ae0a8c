"""The broker port: a dumb, batch-first transport of bytes and headers. Adapters hold no policy.

Every call takes and returns batches, has a deadline, and answers per item: one bad item never fails
its neighbours. A new broker is one class with `Broker`'s methods and an honest `Capabilities`; the
conformance suite in `ackbone.testing` checks each flag both ways.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec

from .checks import Check
from .errors import AckboneError

FLAT = "x-ackbone-flat"
"""Header: the body is a JSON object of texts. A broker whose messages have fields spreads it."""
ONCE = "x-ackbone-once"
"""Header: a mark. Of all messages to one queue with the same mark, one is published. A broker that
cannot know (`Capabilities.once`) publishes each."""


class Durability(StrEnum):
    """What a receipt promises (P1)."""

    NONE = "none"
    """Memory only: gone with the process. For tests and dry runs."""
    PROCESS = "process"
    """Survives kills, not a power cut."""
    FSYNC = "fsync"
    """On stable storage."""
    REPLICATED = "replicated"
    """On several machines."""


class Identity(StrEnum):
    """Does the broker name a message without an id, the same on each redelivery?"""

    BROKER = "broker"
    NONE = "none"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What this broker can do. Each flag is checked both ways by the conformance suite."""

    durability: Durability
    identity: Identity = Identity.BROKER
    delay: bool = False
    priority: bool = False
    ttl: bool = False
    """Expired messages are handed over marked, not dropped: the engine ends them."""
    ordered: bool = False
    """Messages of one queue come in the order in which they were sent (equal priority)."""
    release: bool = True
    """RELEASE hands a message back at once."""
    reject: bool = False
    """REJECT moves a message to a dead-letter place of the broker's own."""
    lease_s: float | None = None
    """How long an unsettled delivery stays ours; None: until the connection or process ends."""
    max_batch: int = 1000
    max_body: int | None = None
    once: bool = False
    """Of messages with the same `ONCE` mark one is published; `Settlement.notices` are, too."""
    hold_limit_s: float | None = None
    """How long a run may keep its broker copy unsettled before the engine adopts it."""


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """One message to publish."""

    id: str
    body: bytes
    headers: Mapping[str, str] = {}
    priority: int = 1
    delay_s: float = 0.0
    ttl_s: float | None = None
    key: str | None = None
    """Ordering key: a partition or group key where the broker has one."""
    fields: Mapping[str, str] | None = None
    """What a FLAT body says, where its maker has it at hand: a broker with fields need not parse
    it again. Texts that are valid Unicode."""


class Notices(msgspec.Struct, frozen=True, kw_only=True):
    """Queues that are told how the tasks of a subscription end (`core/notices.py`)."""

    results: str | None = None
    dead_letters: str | None = None
    on_ack: bool = False
    """A success goes out together with its acknowledgement, not through the store's outbox."""


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A queue as one consumer group sees it, and how its messages are read."""

    name: str
    """Identity of the subscription in the store; the queue's name unless told otherwise."""
    queue: str
    group: str = "ackbone"
    codec: str = "standard"
    tenant: str | None = None
    """Fixed tenant; None: from the message (trusted envelope or header)."""
    tenant_header: str = "x-tenant-id"
    type_header: str = "x-event-name"
    default_type: str = "queue_message"
    ordered: bool = True
    """Messages with an ordering key run one after the other."""
    ack_policy: str = "dlq"
    dedup: bool = True
    dedup_window_s: float = 3600.0
    dedup_by_id: bool = False
    """Use the message id as idempotency key where the message has none."""
    max_retries: int = 3
    """Of failures elsewhere, which a message may tell of, so many count."""
    notices: Notices | None = None
    keep_acked: bool = False
    """Others read this queue, too, and not in groups: nothing is removed from it."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of a message in our hands."""

    body: bytes
    headers: Mapping[str, str]
    tag: Any
    """What the adapter needs to settle it."""
    identity: str | None
    """The broker's own name for the message, the same on each redelivery."""
    count: int = 1
    """How often the broker has handed it out, where it knows."""
    sent_at_us: int | None = None
    priority: int = 1
    key: str | None = None
    expires_at_us: int | None = None
    expires_steady_s: float | None = None
    """The same by this machine's steady clock, of a broker whose own clock is another machine's."""
    intact: bool = True
    """False: the broker's checksum says that the body is not the one that was published."""
    entry: str | None = None
    """The broker's id of this copy, as the server's own tools show it, where it was pending."""
    taken_from: str | None = None
    """Whose it was: another consumer had it, and gave no sign of life for too long."""
    crc: int | None = None
    """CRC-32 of the body, where the broker had to look at it anyway."""
    fields: Mapping[str, str] | None = None
    """What a FLAT body says, where the broker has its fields apart: nobody need parse it again."""


class Verb(StrEnum):
    """What the broker is told about a delivery."""

    ACK = "ack"
    RELEASE = "release"
    REJECT = "reject"


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one delivery."""

    delivery: Delivery
    verb: Verb
    reason: str = ""
    """Why: for REJECT what failed, for an ACK without a run the store's verdict."""
    delay_s: float = 0.0
    notices: Sequence[tuple[str, Outgoing]] = ()
    """Queue and message: published, once each, before the ACK is made (`Capabilities.once`). One
    that has `fields` may come without a body."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's answer for one item of a batch."""

    id: str
    error: AckboneError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Can it be used now, and if not, why."""

    ok: bool
    detail: str = ""


class Broker(Protocol):
    """A transport. See the module's text for the contract."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def open(self) -> None:
        """Connect. Raises BrokerUnavailable with the address, never the credentials. Idempotent."""
        ...

    async def close(self) -> None:
        """Let go of everything; unsettled deliveries return to the queue. Idempotent."""
        ...

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        """Returns when each accepted item is durable in the class the capabilities name."""
        ...

    async def receive(self, sub: Subscription, *, limit: int, wait: float) -> Sequence[Delivery]:
        """Up to `limit` deliveries; waits at most `wait` seconds for the first one."""
        ...

    async def settle(self, sub: Subscription, batch: Sequence[Settlement]) -> Sequence[Result]:
        """ACK, RELEASE or REJECT. Settling twice, or what is no longer ours, is harmless."""
        ...

    async def health(self) -> Health: ...


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """How full a queue is."""

    queue: str
    ready: int
    delayed: int = 0
    in_flight: int = 0
    oldest_age_s: float | None = None


@runtime_checkable
class Inspectable(Protocol):
    """Optional role: depth and age of queues."""

    async def stats(self, queues: Collection[str] = ()) -> Sequence[QueueStats]:
        """Of every queue that this client knows of, and of `queues`."""
        ...


@runtime_checkable
class Examinable(Protocol):
    """Optional role: would the server behind it lose messages? Asked by `doctor`."""

    async def examine(self) -> Sequence[Check]:
        """What is wrong with it, also that it does not answer; the broker need not be open."""
        ...


@runtime_checkable
class Extends(Protocol):
    """Optional role: leases that can be made longer."""

    async def extend(self, sub: Subscription, batch: Sequence[Delivery]) -> None: ...


@runtime_checkable
class Bound(Protocol):
    """Optional role: a queue that several machines reach, and therefore several stores could."""

    async def bind(self, sub: Subscription, store: str, *, for_s: float) -> str | None:
        """The subscription is this store's, for so long; else the name of the store whose it is.

        Two stores would each let a message run: what a key promises holds within one.
        """
        ...


@runtime_checkable
class Trims(Protocol):
    """Optional role: a queue whose messages stay after they were read."""

    async def trim(self, queue: str, *, older_than_s: float) -> int:
        """Remove what is older, and nothing that a group has yet to read; returns how many."""
        ...


@runtime_checkable
class Shows(Protocol):
    """Optional role: its copies can be looked at without taking them."""

    def copies(self, sub: Subscription) -> AsyncIterator[Sequence[Delivery]]:
        """Every copy that the subscription has yet to acknowledge, read or unread, in parts.

        A copy that is there during the whole call is among them.
        """
        ...


@runtime_checkable
class Renews(Protocol):
    """Optional role: it has credentials, which may be changed while it runs."""

    def renew_by(self, url_now: Callable[[], str]) -> None:
        """Where to ask for its URL anew, should the server refuse what the old one says."""
        ...


@runtime_checkable
class LimitsPublish(Protocol):
    """Optional role: a broker that gives up a publish by itself, and can say what it waited for."""

    publish_within_s: float | None


@runtime_checkable
class NamesConsumers(Protocol):
    """Optional role: a broker whose server knows each reader by a name."""

    def name_consumer(self, name: str) -> str:
        """Read under a name that contains this one and that nobody else has. Returns it.

        Called before the broker is opened.
        """
        ...


@runtime_checkable
class TakesOver(Protocol):
    """Optional role: a source whose reader in order is replaced while messages are in its hands."""

    async def take_over(self, sub: Subscription) -> None:
        """From now on this is the one reader of the subscription, until another says the same.

        What other readers of ours were given and did not settle comes to this one, before anything
        that was sent later; also what one of them, not knowing that it was replaced, reads yet.
        """
        ...


@runtime_checkable
class Transactional(Protocol):
    """Optional role: a broker whose queue lives in the store's own database.

    The store calls these inside its transaction, so that taking a message and claiming it, or
    finishing a run and publishing its follow-ups, is one commit.
    """

    def take_in(
        self, tx: Any, sub: Subscription, *, limit: int, keyed: bool, floor: int
    ) -> Sequence[Delivery]:
        """Remove up to `limit` due messages from the queue and hand them over.

        `keyed` takes those with an ordering key, in the order sent; else those without, by
        priority, none below `floor`.
        """
        ...

    def has_keyed_in(self, tx: Any, sub: Subscription) -> bool:
        """Is there a message with an ordering key to take?"""
        ...

    def promote_in(self, tx: Any, now_us: int) -> int | None:
        """Delayed messages that are due become ready; returns when the next one is due."""
        ...

    def publish_in(self, tx: Any, queue: str, batch: Sequence[Outgoing]) -> None: ...
