"""The broker conformance suite: one class, the same for every broker.

    from ackbone.testing import BrokerConformance

    class TestMyBroker(BrokerConformance):
        async def make_broker(self) -> MyBroker:
            return MyBroker("my://localhost")              # a real server; not yet open

        async def second_client(self, first: MyBroker) -> MyBroker:
            return MyBroker("my://localhost")              # as a second process would

        async def restart(self, broker: MyBroker) -> None:
            await my_server.stop()
            await my_server.start()

pytest with pytest-asyncio runs it (`asyncio_mode = auto`, or mark the class). The settings are
those of `BrokerHarness`. Every flag of the broker's `Capabilities` is checked both ways: a claimed
feature must work, and one that is not claimed must be refused or have no effect. The checks are
plain functions in `ackbone.testing.checks`. `run_check(harness, check)` runs one without pytest.
"""

from __future__ import annotations

from .checks import capabilities, lifecycle, restarts, settling, transport
from .harness import BrokerHarness, Check, run_check


class BrokerConformance(BrokerHarness):
    """The suite. Subclass it under a name that begins with `Test`, and define `make_broker`."""

    async def check(self, check: Check) -> None:
        """Run one check. A subclass may wrap it."""
        await run_check(self, check)

    async def test_round_trip(self) -> None:
        await self.check(transport.round_trip)

    async def test_headers(self) -> None:
        await self.check(transport.headers)

    async def test_binary_body(self) -> None:
        await self.check(transport.binary_body)

    async def test_empty_body(self) -> None:
        await self.check(transport.empty_body)

    async def test_large_body(self) -> None:
        await self.check(transport.large_body)

    async def test_too_large_is_refused_alone(self) -> None:
        await self.check(transport.too_large_is_refused_alone)

    async def test_results_in_order(self) -> None:
        await self.check(transport.results_in_order)

    async def test_empty_batches(self) -> None:
        await self.check(transport.empty_batches)

    async def test_whole_batch(self) -> None:
        await self.check(transport.whole_batch)

    async def test_same_id_twice(self) -> None:
        await self.check(transport.same_id_twice)

    async def test_limit(self) -> None:
        await self.check(transport.limit)

    async def test_queues_do_not_mix(self) -> None:
        await self.check(transport.queues_do_not_mix)

    async def test_many_consumers(self) -> None:
        await self.check(transport.many_consumers)

    async def test_concurrent_publish(self) -> None:
        await self.check(transport.concurrent_publish)

    async def test_wait_is_bounded(self) -> None:
        await self.check(lifecycle.wait_is_bounded)

    async def test_publish_wakes_receive(self) -> None:
        await self.check(lifecycle.publish_wakes_receive)

    async def test_cancelled_receive_loses_nothing(self) -> None:
        await self.check(lifecycle.cancelled_receive_loses_nothing)

    async def test_close_ends_receive(self) -> None:
        await self.check(lifecycle.close_ends_receive)

    async def test_open_and_close_again(self) -> None:
        await self.check(lifecycle.open_and_close_again)

    async def test_closed_broker_never_lies(self) -> None:
        await self.check(lifecycle.closed_broker_never_lies)

    async def test_second_client(self) -> None:
        await self.check(lifecycle.second_client)

    async def test_pause_hands_back(self) -> None:
        await self.check(lifecycle.pause_hands_back)

    async def test_health(self) -> None:
        await self.check(lifecycle.health)

    async def test_stats(self) -> None:
        await self.check(lifecycle.stats)

    async def test_ack_is_final(self) -> None:
        await self.check(settling.ack_is_final)

    async def test_unsettled_comes_back(self) -> None:
        await self.check(settling.unsettled_comes_back)

    async def test_release(self) -> None:
        await self.check(settling.release)

    async def test_release_with_delay(self) -> None:
        await self.check(settling.release_with_delay)

    async def test_reject(self) -> None:
        await self.check(settling.reject)

    async def test_settle_twice(self) -> None:
        await self.check(settling.settle_twice)

    async def test_settle_stale(self) -> None:
        await self.check(settling.settle_stale)

    async def test_settle_foreign(self) -> None:
        await self.check(settling.settle_foreign)

    async def test_mixed_settlements(self) -> None:
        await self.check(settling.mixed_settlements)

    async def test_identity(self) -> None:
        await self.check(settling.identity)

    async def test_delay(self) -> None:
        await self.check(capabilities.delay)

    async def test_priority(self) -> None:
        await self.check(capabilities.priority)

    async def test_ordered(self) -> None:
        await self.check(capabilities.ordered)

    async def test_ttl(self) -> None:
        await self.check(capabilities.ttl)

    async def test_lease(self) -> None:
        await self.check(capabilities.lease)

    async def test_once(self) -> None:
        await self.check(capabilities.once)

    async def test_restart_keeps_messages(self) -> None:
        await self.check(restarts.restart_keeps_messages)

    async def test_restart_under_load(self) -> None:
        await self.check(restarts.restart_under_load)
