"""The queues on the server: declaring them, counting them, and how they differ from ours."""

from __future__ import annotations

import asyncio
from typing import Any

from aiormq.exceptions import (
    AMQPChannelError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from ackbone.core.errors import BrokerError

from .wire import Link

UNLIMITED_SINCE = (4, 0)
"""Servers from this version on drop a message after 20 returns unless the queue says otherwise.
For older ones the same argument means "drop at the first return"."""
_LONGEST = 255
Refusals = tuple[type[AMQPChannelError], ...]


class Queues:
    """Declares queues when they are first used. A queue that exists is used as it is."""

    def __init__(self, queue_type: str) -> None:
        self._type = queue_type
        self._declared: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    async def ensure(self, link: Link, name: str) -> None:
        """Declare the queue unless this was done before."""
        if name in self._declared:
            return
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._declared:
                await self.declare(link, name)

    def forget(self, name: str) -> None:
        """Declare the queue again when it is next used: somebody may have deleted it."""
        self._declared.discard(name)

    async def declare(self, link: Link, name: str) -> int | None:
        """Declare the queue. Returns how many messages wait in it, or None if that is not known:
        the queue exists with other arguments, or this user may declare nothing.

        Raises BrokerError if the queue cannot be used.
        """
        if len(name.encode("utf-8", "replace")) > _LONGEST:
            raise BrokerError(f"{link.where}: queue {name[:40]}…: longer than {_LONGEST} bytes")
        may_refuse = (ChannelPreconditionFailed, ChannelAccessRefused)
        answer = await self._ask(link, name, may_refuse, passive=False)
        self._declared.add(name)
        return answer if isinstance(answer, int) else None

    async def count(self, link: Link, name: str) -> int | None:
        """Return how many messages are ready. None: there is no such queue, or no right to ask."""
        answer = await self._ask(link, name, (ChannelNotFoundEntity, ChannelAccessRefused))
        return answer if isinstance(answer, int) else None

    async def difference(self, link: Link, name: str) -> str | None:
        """Return what the server says against our arguments. None: nothing, or no such queue."""
        if await self.count(link, name) is None:  # declaring it would create it
            return None
        answer = await self._ask(link, name, (AMQPChannelError,), passive=False)
        return None if isinstance(answer, int) else answer

    async def _ask(
        self, link: Link, name: str, may_refuse: Refusals, *, passive: bool = True
    ) -> int | str:
        """Declare a queue, or (`passive`) only look at it. Returns how many messages are ready, or
        the words of a refusal that is expected. Raises BrokerError for any other."""
        arguments: dict[str, Any] = {"x-queue-type": self._type}
        if self._type == "quorum" and link.version >= UNLIMITED_SINCE:
            arguments["x-delivery-limit"] = -1
        channel = await link.channel()  # a refusal closes it
        try:
            answer = await link.call(
                channel.queue_declare(name, passive=passive, durable=True, arguments=arguments)
            )
        except may_refuse as error:
            return str(error)
        except AMQPChannelError as error:
            raise BrokerError(f"{link.where}: queue {name}: {error}") from error
        await link.call(channel.close())
        return int(answer.message_count)
