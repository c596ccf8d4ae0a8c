"""Import messages that a broker's server moved to its dead-letter queues: each ends here."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ackbone.core.broker import DeadLetters, Delivery, Settlement, Source, Subscription, Verb
from ackbone.core.errors import BrokerError
from ackbone.core.outcome import GIVEN_UP
from ackbone.core.store import Answer, Claims, Worker

from .decoder import decoder

log = logging.getLogger("ackbone.engine")

AT_ONCE = 100
WAIT_S = 0.2
"""How long to wait for further messages of a server that sends them unasked."""


class BrokerDeadLetters:
    """Reads the dead-letter queues of one broker's server.

    Each message is claimed, with the server's reason as its failure. If no worker and no row of the
    store has it, it ends as a dead letter. If it runs or waits here, it goes on, and the store
    takes over all of it. If it has ended, it is only acknowledged.
    """

    def __init__(
        self, store: Claims, broker: DeadLetters, subscriptions: Sequence[Subscription]
    ) -> None:
        self._store = store
        self._broker = broker
        self._by_queue: Mapping[str, Subscription] = {sub.queue: sub for sub in subscriptions}

    async def step(self, worker: Worker) -> None:
        """Empty every dead-letter queue. One that cannot be read does not stop the others."""
        read: list[Source] = []
        failed: BrokerError | None = None
        for sub in self._by_queue.values():
            try:
                source = await self._broker.dead_letters(sub)
                if source is None or source in read:
                    continue
                read.append(source)
                await self._empty(source, sub, worker)
            except BrokerError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    async def _empty(self, source: Source, of: Subscription, worker: Worker) -> None:
        async def keep(found: Sequence[Delivery]) -> None:
            by_sub: dict[str, list[Delivery]] = {}
            for each in found:
                by_sub.setdefault(self._queue_of(each, of), []).append(each)
            for queue, some in by_sub.items():
                sub = self._by_queue[queue]
                verdicts = await self._store.claim(sub, [*map(decoder(sub), some)], worker=worker)
                ended = sum(each.answer is Answer.DEAD for each in verdicts)
                if ended:
                    log.warning(
                        "%s: the broker's server gave up %d messages. They are dead letters now:"
                        " ackbone dlq list --reason %s",
                        queue,
                        ended,
                        GIVEN_UP,
                    )

        try:
            await read_letters(source, keep, wait=WAIT_S)
        finally:
            await source.pause()  # another worker may be the next to read it

    def _queue_of(self, delivery: Delivery, of: Subscription) -> str:
        """Return the queue that the message was in: several may share a dead-letter queue."""
        return next((name for name in delivery.moved_from if name in self._by_queue), of.queue)


async def read_letters(
    source: Source, keep: Callable[[Sequence[Delivery]], Awaitable[None]], *, wait: float = 0.0
) -> None:
    """Pass all messages of a dead-letter queue to `keep`, and acknowledge those that are kept.
    After a crash in between they come again."""
    while found := await source.receive(limit=AT_ONCE, wait=wait):
        verb = Verb.RELEASE
        try:
            await keep(found)
            verb = Verb.ACK
        finally:
            await source.settle([Settlement(delivery=each, verb=verb) for each in found])
