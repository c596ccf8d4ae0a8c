"""The broker port: a transport of bytes and headers, in batches.

An adapter holds no policy: retries, dedup and dead letters belong to the engine and the store.
Every call takes and returns batches of any size, ends within a deadline, and answers for each item,
so that one bad item never fails the others. A new broker is a class with the methods of `Broker`, a
class with those of `Source`, and an honest `Capabilities`. The conformance suite in
`ackbone.testing` checks each flag both ways.

Beyond these there are optional roles: of a broker, such as `Inspectable`, and of a source, such as
`Extends`. An adapter has a role if it has the role's methods.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from .errors import AckboneError
from .findings import Check

if TYPE_CHECKING:
    from .task_protocol import TaskProtocol


class Durability(StrEnum):
    """The faults that an accepted message survives (P1)."""

    NONE = "none"
    """Nothing: the message is in memory and gone with the process. For tests and dry runs."""
    PROCESS = "process"
    """Killed processes, but not a power cut."""
    FSYNC = "fsync"
    """A power cut: the message is on stable storage."""
    REPLICATED = "replicated"
    """The loss of a machine: the message is stored on several."""


class Identity(StrEnum):
    """Whether the broker gives every message an identity that survives redelivery."""

    BROKER = "broker"
    NONE = "none"
    """Messages may have none: those of other programs, or all."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The features of a broker. The conformance suite checks each flag both ways."""

    durability: Durability
    identity: Identity = Identity.BROKER
    delay: bool = False
    """`Outgoing.delay_s` is honoured."""
    priority: bool = False
    """Messages of higher priority are received first."""
    ttl: bool = False
    """Expired messages are handed over with `expires_at_us`, not dropped. The engine ends them."""
    ordered: bool = False
    """Messages of one queue and one priority are received in the order in which they were sent."""
    release: bool = True
    """RELEASE makes a message available again at once."""
    reject: bool = False
    """REJECT ends a message at the broker, which keeps it with the reason, apart from its queue: in
    a dead-letter queue or table. Without it, only the store keeps the dead letter."""
    lease_s: float | None = None
    """How long an unsettled delivery belongs to its receiver. None: until the connection or the
    process ends."""
    max_body: int | None = None
    """Largest body of one message, in bytes."""
    hold_limit_s: float | None = None
    """How long a run may leave its broker copy unsettled before the engine adopts the message."""
    parts: bool = False
    """A queue consists of parts (partitions, sessions, groups). One reader at a time has a part,
    and reads it in order from the first message that is not settled. So all workers may read an
    ordered subscription."""


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """One message to publish."""

    id: str
    body: bytes
    headers: Mapping[str, str] = {}
    priority: int = 1
    delay_s: float = 0.0
    ttl_s: float | None = None
    key: str | None = None
    """Ordering key. Brokers with partitions or groups use it as their key."""


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A queue as one consumer group sees it, and how its messages are read."""

    name: str
    """Name of the subscription in the store. By default it is the queue's name."""
    queue: str
    broker: str = "default"
    """Name of the broker that the queue is on."""
    group: str = "ackbone"
    codec: str = "standard"
    tenant: str | None = None
    """Tenant of all messages. None: each message names its own, in its envelope or a header."""
    tenant_header: str = "x-tenant-id"
    type_header: str = "x-event-name"
    default_type: str = "queue_message"
    ordered: bool = True
    """Messages with the same ordering key run one after the other, in order."""
    ack_policy: str = "dlq"
    dedup: bool = True
    dedup_window_s: float = 3600.0
    dedup_by_id: bool = False
    """Use the message id as the idempotency key of messages that have none."""
    broker_dead_letters: str | None = None
    """The queue to which the broker's server moves messages of this one (`DeadLetters`)."""
    protocol: TaskProtocol | None = None
    """Set if the messages are tasks of the task protocol. Adapters do not read it."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One received copy of a message, to be settled by its receiver."""

    body: bytes
    headers: Mapping[str, str]
    tag: Any
    """The adapter's own handle, which it needs to settle the copy."""
    identity: str | None
    """The broker's identity for the message, the same on each redelivery."""
    count: int = 1
    """How often the broker has delivered the message. 1 if it does not count."""
    sent_at_us: int | None = None
    priority: int = 1
    key: str | None = None
    expires_at_us: int | None = None
    expires_steady_s: float | None = None
    """The expiry by this machine's steady clock, if the broker's clock is another machine's."""
    intact: bool = True
    """False if the broker's checksum does not match: the body is not the one that was published."""
    entry: str | None = None
    """The server's id of this copy, as its own tools show it. Set for copies that were pending."""
    part: str | None = None
    """The part of the queue that this copy came from. None if the broker has no parts
    (`Capabilities.parts`)."""
    opens_part: bool = False
    """The reader begins to read the part with this copy. No message before it was left out: each
    one is settled, or this reader holds it.

    Set on the first copy since the reader was given the part, and on the first one after a RELEASE,
    the end of a lease or `Rereads.reread` brought copies of the part back. A worker that adopts
    such a copy owns the part from then on, and the store refuses other copies of a part that their
    worker does not own."""
    failure: str | None = None
    """Why the server moved the message to a dead-letter queue (`DeadLetters`). A claim ends it."""
    moved_from: Sequence[str] = ()
    """The queues that the server moved the message out of, the latest first (`DeadLetters`)."""
    taken_from: str | None = None
    """The consumer that had this copy before, and gave no sign of life for too long."""
    crc: int | None = None
    """CRC-32 of the body, if the broker computed it anyway."""


