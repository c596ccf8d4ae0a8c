"""The suite of deliveries: the same for every queue of replies.

    from tests.suites.delivery_suite import DeliveryDeskConformance

    class TestMyDeliveries(DeliveryDeskConformance):
        async def make_store(self) -> MyStore: ...      # as for StoreConformance; of one database
        async def let_die(self, store, worker): ...

        def make_deliveries(self, store: MyStore) -> Deliveries:
            return MyDeliveries(store)

        @asynccontextmanager
        async def open_desk(self, store: MyStore) -> AsyncIterator[Desk]:
            yield Desk(MyOperations(store, by="suite"), MyRecords(store))

It speaks to the ports of `core.outbound`, `core.records` and `core.store`
alone. `make_store` is called more than once in a test: the second is another process's, as far as
it can tell. A queue without a desk passes `DeliveriesConformance`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from tests.suites.checks import delivery_desk as desk
from tests.suites.checks import delivery_gates as gates
from tests.suites.checks import delivery_limits as limits
from tests.suites.checks import delivery_merging as merging
from tests.suites.checks import store_deliveries as checks
from tests.suites.checks.delivery_desk import Desk
from tests.suites.delivery_harness import (
    DeliveryCheck,
    DeliveryHarness,
    DeliveryTrial,
    run_delivery_check,
)
from tests.suites.store_harness import Store

DeskCheck = Callable[[DeliveryTrial, Desk], Awaitable[None]]


class DeliveriesConformance(DeliveryHarness):
    """Subclass it under a name that begins with `Test`; define the methods of its harness."""

    async def check(self, check: DeliveryCheck) -> None:
        """Run one check; a subclass may wrap it."""
        await run_delivery_check(self, check)

    async def test_a_conversation_goes_one_by_one(self) -> None:
        await self.check(checks.a_conversation_goes_one_by_one)

    async def test_conversations_go_side_by_side(self) -> None:
        await self.check(checks.conversations_go_side_by_side)

    async def test_what_is_taken_says_when_it_was_made(self) -> None:
        await self.check(checks.what_is_taken_says_when_it_was_made)

    async def test_the_urgent_go_first(self) -> None:
        await self.check(checks.the_urgent_go_first)

    async def test_a_limit_leaves_the_rest(self) -> None:
        await self.check(checks.a_limit_leaves_the_rest)

    async def test_channels_take_turns(self) -> None:
        await self.check(checks.channels_take_turns)

    async def test_a_retry_waits_and_holds_its_conversation(self) -> None:
        await self.check(checks.a_retry_waits_and_holds_its_conversation)

    async def test_every_end_lets_the_next_go(self) -> None:
        await self.check(checks.every_end_lets_the_next_go)

    async def test_parts_arrive_one_after_the_other(self) -> None:
        await self.check(checks.parts_arrive_one_after_the_other)

    async def test_doubt_ends_when_the_part_arrived(self) -> None:
        await self.check(checks.doubt_ends_when_the_part_arrived)

    async def test_what_expired_is_not_sent(self) -> None:
        await self.check(checks.what_expired_is_not_sent)

    async def test_a_channel_is_told_how_urgent_it_is_and_until_when(self) -> None:
        await self.check(checks.a_channel_is_told_how_urgent_it_is_and_until_when)

    async def test_the_dead_lose_what_they_were_sending(self) -> None:
        await self.check(checks.the_dead_lose_what_they_were_sending)

    async def test_one_that_is_leaving_ends_what_it_was_sending(self) -> None:
        await self.check(checks.one_that_is_leaving_ends_what_it_was_sending)

    async def test_who_left_or_died_takes_nothing(self) -> None:
        await self.check(checks.who_left_or_died_takes_nothing)

    async def test_a_reply_is_put_once(self) -> None:
        await self.check(checks.a_reply_is_put_once)

    async def test_replies_come_as_they_are(self) -> None:
        await self.check(checks.replies_come_as_they_are)

    async def test_a_second_process_sends(self) -> None:
        await self.check(checks.a_second_process_sends)

    async def test_a_reply_is_told_when_it_is_made(self) -> None:
        await self.check(checks.a_reply_is_told_when_it_is_made)

    async def test_only_a_success_sends_its_replies(self) -> None:
        await self.check(checks.only_a_success_sends_its_replies)

    async def test_what_no_run_made_is_told_when_it_is_first_taken(self) -> None:
        await self.check(checks.what_no_run_made_is_told_when_it_is_first_taken)

    async def test_bells_ring_for_what_is_due(self) -> None:
        await self.check(checks.bells_ring_for_what_is_due)

    async def test_two_takers_share_the_work(self) -> None:
        await self.check(checks.two_takers_share_the_work)

    async def test_a_place_at_its_limit_lets_others_go(self) -> None:
        await self.check(limits.a_place_at_its_limit_lets_others_go)

    async def test_a_channel_at_its_limit_stops(self) -> None:
        await self.check(limits.a_channel_at_its_limit_stops)

    async def test_an_early_answer_frees_its_place(self) -> None:
        await self.check(limits.an_early_answer_frees_its_place)

    async def test_told_to_wait_blocks_the_place(self) -> None:
        await self.check(limits.told_to_wait_blocks_the_place)

    async def test_told_to_wait_blocks_the_channel(self) -> None:
        await self.check(limits.told_to_wait_blocks_the_channel)

    async def test_an_answer_frees_a_place_that_was_down(self) -> None:
        await self.check(limits.an_answer_frees_a_place_that_was_down)

    async def test_what_was_put_off_goes_when_its_place_is_back(self) -> None:
        await self.check(gates.what_was_put_off_goes_when_its_place_is_back)

    async def test_a_place_that_is_down_again_is_not_back(self) -> None:
        await self.check(gates.a_place_that_is_down_again_is_not_back)

    async def test_a_place_that_is_back_keeps_its_limits(self) -> None:
        await self.check(gates.a_place_that_is_back_keeps_its_limits)

    async def test_a_great_many_go_when_their_place_is_back(self) -> None:
        await self.check(gates.a_great_many_go_when_their_place_is_back)

    async def test_a_dead_senders_call_counts_no_longer(self) -> None:
        await self.check(limits.a_dead_senders_call_counts_no_longer)

    async def test_limits_hold_and_are_used(self) -> None:
        await self.check(limits.limits_hold_and_are_used)

    async def test_a_long_line_costs_no_more(self) -> None:
        await self.check(limits.a_long_line_costs_no_more)

    async def test_those_behind_follow(self) -> None:
        await self.check(merging.those_behind_follow)

    async def test_the_first_that_cannot_is_the_last_that_is_looked_at(self) -> None:
        await self.check(merging.the_first_that_cannot_is_the_last_that_is_looked_at)

    async def test_only_its_sender_is_followed(self) -> None:
        await self.check(merging.only_its_sender_is_followed)

    async def test_what_failed_together_goes_alone(self) -> None:
        await self.check(merging.what_failed_together_goes_alone)

    async def test_the_dead_leave_all_of_them_in_doubt(self) -> None:
        await self.check(merging.the_dead_leave_all_of_them_in_doubt)

    async def test_one_call_counts_once(self) -> None:
        await self.check(merging.one_call_counts_once)


class DeliveryDeskConformance(DeliveriesConformance):
    """The same queue with its desk. Define `open_desk`, too."""

    def open_desk(self, store: Store) -> AbstractAsyncContextManager[Desk]:
        """Where operators sit, by the name of `suite`, for an open store."""
        raise NotImplementedError("a suite of a desk must define open_desk()")

    async def check_desk(self, check: DeskCheck) -> None:
        async def with_desk(trial: DeliveryTrial) -> None:
            async with self.open_desk(trial.store) as found:
                await check(trial, found)

        await self.check(with_desk)

    async def test_replies_are_found(self) -> None:
        await self.check_desk(desk.replies_are_found)

    async def test_a_retry_begins_anew(self) -> None:
        await self.check_desk(desk.a_retry_begins_anew)

    async def test_what_is_unknown_waits_for_a_person(self) -> None:
        await self.check_desk(desk.what_is_unknown_waits_for_a_person)

    async def test_a_person_agrees_to_one_repeat(self) -> None:
        await self.check_desk(desk.a_person_agrees_to_one_repeat)

    async def test_repeats_are_counted_when_they_may_have_gone_out(self) -> None:
        await self.check_desk(desk.repeats_are_counted_when_they_may_have_gone_out)

    async def test_a_repeat_is_counted_though_its_sender_died(self) -> None:
        await self.check_desk(desk.a_repeat_is_counted_though_its_sender_died)

    async def test_texts_are_edited(self) -> None:
        await self.check_desk(desk.texts_are_edited)

    async def test_what_is_discarded_lets_the_next_go(self) -> None:
        await self.check_desk(desk.what_is_discarded_lets_the_next_go)

    async def test_a_paused_channel_waits(self) -> None:
        await self.check_desk(desk.a_paused_channel_waits)

    async def test_acts_are_told_with_who_did_it(self) -> None:
        await self.check_desk(desk.acts_are_told_with_who_did_it)
