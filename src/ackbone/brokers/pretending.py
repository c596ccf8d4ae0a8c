"""Memory brokers that pretend to be other brokers, for tests without a server.

    broker = PretendingBroker("kafka", parts=4)  # broker: memory://?like=kafka
    other = broker.connect()                     # the client of another worker
    broker.move("orders", "2", other)            # part 2 belongs to the other one from now on

They have the features and the limits of those brokers as the engine sees them, not their protocols.
`sqs` and `servicebus` are queues with groups and sessions: each ordering key is a part.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ackbone.core.broker import (
    Delivery,
    Identity,
    Outgoing,
    Result,
    Settlement,
    Subscription,
    Verb,
)
from ackbone.core.clock import Clock
from ackbone.core.errors import BrokerError, ConfigError

from .memory import MemoryBroker, MemorySource, _Item, _Queue

Like = Literal["memory", "kafka", "sqs", "servicebus"]

_BARE: Mapping[str, Any] = {"delay": False, "priority": False, "ttl": False, "ordered": False}
_LIKE: Mapping[Like, Mapping[str, Any]] = {
    "memory": {},
    "kafka": {**_BARE, "parts": True, "release": False, "reject": False, "hold_limit_s": 30.0},
    "sqs": {
        **_BARE, "parts": True, "reject": False, "lease_s": 2.0, "hold_limit_s": 600.0,
        "max_body": 1024 * 1024,
    },
    "servicebus": {**_BARE, "parts": True, "lease_s": 2.0, "hold_limit_s": 600.0},
}  # fmt: skip


class PretendingBroker(MemoryBroker):
    """A memory broker with the capabilities of another broker.

    `like` chooses them, and each can be set by its name as well. `chunk` is the most messages that
    one `receive` returns (10 for SQS). `parts` is the number of a topic's partitions (Kafka).
    """

    def __init__(
        self,
        like: Like = "memory",
        *,
        clock: Clock | None = None,
        chunk: int | None = None,
        parts: int = 4,
        **capabilities: Any,
    ) -> None:
        super().__init__(clock=clock)
        changes = {**_LIKE[like], **capabilities}
        self.capabilities = msgspec.structs.replace(self.capabilities, **changes)
        self.settled: list[tuple[bytes, Verb]] = []
        """Bodies of the messages that this client was told to settle, and how."""
        self._like: Like = like
        self._chunk = chunk or (10 if like == "sqs" else None)
        self._n_parts = parts
        self._copy = {"like": like, "chunk": chunk, "parts": parts, **capabilities}
        self._group = _Group()
        self._lease_ends: dict[str, float] = {}
        """When the lease of each unsettled delivery is over, by its tag."""

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> PretendingBroker:
        """Read `memory://?like=kafka`."""
        name, _, like = url.partition("?")[2].partition("=")
        for kind in _LIKE:
            if (name, like) == ("like", kind):
                return cls(kind, clock=clock)
        raise ConfigError([f"memory:// takes one parameter: ?like= one of {', '.join(_LIKE)}"])

    def connect(self) -> PretendingBroker:
        other = type(self)(clock=self._space.clock, **self._copy)
        other._space, other._group = self._space, self._group
        return other

    @property
    def in_flight(self) -> int:
        """The number of messages that were received and not settled, by all clients."""
        return sum(queue.in_flight for queue in self._space.queues.values())

    def move(self, queue: str, part: str, to: PretendingBroker) -> None:
        """Give a part to another client, as a rebalance does (Kafka)."""
        self._group.moved[queue, part] = to
        to._join(queue)

    # -- the port ---------------------------------------------------------------------------------

    async def close(self) -> None:
        await super().close()
        self._lease_ends.clear()
        for part in self._group.parts.values():
            if part.reader is self:
                part.reader, part.opens = None, True
                part.tags.clear()
        for queue, members in self._group.members.items():
            if self in members:
                members.remove(self)
                self._assign(queue)

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        able, without = self.capabilities, dict[str, Any]()
        if not able.priority:
            without["priority"] = 1
        if not able.delay:
            without["delay_s"] = 0.0
        if not able.ttl:
            without["ttl_s"] = None
        if without:
            batch = [msgspec.structs.replace(out, **without) for out in batch]
        return await super().publish(queue, batch)

    async def subscribe(self, sub: Subscription, *, room: int) -> PretendingSource:
        self._require_open()
        return PretendingSource(self, sub)

    async def _receive(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        self._require_open()
        self._join(sub.queue)
        limit = limit if self._chunk is None else min(limit, self._chunk)
        return await super()._receive(sub, limit, wait)

    async def _settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        self._require_open()
        self.settled += [(each.delivery.body, each.verb) for each in batch]
        results = []
        for each in batch:
            tag, verb = each.delivery.tag, each.verb
            error = None
            if verb is Verb.REJECT and not self.capabilities.reject:
                error = BrokerError(f"{self._like} has no dead-letter queue for a REJECT")
            elif verb is not Verb.RELEASE or self.capabilities.release:
                self._let_go(tag, released=verb is Verb.RELEASE)
                await super()._settle([each])
            results.append(Result(id=each.delivery.identity or "", error=error))
        return results

    def _extend(self, batch: Sequence[Delivery]) -> None:
        """Start the leases over, as far as they are not over."""
        self._take_back()
        for delivery in batch:
            if delivery.tag in self._lease_ends:
                self._lease_ends[delivery.tag] = self._lease_end()

    def _reread(self, queue: str, parts: Collection[str]) -> None:
        for name in parts:
            part = self._group.parts.get((queue, name))
            if part is not None and part.reader is self:
                self._begin_again(part)
        self._space.queue(queue).wake()

    # -- receiving --------------------------------------------------------------------------------

    def _take(self, queue: _Queue, limit: int) -> list[Delivery]:
        for client in [*self._group.members.get(queue.name, ())]:
            client._take_back()
        found = super()._take(queue, limit)
        for n, delivery in enumerate(found):
            changes: dict[str, Any] = {}
            if self.capabilities.identity is Identity.NONE:
                changes["identity"] = None
            if self.capabilities.parts:
                part = self._part_of(self._held[delivery.tag])
                changes.update(part=part.name, opens_part=part.opens)
                part.reader, part.opens = self, False
                part.tags.add(delivery.tag)
            if self.capabilities.lease_s is not None:
                self._lease_ends[delivery.tag] = self._lease_end()
                asyncio.get_running_loop().call_later(self.capabilities.lease_s, queue.wake)
            found[n] = msgspec.structs.replace(delivery, **changes)
        return found

    def _may_take(self, item: _Item) -> bool:
        if not self.capabilities.parts:
            return True
        part = self._part_of(item)
        if self._like == "sqs":  # a group is blocked while one of its messages is unsettled
            return not part.tags
        if self._like == "servicebus":  # a session is locked by its reader
            return part.reader in (None, self)
        return part.reader is self

    def _part_of(self, item: _Item) -> _Part:
        queue, key = item.queue.name, item.out.key
        if self._like == "kafka":
            name = str((zlib.crc32(key.encode()) if key else item.number) % self._n_parts)
        else:  # a message without a key is a group of its own
            name = key or f"#{item.number}"
        found = self._group.parts.get((queue, name))
        if found is None:
            found = self._group.parts[queue, name] = _Part(queue, name)
            self._assign(queue)
        return found

    # -- parts ------------------------------------------------------------------------------------

    def _join(self, queue: str) -> None:
        """Become a reader of the queue, if this client is none yet."""
        members = self._group.members.setdefault(queue, [])
        if self not in members:
            members.append(self)
        self._assign(queue)

    def _assign(self, queue: str) -> None:
        """Divide the partitions among the readers. What moves begins again for its new reader."""
        members = self._group.members.get(queue, [])
        if self._like != "kafka":
            return
        for part in self._group.parts.values():
            if part.queue != queue:
                continue
            reader = self._group.moved.get((queue, part.name))
            if reader not in members:
                reader = members[int(part.name) % len(members)] if members else None
            if part.reader is not reader:
                self._begin_again(part)
                part.reader = reader
                self._space.queue(queue).wake()

    def _begin_again(self, part: _Part) -> None:
        """Return the unsettled messages of a part to the queue; the next one opens it."""
        part.opens = True
        for client in self._group.members.get(part.queue, ()):
            for tag in part.tags & client._held.keys():
                client._lease_ends.pop(tag, None)
                item = client._held.pop(tag)
                item.queue.put_back(item)
        part.tags.clear()

    def _let_go(self, tag: Any, *, released: bool) -> None:
        """The delivery with this tag is settled, or back in the queue."""
        self._lease_ends.pop(tag, None)
        item = self._held.get(tag)
        if item is None or not self.capabilities.parts:
            return
        part = self._part_of(item)
        part.tags.discard(tag)
        part.opens = part.opens or released
        if not part.tags and self._like != "kafka":  # the next reader is whoever comes first
            part.reader, part.opens = None, True

    # -- leases -----------------------------------------------------------------------------------

    def _lease_end(self) -> float:
        return self._space.clock.monotonic() + (self.capabilities.lease_s or 0.0)

    def _take_back(self) -> None:
        """Return the messages to the queue that this client has held for too long."""
        now = self._space.clock.monotonic()
        for tag in [tag for tag, end in self._lease_ends.items() if end <= now]:
            item = self._held.get(tag)
            self._let_go(tag, released=True)
            if item is not None:
                del self._held[tag]
                item.queue.put_back(item)


class PretendingSource(MemorySource):
    """One queue, read by one client that pretends. It has the roles `Extends` and `Rereads`."""

    _broker: PretendingBroker

    async def extend(self, batch: Sequence[Delivery]) -> None:
        self._broker._extend(batch)

    def reread(self, parts: Collection[str]) -> None:
        self._broker._reread(self._sub.queue, parts)


class _Part:
    """A partition, a group or a session."""

    def __init__(self, queue: str, name: str) -> None:
        self.queue = queue
        self.name = name
        self.reader: PretendingBroker | None = None
        self.opens = True
        """The next message of it is the first one that its reader gets."""
        self.tags: set[str] = set()
        """Tags of its unsettled deliveries."""


class _Group:
    """What the clients of one broker share: who reads, and who has which part."""

    def __init__(self) -> None:
        self.members: dict[str, list[PretendingBroker]] = {}
        self.parts: dict[tuple[str, str], _Part] = {}
        self.moved: dict[tuple[str, str], PretendingBroker] = {}