class Verb(StrEnum):
    """How a delivery is settled."""

    ACK = "ack"
    """The broker forgets the copy."""
    RELEASE = "release"
    """The copy returns to the queue, to be received again. Never sent to a broker without
    `Capabilities.release`: there it comes when its lease ends, its reader closes, or by `Rereads`.
    """
    REJECT = "reject"
    """The copy goes to the broker's dead-letter queue (`Capabilities.reject`)."""


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery, and how it is settled."""

    delivery: Delivery
    verb: Verb
    reason: str = ""
    """For REJECT the failure; for an ACK without a run the store's verdict."""
    delay_s: float = 0.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's answer for one item of a batch."""

    id: str
    error: AckboneError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the broker can be used now, and if not, why."""

    ok: bool
    detail: str = ""


class Source(Protocol):
    """One subscription in this process: receives the messages of a queue and settles them.

    It outlives lost connections. Closing the broker closes it.
    """

    async def receive(self, *, limit: int, wait: float) -> Sequence[Delivery]:
        """Return up to `limit` deliveries. Waits at most `wait` seconds for the first one.

        Cancelling the call loses nothing: what it received is delivered again.
        """
        ...

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        """Acknowledge, release or reject. Returns one result for each item, in order.

        Settling a delivery twice, or one that another receiver has by now, does no harm.
        """
        ...

    async def pause(self) -> None:
        """Return to the queue what was read from it and not yet received.

        Nothing more is read before the next `receive`. Received deliveries can still be settled.
        """
        ...


class Broker(Protocol):
    """A transport. The rules for all calls are at the top of this module."""

    @property
    def capabilities(self) -> Capabilities:
        """The features of this broker. They may change when the broker is opened."""
        ...

    async def open(self) -> None:
        """Connect. Opening twice does no harm.

        Raises BrokerUnavailable, with the address and never with credentials.
        """
        ...

    async def close(self) -> None:
        """Disconnect. Unsettled deliveries return to the queue. Closing twice does no harm."""
        ...

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        """Store a batch. Returns one result for each message, in the order of the batch.

        It returns when the accepted messages are as durable as `Capabilities.durability` says. A
        bad message fails alone: its result has the error. Raises BrokerUnavailable if nothing was
        stored, and PublishUnknown if that is not known.
        """
        ...

    async def subscribe(self, sub: Subscription, *, room: int) -> Source:
        """Return the reader of the subscription, the same one until the broker is closed.

        It reads nothing before its first `receive`. `room` is how many messages the engine can have
        at a time. An adapter whose server sends messages unasked lets it send that many. Raises
        BrokerUnavailable if the broker is closed.
        """
        ...

    async def health(self) -> Health:
        """Say whether the broker can be used now. Never raises."""
        ...


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages a queue holds."""

    queue: str
    ready: int
    delayed: int = 0
    in_flight: int = 0
    oldest_age_s: float | None = None


@runtime_checkable
class Inspectable(Protocol):
    """Optional role: depth and age of queues."""

    async def stats(self, queues: Collection[str] = ()) -> Sequence[QueueStats]:
        """Count the messages of `queues`, and of every queue that this client has used."""
        ...


@runtime_checkable
class Examinable(Protocol):
    """Optional role: it checks for `ackbone doctor` whether its own server would lose messages.

    A broker in the store's database needs no such role: `doctor` checks the store."""

    async def examine(self, queues: Collection[str] = ()) -> Sequence[Check]:
        """Return the findings about the server and these queues. A server that does not answer is
        one. The broker need not be open."""
        ...


@runtime_checkable
class Bound(Protocol):
    """Optional role: its server remembers which store the workers of a subscription use, so that
    workers with another store are refused.

    Two stores would each run the same message, because a store recognizes only its own duplicates.
    """

    async def bind(self, sub: Subscription, store: str, *, for_s: float) -> str | None:
        """Reserve the subscription for a store, for `for_s` seconds from now.

        Workers call it when they start and then again and again, before the time is over. Returns
        None if the subscription was free or has this store, else the name of the other store.
        """
        ...


