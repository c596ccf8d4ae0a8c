"""A `QueueAdapter` as a broker for the engine.

The adapter's stream feeds `receive`. A copy is settled with the adapter once, when the store
knows how the message ended. Until then it stays unsettled, even while a retry waits in the store:
if this process and its store are lost, the queue still has the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from ackbone.core.broker import (
    Capabilities,
    Delivery,
    Durability,
    Health,
    Outgoing,
    Result,
    Settlement,
    Subscription,
    Verb,
)
from ackbone.core.errors import BrokerError, BrokerUnavailable
from ackbone.core.secret import mask_line
from ackbone.core.store import Answer

from .config import QueueTriggerConfig
from .mapping import Copy, copy_of, delivery_of
from .messages import RawMessage
from .ports import QueueAdapter

log = logging.getLogger("ackbone.trigger")

AT_ONCE = 100
"""Messages that one call hands over at most. Each is a read of its own."""
TELL_WITHIN_S = 30.0
"""Timeout of one call to the adapter, in seconds. After that we give up, and the queue redelivers
the message."""


class AdapterBroker:
    """The broker port over an adapter that is already connected."""

    capabilities = Capabilities(durability=Durability.NONE)

    def __init__(self, adapter: QueueAdapter, config: QueueTriggerConfig) -> None:
        self._adapter = adapter
        self._config = config
        self._stream: AsyncIterator[RawMessage] | None = None
        self._next: asyncio.Task[RawMessage | None] | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._in_engine: dict[int, Copy] = {}
        self.ended: list[tuple[Copy, str]] = []
        """Copies that the engine has settled, with its verdict. The announcer settles them with the
        queue."""
        self.changed = asyncio.Event()
        """Set when a message may have ended."""

    # -- the port ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Do nothing: the trigger itself connects the adapter, and reports a failure to its
        caller."""

    async def close(self) -> None:
        """Stop reading, and return messages to the queue that have not ended."""
        await self._stop_reading()
        left = [*self._in_engine.values(), *(copy for copy, _ in self.ended)]
        self._in_engine.clear()
        self.ended.clear()
        for copy in left:
            await self.hand_back(copy.raw)

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        error = BrokerError(f"queue {queue}: a trigger's adapter only reads")
        return [Result(id=out.id, error=error) for out in batch]

    async def subscribe(self, sub: Subscription, *, room: int) -> AdapterSource:
        return AdapterSource(self)

    async def health(self) -> Health:
        try:
            return Health(ok=bool(await self._adapter.health_check()))
        except Exception as error:
            return Health(ok=False, detail=mask_line(str(error)))

    # -- for the trigger ---------------------------------------------------------------------

    def pause(self) -> None:
        """Hand over nothing until `resume`. A message that is being read waits here."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    @property
    def held(self) -> int:
        """Number of copies that are not settled with the queue."""
        return len(self._in_engine) + len(self.ended)

    async def hand_back(self, raw: RawMessage) -> None:
        """Ask the queue to deliver the message again."""
        await self.tell(raw, partial(self._adapter.nack, requeue=True))

    async def tell(self, raw: RawMessage, word: Callable[[RawMessage], Awaitable[None]]) -> None:
        """Make one call to the adapter. If it fails, the queue redelivers the copy, and the store
        knows it."""
        try:
            async with asyncio.timeout(TELL_WITHIN_S):
                await word(raw)
        except Exception as error:
            log.warning(
                "message %s: the queue could not settle it: %s",
                raw.message_id,
                mask_line(str(error) or type(error).__name__),
            )

    # -- reading ----------------------------------------------------------------------------------

    def _pull(self) -> asyncio.Task[RawMessage | None]:
        """Return the read in progress. It outlives `receive`: cancelling it could lose a
        message."""
        if self._next is None:
            self._next = asyncio.create_task(self._read(), name="ackbone-trigger-read")
        return self._next

    async def _read(self) -> RawMessage | None:
        if self._stream is None:
            stream = self._adapter.consume()
            self._stream = await stream if inspect.isawaitable(stream) else stream
        try:
            return await anext(self._stream)
        except StopAsyncIteration:
            return None

    async def _delivery(self, raw: RawMessage) -> Delivery | None:
        """Read a message. None: it is not even a `RawMessage`, and was sent to the dead-letter
        queue."""
        try:
            copy = copy_of(raw, self._config)
            delivery = delivery_of(copy)
        except Exception as error:
            reason = f"not a message: {type(error).__name__}: {error}"
            log.error("message %s: %s", raw.message_id, mask_line(reason))
            await self.tell(raw, partial(self._adapter.send_to_dlq, reason=mask_line(reason)))
            return None
        self._in_engine[id(copy)] = copy
        return delivery

    async def _stop_reading(self) -> None:
        task, self._next = self._next, None
        if task is not None:
            if not task.done():
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                raw = task.result()
                if raw is not None:
                    await self.hand_back(raw)
        stream, self._stream = self._stream, None
        close = getattr(stream, "aclose", None)
        if close is not None:
            with contextlib.suppress(Exception):
                await close()


class AdapterSource:
    """The adapter's stream, as the engine receives from it."""

    def __init__(self, broker: AdapterBroker) -> None:
        self._broker = broker

    async def receive(self, *, limit: int, wait: float) -> Sequence[Delivery]:
        broker = self._broker
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await broker._flowing.wait()
        deliveries: list[Delivery] = []
        while len(deliveries) < min(limit, AT_ONCE) and broker._flowing.is_set():
            patience = 0.0 if deliveries else max(0.0, deadline - loop.time())
            task = broker._pull()
            await asyncio.wait([task], timeout=patience)
            if not task.done() or not broker._flowing.is_set():
                break
            if deliveries and (task.cancelled() or task.exception() is not None):
                break  # return what was read before; the next call finds the error
            broker._next = None
            try:
                raw = task.result()
            except Exception as error:
                broker._stream = None
                raise BrokerUnavailable(mask_line(f"the adapter failed: {error}")) from None
            if raw is None:
                broker._stream = None
                if deliveries:
                    break
                raise BrokerUnavailable("the adapter's stream of messages ended")
            delivery = await broker._delivery(raw)
            if delivery is not None:
                deliveries.append(delivery)
        return deliveries

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        broker = self._broker
        for settlement in batch:
            copy: Copy = settlement.delivery.tag
            broker._in_engine.pop(id(copy), None)
            if settlement.verb is Verb.RELEASE:
                await broker.hand_back(copy.raw)
            elif settlement.reason == Answer.FINAL:
                await broker.tell(copy.raw, broker._adapter.ack)
            else:
                broker.ended.append((copy, settlement.reason))
        broker.changed.set()
        return [Result(id=s.delivery.identity or "") for s in batch]

    async def pause(self) -> None:
        """Do nothing: one message at most was read ahead, and a read cannot be undone."""
