"""The reference passes its own suite, by a clock moved by hand and by the machine's."""

from collections.abc import Sequence

from ackbone.brokers.memory import MemoryBroker
from ackbone.core.broker import Broker
from ackbone.testing import BrokerConformance, FakeClock


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


class TestMemoryByFakeClock(_Memory):
    delay_s = 60.0

    def setup_method(self) -> None:
        self.clock = FakeClock()


class TestMemoryByRealClock(_Memory):
    delay_s = 0.2
