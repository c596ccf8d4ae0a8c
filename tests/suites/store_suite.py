"""The store suite: one class, the same for every store.

    from tests.suites.store_suite import StoreConformance

    class TestMyStore(StoreConformance):
        async def make_store(self) -> MyStore:
            return MyStore("my://localhost/empty", clock=self.clock)    # not yet open

        async def let_die(self, store: MyStore, worker: Worker) -> None:
            await store.drop_the_sign_of_life_of(worker)

pytest with pytest-asyncio runs it (`asyncio_mode = auto`, or mark the class). It speaks to the
ports of `ackbone.core.store` alone: claim and finish and their verdicts, keys, lanes, reaping,
adoption, effects, roles and the fence of ordered sources. Time is a `FakeClock` that it moves.
"""

from __future__ import annotations

from tests.suites.checks import (
    store_claims,
    store_finish,
    store_fleet,
    store_parts,
    store_waiting,
    store_workers,
)
from tests.suites.store_harness import StoreCheck, StoreHarness, run_store_check


class StoreConformance(StoreHarness):
    """Subclass it under a name that begins with `Test`; define `make_store` and `let_die`."""

    async def check(self, check: StoreCheck) -> None:
        """Run one check; a subclass may wrap it."""
        await run_store_check(self, check)

    async def test_new_messages_run(self) -> None:
        await self.check(store_claims.new_messages_run)

    async def test_verdicts_stand_in_order(self) -> None:
        await self.check(store_claims.verdicts_stand_in_order)

    async def test_two_copies_in_one_batch(self) -> None:
        await self.check(store_claims.two_copies_in_one_batch)

    async def test_a_copy_of_what_runs_elsewhere(self) -> None:
        await self.check(store_claims.a_copy_of_what_runs_elsewhere)

    async def test_what_is_final_stays_final(self) -> None:
        await self.check(store_claims.what_is_final_stays_final)

    async def test_one_id_two_payloads(self) -> None:
        await self.check(store_claims.one_id_two_payloads)

    async def test_one_id_two_types(self) -> None:
        await self.check(store_claims.one_id_two_types)

    async def test_one_id_two_messages_while_nobody_runs_it(self) -> None:
        await self.check(store_claims.one_id_two_messages_while_nobody_runs_it)

    async def test_a_copy_after_the_default_type_was_changed(self) -> None:
        await self.check(store_claims.a_copy_after_the_default_type_was_changed)

    async def test_undecodable(self) -> None:
        await self.check(store_claims.undecodable)

    async def test_given_up_by_the_broker(self) -> None:
        await self.check(store_claims.given_up_by_the_broker)

    async def test_identity_has_three_parts(self) -> None:
        await self.check(store_claims.identity_has_three_parts)

    async def test_time_to_live(self) -> None:
        await self.check(store_claims.time_to_live)

    async def test_time_to_live_of_what_comes_again(self) -> None:
        await self.check(store_claims.time_to_live_of_what_comes_again)

    async def test_what_crashed_two_workers_does_not_run_among_others(self) -> None:
        await self.check(store_claims.what_crashed_two_workers_does_not_run_among_others)

    async def test_the_urgent_run_first_then_those_that_wait_longest(self) -> None:
        await self.check(store_claims.the_urgent_run_first_then_those_that_wait_longest)

    async def test_adoption(self) -> None:
        await self.check(store_claims.adoption)

    async def test_a_repeat_is_already(self) -> None:
        await self.check(store_finish.a_repeat_is_already)

    async def test_a_run_that_ends_twice_in_one_batch_ends_once(self) -> None:
        await self.check(store_finish.a_run_that_ends_twice_in_one_batch_ends_once)

    async def test_an_old_and_a_new_claim_in_one_batch(self) -> None:
        await self.check(store_finish.an_old_and_a_new_claim_in_one_batch)

    async def test_the_first_outcome_stands(self) -> None:
        await self.check(store_finish.the_first_outcome_stands)

    async def test_a_late_result_is_fenced(self) -> None:
        await self.check(store_finish.a_late_result_is_fenced)

    async def test_an_old_claim_of_the_same_worker_is_fenced(self) -> None:
        await self.check(store_finish.an_old_claim_of_the_same_worker_is_fenced)

    async def test_an_old_claim_of_what_stayed_where_it_was_is_fenced(self) -> None:
        await self.check(store_finish.an_old_claim_of_what_stayed_where_it_was_is_fenced)

    async def test_one_fenced_item_harms_no_other(self) -> None:
        await self.check(store_finish.one_fenced_item_harms_no_other)

    async def test_one_unstorable_item_harms_no_other(self) -> None:
        await self.check(store_finish.one_unstorable_item_harms_no_other)

    async def test_a_repeat_of_what_was_buried_is_buried(self) -> None:
        await self.check(store_finish.a_repeat_of_what_was_buried_is_buried)

    async def test_a_retry_waits_in_the_store(self) -> None:
        await self.check(store_finish.a_retry_waits_in_the_store)

    async def test_a_crash_spends_no_retry(self) -> None:
        await self.check(store_finish.a_crash_spends_no_retry)

    async def test_every_end_is_an_end(self) -> None:
        await self.check(store_finish.every_end_is_an_end)

    async def test_parked_until_resumed(self) -> None:
        await self.check(store_finish.parked_until_resumed)

    async def test_handed_back_unspent(self) -> None:
        await self.check(store_finish.handed_back_unspent)

    async def test_a_key_has_one_run_at_a_time(self) -> None:
        await self.check(store_waiting.a_key_has_one_run_at_a_time)

    async def test_twins_in_one_batch(self) -> None:
        await self.check(store_waiting.twins_in_one_batch)

    async def test_a_failure_frees_its_key(self) -> None:
        await self.check(store_waiting.a_failure_frees_its_key)

    async def test_a_retry_keeps_its_key(self) -> None:
        await self.check(store_waiting.a_retry_keeps_its_key)

    async def test_a_parked_message_keeps_its_key(self) -> None:
        await self.check(store_waiting.a_parked_message_keeps_its_key)

    async def test_one_that_is_over_frees_no_key_of_another(self) -> None:
        await self.check(store_waiting.one_that_is_over_frees_no_key_of_another)

    async def test_keys_are_of_one_tenant_and_subscription(self) -> None:
        await self.check(store_waiting.keys_are_of_one_tenant_and_subscription)

    async def test_a_key_elsewhere_ends_nobody_who_waits(self) -> None:
        await self.check(store_waiting.a_key_elsewhere_ends_nobody_who_waits)

    async def test_a_key_is_free_after_its_window(self) -> None:
        await self.check(store_waiting.a_key_is_free_after_its_window)

    async def test_a_key_belongs_to_the_one_that_took_it_over(self) -> None:
        await self.check(store_waiting.a_key_belongs_to_the_one_that_took_it_over)

    async def test_a_dead_workers_key_goes_with_its_message(self) -> None:
        await self.check(store_waiting.a_dead_workers_key_goes_with_its_message)

    async def test_a_lane_runs_in_order(self) -> None:
        await self.check(store_waiting.a_lane_runs_in_order)

    async def test_a_retry_holds_its_lane(self) -> None:
        await self.check(store_waiting.a_retry_holds_its_lane)

    async def test_a_parked_message_holds_its_lane_or_not(self) -> None:
        await self.check(store_waiting.a_parked_message_holds_its_lane_or_not)

    async def test_ends_at_the_claim_let_a_lane_go(self) -> None:
        await self.check(store_waiting.ends_at_the_claim_let_a_lane_go)

    async def test_a_duplicate_that_waited_lets_its_lane_go(self) -> None:
        await self.check(store_waiting.a_duplicate_that_waited_lets_its_lane_go)

    async def test_lanes_are_of_one_tenant_and_subscription(self) -> None:
        await self.check(store_waiting.lanes_are_of_one_tenant_and_subscription)

    async def test_copies_of_what_is_in_a_lane(self) -> None:
        await self.check(store_waiting.copies_of_what_is_in_a_lane)

    async def test_a_copy_of_what_is_over_heads_no_lane(self) -> None:
        await self.check(store_waiting.a_copy_of_what_is_over_heads_no_lane)

    async def test_what_came_before_there_were_lanes(self) -> None:
        await self.check(store_waiting.what_came_before_there_were_lanes)

    async def test_a_dead_workers_lane_starts_again_at_its_head(self) -> None:
        await self.check(store_waiting.a_dead_workers_lane_starts_again_at_its_head)

    async def test_an_ordered_source_has_one_fetcher(self) -> None:
        await self.check(store_waiting.an_ordered_source_has_one_fetcher)

    async def test_a_part_that_moved_is_closed_to_its_last_owner(self) -> None:
        await self.check(store_parts.a_part_that_moved_is_closed_to_its_last_owner)

    async def test_a_part_comes_back_without_a_lease(self) -> None:
        await self.check(store_parts.a_part_comes_back_without_a_lease)

    async def test_parts_of_one_batch_have_different_owners(self) -> None:
        await self.check(store_parts.parts_of_one_batch_have_different_owners)

    async def test_parts_change_owners_while_batches_are_written(self) -> None:
        await self.check(store_parts.parts_change_owners_while_batches_are_written)

    async def test_a_part_is_opened_by_a_message_without_a_key(self) -> None:
        await self.check(store_parts.a_part_is_opened_by_a_message_without_a_key)

    async def test_a_late_opening_passes_over_nothing(self) -> None:
        await self.check(store_parts.a_late_opening_passes_over_nothing)

    async def test_a_worker_that_registers_again_opens_its_parts_again(self) -> None:
        await self.check(store_parts.a_worker_that_registers_again_opens_its_parts_again)

    async def test_a_copy_of_a_failed_message_says_why_it_failed(self) -> None:
        await self.check(store_parts.a_copy_of_a_failed_message_says_why_it_failed)

    async def test_a_retry_is_due_as_before_when_the_clock_is_set(self) -> None:
        await self.check(store_waiting.a_retry_is_due_as_before_when_the_clock_is_set)

    async def test_what_is_written_after_a_jump_is_not_moved(self) -> None:
        await self.check(store_waiting.what_is_written_after_a_jump_is_not_moved)

    async def test_nothing_expires_at_a_jump(self) -> None:
        await self.check(store_waiting.nothing_expires_at_a_jump)

    async def test_a_key_moves_with_the_clock(self) -> None:
        await self.check(store_waiting.a_key_moves_with_the_clock)

    async def test_a_time_to_live_by_the_brokers_clock(self) -> None:
        await self.check(store_waiting.a_time_to_live_by_the_brokers_clock)

    async def test_numbers_are_given_out_once(self) -> None:
        await self.check(store_workers.numbers_are_given_out_once)

    async def test_the_living_are_not_reaped(self) -> None:
        await self.check(store_workers.the_living_are_not_reaped)

    async def test_the_dead_are_reaped_once(self) -> None:
        await self.check(store_workers.the_dead_are_reaped_once)

    async def test_names_of_workers_that_ended(self) -> None:
        await self.check(store_workers.names_of_workers_that_ended)

    async def test_one_that_stands_still_is_dead_after_its_lease(self) -> None:
        await self.check(store_workers.one_that_stands_still_is_dead_after_its_lease)

    async def test_the_clock_kills_nobody(self) -> None:
        await self.check(store_workers.the_clock_kills_nobody)

    async def test_a_crash_budget_ends_a_message(self) -> None:
        await self.check(store_workers.a_crash_budget_ends_a_message)

    async def test_a_crash_stays_in_the_history(self) -> None:
        await self.check(store_workers.a_crash_stays_in_the_history)

    async def test_an_explained_crash_alone_ends_a_message(self) -> None:
        await self.check(store_workers.an_explained_crash_alone_ends_a_message)

    async def test_a_spent_crash_budget_lets_others_go(self) -> None:
        await self.check(store_workers.a_spent_crash_budget_lets_others_go)

    async def test_a_child_is_judged_by_its_parent(self) -> None:
        await self.check(store_workers.a_child_is_judged_by_its_parent)

    async def test_a_child_without_its_parent_counts_for_nobody(self) -> None:
        await self.check(store_workers.a_child_without_its_parent_counts_for_nobody)

    async def test_a_death_that_a_sibling_outlived_counts(self) -> None:
        await self.check(store_workers.a_death_that_a_sibling_outlived_counts)

    async def test_a_death_that_another_supervisors_worker_outlived_counts(self) -> None:
        await self.check(store_workers.a_death_that_another_supervisors_worker_outlived_counts)

    async def test_a_death_that_nothing_outlived_counts_for_nobody(self) -> None:
        await self.check(store_workers.a_death_that_nothing_outlived_counts_for_nobody)

    async def test_an_announced_stop_counts_for_nobody(self) -> None:
        await self.check(store_workers.an_announced_stop_counts_for_nobody)

    async def test_leaving_hands_back(self) -> None:
        await self.check(store_workers.leaving_hands_back)

    async def test_bells_ring_for_what_is_ready(self) -> None:
        await self.check(store_workers.bells_ring_for_what_is_ready)

    async def test_a_role_has_one_holder(self) -> None:
        await self.check(store_workers.a_role_has_one_holder)

    async def test_another_workers_types_are_left_to_it(self) -> None:
        await self.check(store_fleet.another_workers_types_are_left_to_it)

    async def test_a_handler_for_all_types_takes_what_others_leave(self) -> None:
        await self.check(store_fleet.a_handler_for_all_types_takes_what_others_leave)

    async def test_what_nobody_handles_is_parked_once(self) -> None:
        await self.check(store_fleet.what_nobody_handles_is_parked_once)

    async def test_a_handler_that_comes_late_is_announced(self) -> None:
        await self.check(store_fleet.a_handler_that_comes_late_is_announced)

    async def test_the_types_of_a_worker_that_is_gone(self) -> None:
        await self.check(store_fleet.the_types_of_a_worker_that_is_gone)

    async def test_a_worker_that_is_gone_does_not_come_back_with_the_clock(self) -> None:
        await self.check(store_fleet.a_worker_that_is_gone_does_not_come_back_with_the_clock)

    async def test_a_copy_that_comes_back_to_the_wrong_worker(self) -> None:
        await self.check(store_fleet.a_copy_that_comes_back_to_the_wrong_worker)

    async def test_a_conversation_between_two_workers_keeps_its_order(self) -> None:
        await self.check(store_fleet.a_conversation_between_two_workers_keeps_its_order)

    async def test_suspects_run_where_their_handler_is(self) -> None:
        await self.check(store_fleet.suspects_run_where_their_handler_is)

    async def test_who_took_over_from_whom(self) -> None:
        await self.check(store_fleet.who_took_over_from_whom)

    async def test_effects(self) -> None:
        await self.check(store_workers.effects)

    async def test_a_repeated_intent_is_its_own(self) -> None:
        await self.check(store_workers.a_repeated_intent_is_its_own)

    async def test_a_late_result_resumes_its_message(self) -> None:
        await self.check(store_workers.a_late_result_resumes_its_message)

    async def test_effects_outlive_their_attempt(self) -> None:
        await self.check(store_workers.effects_outlive_their_attempt)

    async def test_writes_of_a_run_that_is_over_are_refused(self) -> None:
        await self.check(store_workers.writes_of_a_run_that_is_over_are_refused)

    async def test_heartbeats_are_events(self) -> None:
        await self.check(store_workers.heartbeats_are_events)
