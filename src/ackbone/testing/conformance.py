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

from collections.abc import Awaitable, Callable

from .checks import capabilities, lifecycle, parts, restarts, settling, tasks, transport
from .harness import BrokerHarness, Check, run_check


def _test(check: Check) -> Callable[[BrokerConformance], Awaitable[None]]:
    """Return the test method for a check."""

    async def test(self: BrokerConformance) -> None:
        await self.check(check)

    test.__doc__ = check.__doc__
    return test


class BrokerConformance(BrokerHarness):
    """The suite. Subclass it under a name that begins with `Test`, and define `make_broker`."""

    async def check(self, check: Check) -> None:
        """Run one check. A subclass may wrap it."""
        await run_check(self, check)

    test_round_trip = _test(transport.round_trip)
    test_headers = _test(transport.headers)
    test_binary_body = _test(transport.binary_body)
    test_empty_body = _test(transport.empty_body)
    test_large_body = _test(transport.large_body)
    test_too_large_is_refused_alone = _test(transport.too_large_is_refused_alone)
    test_results_in_order = _test(transport.results_in_order)
    test_empty_batches = _test(transport.empty_batches)
    test_whole_batch = _test(transport.whole_batch)
    test_same_id_twice = _test(transport.same_id_twice)
    test_limit = _test(transport.limit)
    test_queues_do_not_mix = _test(transport.queues_do_not_mix)
    test_many_consumers = _test(transport.many_consumers)
    test_concurrent_publish = _test(transport.concurrent_publish)

    test_wait_is_bounded = _test(lifecycle.wait_is_bounded)
    test_publish_wakes_receive = _test(lifecycle.publish_wakes_receive)
    test_cancelled_receive_loses_nothing = _test(lifecycle.cancelled_receive_loses_nothing)
    test_close_ends_receive = _test(lifecycle.close_ends_receive)
    test_open_and_close_again = _test(lifecycle.open_and_close_again)
    test_closed_broker_never_lies = _test(lifecycle.closed_broker_never_lies)
    test_second_client = _test(lifecycle.second_client)
    test_pause_hands_back = _test(lifecycle.pause_hands_back)
    test_health = _test(lifecycle.health)
    test_stats = _test(lifecycle.stats)

    test_ack_is_final = _test(settling.ack_is_final)
    test_unsettled_comes_back = _test(settling.unsettled_comes_back)
    test_release = _test(settling.release)
    test_release_with_delay = _test(settling.release_with_delay)
    test_reject = _test(settling.reject)
    test_settle_twice = _test(settling.settle_twice)
    test_settle_stale = _test(settling.settle_stale)
    test_settle_foreign = _test(settling.settle_foreign)
    test_mixed_settlements = _test(settling.mixed_settlements)
    test_identity = _test(settling.identity)

    test_delay = _test(capabilities.delay)
    test_priority = _test(capabilities.priority)
    test_ordered = _test(capabilities.ordered)
    test_ttl = _test(capabilities.ttl)
    test_lease = _test(capabilities.lease)
    test_parts_have_one_reader = _test(parts.parts_have_one_reader)
    test_parts_move = _test(parts.parts_move)

    test_once = _test(tasks.once)
    test_notices = _test(tasks.notices)
    test_beside = _test(tasks.beside)
    test_fields = _test(tasks.fields)

    test_restart_keeps_messages = _test(restarts.restart_keeps_messages)
    test_restart_under_load = _test(restarts.restart_under_load)
