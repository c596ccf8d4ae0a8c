"""The readers of a worker: one broker's trouble is not another one's."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.errors import BrokerUnavailable
from ackbone.core.store import Worker
from ackbone.engine.sources import Sources
from ackbone.engine.worker_relays import WorkerRelays


class Source:
    """Extends leases, unless its broker is away."""

    def __init__(self, *, away: bool) -> None:
        self.away = away
        self.extended: list[Delivery] = []

    async def extend(self, batch: Sequence[Delivery]) -> None:
        if self.away:
            raise BrokerUnavailable("it is away")
        self.extended += batch


async def test_leases_are_extended_on_one_broker_while_another_is_away():
    reported = list[str]()
    outages: Any = SimpleNamespace(
        failed=lambda caller, error, **how: reported.append(f"{how['broker']}: {caller}: {error}")
    )
    by_queue = {"lost": Source(away=True), "found": Source(away=False)}
    brokers = {
        queue: SimpleNamespace(subscribe=_returning(source)) for queue, source in by_queue.items()
    }
    sources = Sources(lambda queue: brokers[queue], lambda name: 1, outages)
    copy = Delivery(body=b"", headers={}, tag=1, identity="m")
    active = []
    for queue in by_queue:
        sub = Subscription(name=queue, queue=queue, broker=f"broker-of-{queue}")
        await sources.of(sub)
        active.append(SimpleNamespace(run=SimpleNamespace(delivery=copy), sub=sub))
    relays: Any = SimpleNamespace(
        _steps=SimpleNamespace(sources=sources),
        _flow=SimpleNamespace(
            executor=SimpleNamespace(active=active), settler=SimpleNamespace(unsettled=[])
        ),
    )
    await WorkerRelays._extend(relays, Worker(worker_id=1))
    assert by_queue["found"].extended == [copy]
    assert reported == ["broker broker-of-lost: extending leases of lost: it is away"]


def _returning(source: Source) -> Any:
    async def subscribe(sub: Subscription, *, room: int) -> Source:
        return source

    return subscribe
