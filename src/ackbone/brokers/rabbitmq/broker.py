"""`RabbitBroker`: the broker port on RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import msgspec

from ackbone.core.broker import (
    Capabilities,
    Durability,
    Health,
    Identity,
    Outgoing,
    QueueStats,
    Result,
    Subscription,
)
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import AckboneError, BrokerError, BrokerUnavailable
from ackbone.core.findings import Check, unanswered

from .address import read_address
from .entries import LEVELS, NORMAL, dead_letter_of, key_of
from .publishing import Publisher
from .queues import UNLIMITED_SINCE, Queues
from .server_checks import judge
from .source import RabbitSource
from .wire import Link

MAX_BODY = 16 * 1024 * 1024
"""The limit of servers from 4.0 on, unless they are configured otherwise."""
OLD_MAX_BODY = 64 * 1024 * 1024
"""Older servers take 128 MB, which take longer than a deadline on most networks."""
AT_ONCE = 100
"""The most dead letters that the server sends unasked."""


class RabbitBroker:
    """`Broker`, `Inspectable`, `Examinable`, `DeadLetters`, `Renews` and `LimitsPublish` on one
    RabbitMQ server.

    It uses two connections: one that publishes, and one that reads. A server that is short of
    memory stops the first one alone.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self._address = read_address(url)
        self._clock = clock or SystemClock()
        self._url_now: Callable[[], str] | None = None
        self._why_closed = f"{self._address.where}: the broker is not open"
        self._queues = Queues(self._address.queue_type)
        self._used: set[str] = set()
        self._sources: dict[tuple[str, str], RabbitSource] = {}
        self._reads: Link | None = None
        self._publisher: Publisher | None = None
        self._publishes: Link | None = None
        self.publish_within_s: float | None = None
        self.capabilities = Capabilities(
            durability=Durability.FSYNC,
            identity=Identity.NONE,
            priority=True,
            ttl=True,
            ordered=True,
            max_body=MAX_BODY,
            hold_limit_s=self._address.hold_limit_s,
        )

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> RabbitBroker:
        """Read `amqp://[user:password@]host[:port][/vhost]` or `amqps://`.

        Parameters after a `?`: timeout_s, heartbeat_s, hold_limit_s, queue_type, and those of the
        driver that `address.py` lists.
        """
        return cls(url, clock=clock)

    def renew_by(self, url_now: Callable[[], str]) -> None:
        self._url_now = url_now

    def _link(self) -> Link:
        url_now = self._url_now
        return Link(
            self._address, url_now=None if url_now is None else lambda: read_address(url_now())
        )

    # -- open and close ---------------------------------------------------------------------------

    async def open(self) -> None:
        if self._publishes is not None:
            return
        link = self._link()
        try:
            await link.connection()
        except BaseException as error:
            if isinstance(error, BrokerUnavailable):
                self._why_closed = str(error)
            await link.close()
            raise
        old = link.version < UNLIMITED_SINCE
        limit = OLD_MAX_BODY if old else MAX_BODY
        self.capabilities = msgspec.structs.replace(self.capabilities, max_body=limit)
        self._queues = Queues(self._address.queue_type)
        self._publisher = Publisher(link, self._queues, now_us=self._clock.now_us, max_body=limit)
        self._reads, self._publishes = self._link(), link

    async def close(self) -> None:
        links = [each for each in (self._reads, self._publishes) if each is not None]
        self._reads = self._publishes = self._publisher = None
        sources, self._sources = list(self._sources.values()), {}
        try:
            await asyncio.gather(*(each.close() for each in sources))
        finally:
            await asyncio.gather(*(each.close() for each in links))

    @property
    def _closed(self) -> BrokerUnavailable:
        return BrokerUnavailable(self._why_closed)

    # -- publish and read -------------------------------------------------------------------------

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        publisher = self._publisher
        if publisher is None:
            raise self._closed
        self._used.add(queue)
        within_s = self.publish_within_s or self._address.timeout_s
        levels: dict[int, list[int]] = {}
        for n, out in enumerate(batch):
            level = out.priority if out.priority in LEVELS else NORMAL
            levels.setdefault(level, []).append(n)
        answers = await asyncio.gather(
            *(
                publisher.publish(
                    key_of(queue, level), [batch[n] for n in places], within_s=within_s
                )
                for level, places in levels.items()
            ),
            return_exceptions=True,
        )
        results: dict[int, Result] = {}
        for places, answer in zip(levels.values(), answers, strict=True):
            if isinstance(answer, BaseException):
                if len(levels) == 1 or not isinstance(answer, BrokerError):
                    raise answer
                refusals = [Result(id=batch[n].id, error=answer) for n in places]
                results.update(zip(places, refusals, strict=True))
            else:
                results.update(zip(places, answer, strict=True))
        return [results[n] for n in range(len(batch))]

    async def subscribe(self, sub: Subscription, *, room: int) -> RabbitSource:
        if self._reads is None:
            raise self._closed
        self._used.add(sub.queue)
        name = (sub.queue, sub.group)
        if name not in self._sources:
            names = {level: key_of(sub.queue, level) for level in LEVELS}
            self._sources[name] = RabbitSource(self._reads, self._queues, names, room=room)
        return self._sources[name]

    async def dead_letters(self, sub: Subscription) -> RabbitSource | None:
        queue = sub.broker_dead_letters
        if queue is None:
            return None
        if self._reads is None:
            raise self._closed
        name = (queue, "")
        if name not in self._sources:
            self._sources[name] = RabbitSource(
                self._reads, self._queues, {NORMAL: queue}, room=AT_ONCE, read=dead_letter_of
            )
        return self._sources[name]

    # -- health and statistics --------------------------------------------------------------------

    async def health(self) -> Health:
        reads, publishes = self._reads, self._publishes
        if reads is None or publishes is None:
            return Health(ok=False, detail=str(self._closed))
        if publishes.blocked:
            return Health(ok=False, detail=publishes.blocked_text)
        try:
            channel = await reads.channel()
            await reads.call(channel.close())
        except AckboneError as error:
            return Health(ok=False, detail=str(error))
        return Health(ok=True)

    async def stats(self, queues: Collection[str] = ()) -> Sequence[QueueStats]:
        """Count. What other readers hold is not among `in_flight`: AMQP does not tell."""
        link = self._reads
        if link is None:
            raise self._closed
        found = []
        for queue in sorted(self._used | set(queues)):
            counts = [await self._queues.count(link, key_of(queue, each)) for each in LEVELS]
            ours = [each for each in self._sources.values() if each.queue == queue]
            found.append(
                QueueStats(
                    queue=queue,
                    ready=sum(each or 0 for each in counts) + sum(s.buffered for s in ours),
                    in_flight=sum(each.held for each in ours),
                )
            )
        return found

    async def examine(self, queues: Collection[str] = ()) -> list[Check]:
        link = Link(self._address)
        try:
            return await judge(link, self._queues, sorted(self._used | set(queues)))
        except AckboneError as error:
            return [unanswered("rabbitmq", error)]
        finally:
            await link.close()