@runtime_checkable
class Trims(Protocol):
    """Optional role: it removes old messages from queues whose messages stay after they were read.

    The engine calls it for results and copies of dead letters, which several groups may read."""

    async def trim(self, queue: str, *, older_than_s: float) -> int:
        """Remove messages older than `older_than_s`, except those that a group has yet to read or
        to acknowledge. Returns the number of removed messages."""
        ...


@runtime_checkable
class Shows(Protocol):
    """Optional role: it can list copies without receiving them, so that the engine notices when the
    server has lost one."""

    def copies(self, sub: Subscription) -> AsyncIterator[Sequence[Delivery]]:
        """Yield, in parts, the copies that the subscription has not acknowledged, received or not.

        A copy that is there during the whole call is among them.
        """
        ...


@runtime_checkable
class DeadLetters(Protocol):
    """Optional role: its server moves messages to dead-letter queues by itself, and the broker can
    read them there."""

    async def dead_letters(self, sub: Subscription) -> Source | None:
        """Return a reader of the queue to which the server moves messages of this subscription.

        None: there is none. Its deliveries have the server's reason as `failure`. Subscriptions
        whose messages go to one and the same queue have one reader.
        """
        ...


@runtime_checkable
class Renews(Protocol):
    """Optional role: it logs in with credentials, and reads them again when the server refuses
    them."""

    def renew_by(self, url_now: Callable[[], str]) -> None:
        """Set the function that returns the current URL, for when the server refuses the old
        one."""
        ...


@runtime_checkable
class LimitsPublish(Protocol):
    """Optional role: it ends a publish within `publish_within_s`, shortly before the sender gives
    up, with an error that says what it waited for."""

    publish_within_s: float | None
    """Seconds after which a publish fails. Set before the broker is opened, to nine tenths of
    `send_timeout_s`. None: the adapter's own limit applies, if it has one."""


@runtime_checkable
class NamesConsumers(Protocol):
    """Optional role: its server knows each reader by a name. Its sources have `Inherits`."""

    def name_consumer(self, name: str) -> str:
        """Choose a unique reader name that contains `name`, and return it.

        Called before the broker is opened.
        """
        ...


TAKE_BYTES = 16 * 1024 * 1024
"""After bodies of this many bytes together, one `take_in` may return fewer than it could."""


@runtime_checkable
class Transactional(Protocol):
    """Optional role: its queues are in the store's own database.

    The store calls these methods inside its transaction, so that receiving and claiming a message,
    or finishing a run and publishing its follow-ups, is one commit. `tx` is the transaction of the
    store's dialect. Transactions that run side by side never get the same message.
    """

    async def take_in(
        self, tx: Any, sub: Subscription, *, limit: int, keyed: bool, floor: int
    ) -> Sequence[Delivery]:
        """Remove up to `limit` due messages from the queue and return them.

        With `keyed`: messages with an ordering key, in the order in which they were sent. Without:
        messages without a key, by priority, none below `floor`. It may stop after bodies of
        `TAKE_BYTES` together: a transaction with all of them might never end in time.
        """
        ...

    async def has_keyed_in(self, tx: Any, sub: Subscription) -> bool:
        """Return True if a message with an ordering key is due."""
        ...

    async def promote_in(self, tx: Any) -> None:
        """Make delayed messages ready that are due."""
        ...

    async def next_due_in(self, tx: Any) -> int | None:
        """Return the microseconds until the next delayed message is due. None: there is none."""
        ...

    async def publish_in(self, tx: Any, queue: str, batch: Sequence[Outgoing]) -> None:
        """Store a batch. The store wakes the readers after the commit."""
        ...


@runtime_checkable
class Extends(Protocol):
    """Optional role of a source: the lease of a delivery can be extended."""

    async def extend(self, batch: Sequence[Delivery]) -> None:
        """Start the lease of these deliveries over."""
        ...


@runtime_checkable
class Rereads(Protocol):
    """Optional role of a source: it can read a part again from its first unsettled message, because
    the broker cannot release a single one."""

    def reread(self, parts: Collection[str]) -> None:
        """Read these parts again from their first message that is not settled, with `opens_part`.

        The next `receive` does it. A part that this reader does not have any more is left out.
        """
        ...


@runtime_checkable
class Inherits(Protocol):
    """Optional role of a source: it can take over the unsettled copies of dead readers."""

    @property
    def holders(self) -> Collection[str]:
        """The other readers of ours that held unsettled copies when this one last looked."""
        ...

    def take_from(self, readers: Collection[str]) -> None:
        """Take the copies of readers that have ended, without waiting for the end of their lease.

        The next `receive` returns them.
        """
        ...


@runtime_checkable
class TakesOver(Protocol):
    """Optional role of a source: it can become the only reader of an ordered queue while another
    reader holds messages, and begins with those."""

    def take_over(self) -> None:
        """Become the only reader of the subscription, until another client calls this.

        Messages that other readers of ours received and did not settle come to this one, before
        all later messages. That holds, too, for messages that a replaced reader still receives.
        """
        ...
