"""Publishing: batches with one result for each message, confirmed by the server.

The driver's own publish makes four tasks per message and reaches a third of this speed. Here a
batch is a few writes, and one future per message, which the driver resolves: confirmed, refused,
returned because no queue took it, or lost with its connection.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import pamqp.frame
from aiormq.abc import ChannelFrame, DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused, DeliveryError
from pamqp import commands as spec
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from ackbone.core.broker import Outgoing, Result
from ackbone.core.errors import (
    AckboneError,
    BrokerError,
    BrokerUnavailable,
    InvalidMessage,
    MessageTooLarge,
    PublishUnknown,
)
from ackbone.core.ids import new_id

from .entries import properties_of
from .queues import Queues
from .wire import Link

PART, PART_BYTES = 100, 256_000
"""Messages and bytes that are written at a time. The event loop is busy while they are packed."""
_FRAME_END = 8
_TOO_LARGE = re.compile(r"message size (\d+) is larger than configured max size (\d+)")
Confirmation = asyncio.Future[Any]


class Publisher:
    """Publishes on a connection that does nothing else."""

    def __init__(
        self, link: Link, queues: Queues, *, now_us: Callable[[], int], max_body: int
    ) -> None:
        self.max_body = max_body
        self._link = link
        self._queues = queues
        self._now_us = now_us
        self._channels: dict[str, Any] = {}
        """One for each queue: a queue that stands still also stops the channel."""
        self._opening: dict[str, asyncio.Lock] = {}

    async def publish(
        self, queue: str, batch: Sequence[Outgoing], *, within_s: float
    ) -> list[Result]:
        """Publish to the queue of that very name."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        await self._link.connection()
        await self._link.unblocked(within_s)
        await self._queues.ensure(self._link, queue)
        channel = await self._channel_of(queue)
        asked: list[Confirmation | AckboneError] = []
        try:
            await self._link.call(
                self._write(channel, queue, batch, asked),
                within_s=max(0.001, deadline - loop.time()),
            )
        except BrokerUnavailable as error:
            if not asked:
                raise
            asked += [error] * (len(batch) - len(asked))  # these were not written
        waiting = [each for each in asked if isinstance(each, asyncio.Future)]
        if waiting:
            left = max(0.001, deadline - loop.time())
            _, late = await asyncio.wait(waiting, timeout=left)
            if late and not self._link.blocked:
                self._link.doubt()
        results = [
            Result(id=out.id, error=self._error_of(queue, out, each))
            for out, each in zip(batch, asked, strict=True)
        ]
        _raise_common(results)
        return results

    async def _channel_of(self, queue: str) -> Any:
        async with self._opening.setdefault(queue, asyncio.Lock()):
            channel = self._channels.get(queue)
            if channel is None or channel.is_closed:
                channel = self._channels[queue] = await self._link.channel(confirms=True)
            return channel

    async def _write(
        self,
        channel: Any,
        queue: str,
        batch: Sequence[Outgoing],
        asked: list[Confirmation | AckboneError],
    ) -> None:
        """Write the batch. `asked` gets a future, or an error, for each message written so far."""
        at = 0
        while at < len(batch):
            async with channel.lock:
                payload = bytearray()
                part = at + PART
                while at < min(part, len(batch)) and len(payload) < PART_BYTES:
                    try:
                        asked.append(self._pack(channel, queue, batch[at], payload))
                    except AckboneError as error:
                        asked.append(error)
                    at += 1
                if payload:
                    frame = ChannelFrame(payload=bytes(payload), should_close=False)
                    await channel.write_queue.put(frame)
            await asyncio.sleep(0)  # the connection writes

    def _pack(self, channel: Any, queue: str, out: Outgoing, payload: bytearray) -> Confirmation:
        """Append the frames of one message. Raises InvalidMessage."""
        if len(out.body) > self.max_body:
            raise MessageTooLarge(f"{out.id}: {len(out.body)} bytes, the limit is {self.max_body}")
        if out.delay_s > 0:
            raise InvalidMessage(f"{out.id}: RabbitMQ cannot hold a message back")
        number, in_flight = channel.number, channel.message_id_delivery_tag
        again = new_id() if out.id in in_flight else None
        try:
            properties = properties_of(out, self._now_us(), again=again)
            head = pamqp.frame.marshal(
                spec.Basic.Publish(exchange="", routing_key=queue, mandatory=True), number
            )
            header = ContentHeader(properties=properties, body_size=len(out.body))
            about = pamqp.frame.marshal(header, number)
        except (TypeError, ValueError) as error:
            raise InvalidMessage(f"{out.id}: cannot be written as AMQP: {error}") from None
        most = channel.connection.connection_tune.frame_max - _FRAME_END
        if len(about) > most:
            raise MessageTooLarge(f"{out.id}: {len(about)} bytes of headers, the limit is {most}")
        payload += head
        payload += about
        size = channel.max_content_size
        for start in range(0, len(out.body), size):
            payload += pamqp.frame.marshal(ContentBody(out.body[start : start + size]), number)
        channel.delivery_tag += 1
        name = properties.message_id
        confirmation: Confirmation = channel.create_future()
        channel.confirmations[channel.delivery_tag] = confirmation
        in_flight[name] = channel.delivery_tag
        confirmation.add_done_callback(lambda _: in_flight.pop(name, None))
        return confirmation

    def _error_of(
        self, queue: str, out: Outgoing, asked: Confirmation | AckboneError
    ) -> AckboneError | None:
        where = f"{self._link.where}: queue {queue}"
        if isinstance(asked, AckboneError):
            return asked
        if not asked.done():
            late = f"{where}: no confirmation within the deadline"
            return PublishUnknown([out.id], self._link.blocked_text if self._link.blocked else late)
        error = None if asked.cancelled() else asked.exception()
        if asked.cancelled() or error is not None:
            return self._failure(where, out, error)
        answer = asked.result()
        if not isinstance(answer, DeliveredMessage):
            return None
        self._queues.forget(queue)
        return BrokerError(
            f"{where} does not exist, so the message {out.id} was returned. The queue was deleted, "
            "or this user may not declare it"
        )

    def _failure(self, where: str, out: Outgoing, error: BaseException | None) -> AckboneError:
        if isinstance(error, DeliveryError):
            return BrokerUnavailable(f"{where} is full and refuses messages (reject-publish)")
        if isinstance(error, ChannelAccessRefused):
            return BrokerError(f"{where}: {error}")
        text = "the connection was lost" if error is None else str(error) or type(error).__name__
        found = _TOO_LARGE.search(text)
        if found is not None:  # the server's own limit is lower than the usual one
            self.max_body = min(self.max_body, int(found[2]))
            if len(out.body) > self.max_body:
                return MessageTooLarge(f"{out.id}: {text}")
        return PublishUnknown([out.id], f"{where}: {text}")


def _raise_common(results: Sequence[Result]) -> None:
    """Raise if no message was stored, or if that is known of none."""
    errors = [each.error for each in results]
    unknown = [error for error in errors if isinstance(error, PublishUnknown)]
    if errors and len(unknown) == len(errors):
        raise PublishUnknown([each.id for each in results], unknown[0].detail)
    away = [error for error in errors if isinstance(error, BrokerUnavailable)]
    if errors and len(away) == len(errors):
        raise away[0]
