"""Wait until a worker has nothing left to do: `--until-idle` and `App.work(until_idle=True)`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ackbone.core.broker import Broker, Inspectable
from ackbone.core.errors import BrokerError, StoreError

if TYPE_CHECKING:
    from ackbone.app import App
    from ackbone.engine.worker import EngineWorker

log = logging.getLogger("ackbone.app")

AWAY_S = 0.5
"""The pause before a store or broker that gave no answer is asked again."""
STUCK_S = 6.0
"""How long `idle` waits for messages that no worker can run. It is longer than the interval of the
resolver, which looks every five seconds for keys and conversations that can go on."""


async def idle(app: App, worker: EngineWorker) -> None:
    """Return once nothing is ready, running, waiting or due later. Parked messages do not count.

    Also return, with a warning, if everything that is left has waited for `STUCK_S` for something
    that no worker can do: behind a parked message, or for a copy that the broker does not have.
    """
    subscriptions = app.subscriptions()
    names = [sub.name for sub in subscriptions]
    queues = {sub.queue for sub in subscriptions}
    elsewhere = [queue for queue in queues if not app.store.holds(queue)]
    brokers = app.brokers.with_queues(elsewhere)
    # Broker and store are not read at the same moment, and the outbox moves messages from one to
    # the other. A message missed by the first look is found by the second.
    looks = 2 if elsewhere else 1
    knows_brokers = all(isinstance(broker, Inspectable) for broker, _ in brokers)
    asking = "asking whether there is more to do"
    quiet = left = 0
    loop = asyncio.get_running_loop()
    stuck_at = loop.time()
    while not worker.stopped.is_set():
        try:
            nothing = worker.is_idle() and await _are_empty(brokers)
            quiet = quiet + 1 if nothing and await app.store.is_empty(names) else 0
            left = await app.store.stuck(names) if nothing and knows_brokers and not quiet else 0
            worker.outages.worked(asking, "")
        except (StoreError, BrokerError) as error:  # without an answer there may be messages
            worker.outages.failed(asking, error)
            quiet = left = 0
            await asyncio.sleep(AWAY_S)
        if quiet == looks:
            return
        if left == 0:
            stuck_at = loop.time()
        elif loop.time() - stuck_at > STUCK_S:
            log.warning(
                "%d messages are left that no worker can run: they wait behind a parked message, or"
                " for a copy that the broker has lost. See: ackbone parked list, ackbone stats",
                left,
            )
            return
        await asyncio.sleep(0.02)


async def _are_empty(brokers: Sequence[tuple[Broker, Collection[str]]]) -> bool:
    """Return True if the queues on these brokers are empty. Those in the store's file are not
    asked."""
    for broker, queues in brokers:
        if isinstance(broker, Inspectable):
            for found in await broker.stats(queues):
                if found.queue in queues and (found.ready or found.delayed or found.in_flight):
                    return False
    return True
