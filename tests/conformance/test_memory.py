"""The reference passes its own suite, by a clock moved by hand and by the machine's."""

from collections.abc import Sequence

from ackbone.brokers.memory import MemoryBroker
from ackbone.core.broker import Broker, Identity
from ackbone.testing import BrokerConformance, FakeClock, PretendingBroker


class _Memory(BrokerConformance):
    quiet_s = 0.02
    tolerance_s = 2.0  # a shared machine

    async def make_broker(self) -> MemoryBroker:
        return MemoryBroker(clock=self.clock)

    async def second_client(self, first: Broker) -> MemoryBroker:
        assert isinstance(first, MemoryBroker)
        return first.connect()

    async def restart(self, broker: Broker) -> None:
        await broker.close()
        await broker.open()

    async def dead_letters(self, broker: Broker, queue: str) -> Sequence[bytes]:
        assert isinstance(broker, MemoryBroker)
        return [copy.body for copy in broker.rejected if copy.queue == queue]


class _Pretending(_Memory):
    delay_s = 0.5  # less than the lease

    def setup_method(self) -> None:
        self.clock = FakeClock()


class TestLikeKafka(_Pretending):
    async def make_broker(self) -> MemoryBroker:
        return PretendingBroker("kafka", clock=self.clock)


class TestLikeSqs(_Pretending):
    async def make_broker(self) -> MemoryBroker:
        return PretendingBroker("sqs", clock=self.clock)


class TestLikeServiceBus(_Pretending):
    async def make_broker(self) -> MemoryBroker:
        return PretendingBroker("servicebus", clock=self.clock)


class TestWithoutIdentity(_Pretending):
    async def make_broker(self) -> MemoryBroker:
        return PretendingBroker(clock=self.clock, identity=Identity.NONE, release=False, chunk=10)


class TestMemoryByFakeClock(_Memory):
    delay_s = 60.0

    def setup_method(self) -> None:
        self.clock = FakeClock()


class TestMemoryByRealClock(_Memory):
    delay_s = 0.2
