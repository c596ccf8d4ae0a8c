"""One store for the workers of a queue: what a key promises holds within one, not across two."""

from __future__ import annotations

from collections.abc import Sequence

from ackbone.core.broker import Bound, Broker, Subscription
from ackbone.core.errors import ConfigError
from ackbone.core.store import Claims, Worker


class Binding:
    """Says at the broker, and goes on saying, whose these subscriptions are."""

    def __init__(
        self,
        store: Claims,
        broker: Broker | None,
        subscriptions: Sequence[Subscription],
        *,
        for_s: float,
    ) -> None:
        """`for_s`: how long a word holds; `step` is to be called more often."""
        self._store = store
        self._broker: object = broker
        self._subscriptions = subscriptions
        self._for_s = for_s
        self._name: str | None = None

    async def step(self, worker: Worker) -> None:
        """Raises ConfigError if another store has one of them."""
        if not isinstance(self._broker, Bound):
            return
        if self._name is None:
            self._name = await self._store.identity()
        for sub in self._subscriptions:
            other = await self._broker.bind(sub, self._name, for_s=self._for_s)
            if other is not None:
                raise ConfigError([self._refused(sub, other)])

    def _refused(self, sub: Subscription, other: str) -> str:
        return (
            f"queue {sub.queue}, group {sub.group}: workers with another store ({other}) read it, "
            f"and this one ({self._name}) would run its messages a second time. Let all workers "
            "share one store (store: postgresql://…, or on one machine the same SQLite file), or "
            "read the queue with another `group`. If those workers are gone, wait "
            f"{self._for_s:.0f} s"
        )
