"""The governance suite: approvals and quotas, the same for every store.

    from tests.suites.governance_suite import GovernanceConformance

    class TestMyStoresGovernance(GovernanceConformance):
        async def make_store(self) -> MyStore: ...      # as for StoreConformance
        async def let_die(self, store, worker): ...

        @asynccontextmanager
        async def open_office(self, store: MyStore) -> AsyncIterator[Office]:
            yield Office(answers=…, records=…, upkeep=…)

It speaks to the ports of `core.approvals`, `core.quota` and `core.store` alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from tests.suites.checks import store_governance as checks
from tests.suites.checks.store_governance import Office
from tests.suites.store_harness import Store, StoreHarness, StoreTrial

GovernanceCheck = Callable[[StoreTrial, Office], Awaitable[None]]


class GovernanceConformance(StoreHarness):
    """Subclass it under a name that begins with `Test`; define its three methods."""

    def open_office(self, store: Store) -> AbstractAsyncContextManager[Office]:
        """Where people answer, for an open store."""
        raise NotImplementedError("a governance suite must define open_office()")

    async def check(self, check: GovernanceCheck) -> None:
        """Run one check on a fresh store and clean up behind it."""
        store = await self.make_store()
        await store.open()
        store.governed = True
        try:
            async with self.open_office(store) as office:
                await check(StoreTrial(self, store), office)
        finally:
            await store.close()

    async def test_a_question_is_put_once(self) -> None:
        await self.check(checks.a_question_is_put_once)

    async def test_a_fenced_run_asks_nobody(self) -> None:
        await self.check(checks.a_fenced_run_asks_nobody)

    async def test_a_yes_lets_it_run_with_its_answer(self) -> None:
        await self.check(checks.a_yes_lets_it_run_with_its_answer)

    async def test_a_no_ends_it(self) -> None:
        await self.check(checks.a_no_ends_it)

    async def test_the_first_answer_wins(self) -> None:
        await self.check(checks.the_first_answer_wins)

    async def test_four_eyes(self) -> None:
        await self.check(checks.four_eyes)

    async def test_silence_is_a_no(self) -> None:
        await self.check(checks.silence_is_a_no)

    async def test_runs_are_counted_at_the_claim(self) -> None:
        await self.check(checks.runs_are_counted_at_the_claim)

    async def test_use_is_counted_at_the_end(self) -> None:
        await self.check(checks.use_is_counted_at_the_end)

    async def test_what_did_not_run_is_given_back(self) -> None:
        await self.check(checks.what_did_not_run_is_given_back)

    async def test_waiting_spends_nothing(self) -> None:
        await self.check(checks.waiting_spends_nothing)

    async def test_what_waits_for_a_quota_expires_in_time(self) -> None:
        await self.check(checks.what_waits_for_a_quota_expires_in_time)

    async def test_a_backlog_is_spread(self) -> None:
        await self.check(checks.a_backlog_is_spread)

    async def test_nobody_waits_for_a_window_of_the_old_clock(self) -> None:
        await self.check(checks.nobody_waits_for_a_window_of_the_old_clock)

    async def test_changed_quotas_are_looked_at_again(self) -> None:
        await self.check(checks.changed_quotas_are_looked_at_again)
