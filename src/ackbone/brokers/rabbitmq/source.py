"""One subscription: messages that the server sends unasked, in a buffer until they are received.

A `_Channel` holds the consumers of the queue's priorities and every message that came through it. A
delivery can be settled only there. When the channel is lost, the server gives all its unsettled
messages to the next reader, so settling them later has no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

import pamqp.frame
from aiormq.abc import ChannelFrame
from aiormq.exceptions import AMQPChannelError
from pamqp import commands as spec

from ackbone.core.broker import Delivery, Result, Settlement, Verb
from ackbone.core.errors import BrokerError, BrokerUnavailable

from .entries import NORMAL, delivery_of
from .queues import UNLIMITED_SINCE, Queues
from .wire import Link

log = logging.getLogger("ackbone.brokers.rabbitmq")

PROBE_S = 5.0
"""An idle source asks the server for a sign of life after this time."""
FIRST_S, NEXT_S = 0.5, 0.1
"""How long a new source waits for the messages that the queues hold, so that higher priorities are
received first: for the first one, and for each further one."""
Read = Callable[[int, Any, Any], Delivery]
"""Makes a delivery of a priority, an AMQP message, and the delivery's tag."""
_NO_REJECT = BrokerError("RabbitMQ's own dead letters are not used; the store keeps them")


class _Channel:
    """A channel with consumers, and what came through it."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.buffer: list[tuple[int, int, Any]] = []
        """A heap, the highest priority first: minus the priority, the delivery tag, the message."""
        self.unsettled: dict[int, None] = {}
        """Delivery tags, oldest first: those in the buffer and those that were received."""
        self.consumers: dict[str, int] = {}
        """Consumer tags, and the priority of each."""
        self.lost = False
        self.arrived = asyncio.Event()
        channel.closing.add_done_callback(self._lose)
        channel.on_consumer_cancel_callbacks.add(self._lose)
        if hasattr(channel, "_Channel__get_content_header") and hasattr(channel, "_read_content"):
            channel._on_deliver_frame = self._read  # the driver makes a task for each message

    async def _read(self, frame: Any) -> None:
        header = await self.channel._Channel__get_content_header()
        await self.keep(await self.channel._read_content(frame, header))

    async def keep(self, message: Any) -> None:
        """Put a message into the buffer."""
        tag = message.delivery.delivery_tag
        level = self.consumers.get(message.delivery.consumer_tag, NORMAL)
        heappush(self.buffer, (-level, tag, message))
        self.unsettled[tag] = None
        self.arrived.set()

    def _lose(self, why: object) -> None:
        """The channel was closed, or the server ended a consumer: its queue was deleted, or a
        message was held for too long. The server gives the messages to other readers."""
        self.lost = True
        self.buffer.clear()
        self.unsettled.clear()
        self.arrived.set()

    async def something_arrives(self, within_s: float) -> bool:
        """Wait for a message, or the end of the channel. Returns False if there is none in time."""
        self.arrived.clear()
        try:
            async with asyncio.timeout(within_s):
                return await self.arrived.wait()
        except TimeoutError:
            return False

    def take(self, limit: int, read: Read) -> list[Delivery]:
        """Take messages out of the buffer, the highest priority first."""
        taken: list[Delivery] = []
        while self.buffer and len(taken) < limit:
            level, tag, message = heappop(self.buffer)
            taken.append(read(-level, message, (self, tag)))
        return taken

    def take_back(self) -> list[int]:
        """Empty the buffer. Returns the tags of its messages."""
        tags = [tag for _, tag, _ in self.buffer]
        self.buffer.clear()
        return tags

    def frames(self, acks: set[int], back: Iterable[int]) -> bytes:
        """Return the frames that settle these messages, and count them as settled."""
        frames: list[Any] = []
        for tag in sorted(back):
            frames.append(spec.Basic.Nack(delivery_tag=tag, requeue=True))
            self.unsettled.pop(tag, None)
        prefix = 0
        for tag in self.unsettled:  # all that are older are settled: one frame for many
            if tag not in acks:
                break
            prefix = tag
        if prefix:
            frames.append(spec.Basic.Ack(delivery_tag=prefix, multiple=True))
        for tag in sorted(acks):
            self.unsettled.pop(tag, None)
            if tag > prefix:
                frames.append(spec.Basic.Ack(delivery_tag=tag))
        return b"".join(pamqp.frame.marshal(each, self.channel.number) for each in frames)

    async def write(self, payload: bytes) -> None:
        await self.channel.write_queue.put(ChannelFrame(payload=payload, should_close=False))


class RabbitSource:
    """The reader of one queue, with its priorities."""

    def __init__(
        self,
        link: Link,
        queues: Queues,
        names: Mapping[int, str],
        *,
        room: int,
        read: Read = delivery_of,
    ) -> None:
        """`names`: the queue of each priority. `read` makes deliveries of AMQP messages."""
        self._link = link
        self._queues = queues
        self._names = names
        self._read = read
        self._room = max(1, min(room, 65_535))
        self._channel: _Channel | None = None
        self._reading = False
        """True if the channel has consumers."""
        self._beginning: asyncio.Task[None] | None = None
        self._closed = False
        self._heard_at = 0.0

    @property
    def queue(self) -> str:
        return self._names[NORMAL]

    @property
    def buffered(self) -> int:
        return 0 if self._channel is None else len(self._channel.buffer)

    @property
    def held(self) -> int:
        """Messages that were received and are not settled."""
        return 0 if self._channel is None else len(self._channel.unsettled) - self.buffered

    # -- receive ----------------------------------------------------------------------------------

    async def receive(self, *, limit: int, wait: float) -> Sequence[Delivery]:
        if limit < 1:
            return []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while True:
            channel = self._channel
            if self._closed:
                return []
            if channel is None or channel.lost or not self._reading:
                await self._begin(max(0.0, deadline - loop.time()))
                channel = self._channel
            taken = [] if channel is None else channel.take(limit, self._read)
            left = deadline - loop.time()
            if taken or left <= 0:
                self._heard_at = loop.time() if taken else self._heard_at
                return taken
            if channel is not None:
                await self._wait(channel, left)

    async def _wait(self, channel: _Channel, left: float) -> None:
        """Wait for a message. After a long silence, ask the server for a sign of life."""
        loop = asyncio.get_running_loop()
        until_probe = self._heard_at + PROBE_S - loop.time()
        if until_probe <= 0:
            self._heard_at = loop.time()
            # This changes nothing for consumers that exist.
            await self._call(channel.channel.basic_qos(prefetch_count=self._room))
            return
        if not channel.buffer and not channel.lost:
            await channel.something_arrives(min(left, until_probe))

    async def _call(self, work: Any) -> Any:
        try:
            return await self._link.call(work)
        except AMQPChannelError as error:
            raise BrokerUnavailable(f"{self._link.where}: queue {self.queue}: {error}") from error

    async def _begin(self, patience_s: float) -> None:
        """Start reading, once for all callers. When one gives up, its start serves the next one."""
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._start())
        beginning = self._beginning
        await asyncio.wait({beginning}, timeout=patience_s + self._link.timeout_s)
        if beginning.done():
            if self._beginning is beginning:
                self._beginning = None
            if not beginning.cancelled():
                beginning.result()

    async def _start(self) -> None:
        await self._link.connection()
        if self._channel is not None and self._channel.lost:  # it may be open: one consumer ended
            await self._close_channel(self._channel)
        waiting = [await self._queues.declare(self._link, name) for name in self._names.values()]
        levels = list(self._names)
        while levels:
            channel = self._channel
            if channel is None or channel.lost:
                channel = _Channel(await self._link.channel())
            missing = await self._consume(channel, levels)
            if missing is None:
                break
            levels.remove(missing)
        assert channel is not None  # noqa: S101 - for the type checker
        self._channel, self._reading = channel, True
        self._heard_at = asyncio.get_running_loop().time()
        there = sum(min(each or 0, self._room) for each in waiting)
        patience_s = FIRST_S
        while not channel.lost and len(channel.buffer) < there:
            if not await channel.something_arrives(patience_s):
                break
            patience_s = NEXT_S

    async def _consume(self, channel: _Channel, levels: Sequence[int]) -> int | None:
        """Start consumers. Returns None, or a priority whose queue does not exist."""
        driver = channel.channel
        await self._call(driver.basic_qos(prefetch_count=self._room))
        for level in levels:
            name = self._names[level]
            tag = f"ackbone.{level}.{id(self):x}"
            channel.consumers[tag] = level
            try:
                await self._link.call(driver.basic_consume(name, channel.keep, consumer_tag=tag))
            except AMQPChannelError as error:
                self._queues.forget(name)
                if level == NORMAL:
                    raise BrokerError(f"{self._link.where}: queue {name}: {error}") from error
                return level
        return None

    # -- settle -----------------------------------------------------------------------------------

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        """ACK or RELEASE. AMQP has no answer to either. A message whose settlement was lost comes
        again."""
        acks: set[int] = set()
        back: set[int] = set()
        results: list[Result] = []
        current = self._channel
        for each in batch:
            error = _NO_REJECT if each.verb is Verb.REJECT else None
            results.append(Result(id=each.delivery.identity or "", error=error))
            channel, tag = each.delivery.tag
            if error is not None or channel is not current or tag not in current.unsettled:
                continue
            (acks if each.verb is Verb.ACK else back).add(tag)
        await self._settle(acks - back, back)
        return results

    async def _settle(self, acks: set[int], back: Iterable[int]) -> None:
        channel = self._channel
        if channel is None or channel.lost:
            return
        payload = channel.frames(acks, back)
        if payload:
            await self._link.call(channel.write(payload))

    async def pause(self) -> None:
        """Return the buffer to the queue, and read nothing more."""
        if self._beginning is not None:
            await asyncio.wait({self._beginning})
        channel = self._channel
        if channel is None or channel.lost or not self._reading:
            return
        self._reading = False
        # On servers before 4.0 a returned message goes behind all others, and closing the channel
        # puts it in front. Closing is possible if nothing that was received is unsettled.
        if self._link.version < UNLIMITED_SINCE and not self.held:
            await self._close_channel(channel)
            return
        for tag in list(channel.consumers):
            await self._call(channel.channel.basic_cancel(tag))
            channel.consumers.pop(tag, None)
        await self._settle(set(), channel.take_back())

    async def _close_channel(self, channel: _Channel) -> None:
        self._channel = None
        if not channel.channel.is_closed:
            with contextlib.suppress(BrokerError, AMQPChannelError):
                await self._link.call(channel.channel.close())
        channel._lose(None)

    async def close(self) -> None:
        """Return everything that is not settled to the queue."""
        self._closed = True
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait({self._beginning})
        channel = self._channel
        if channel is not None and not channel.lost:
            await self._close_channel(channel)
