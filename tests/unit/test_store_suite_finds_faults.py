"""The store suite can fail: each planted fault is found, and the healthy store has none."""

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ackbone.core.broker import Subscription
from ackbone.core.errors import LeaseLost
from ackbone.core.store import (
    Answer,
    Candidate,
    Commit,
    EffectState,
    Finished,
    Offers,
    Reclaimed,
    Run,
    Verdict,
    Worker,
)
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore
from tests.suites.checks import (
    store_claims,
    store_finish,
    store_parts,
    store_waiting,
    store_workers,
)
from tests.suites.store_harness import Store, StoreCheck, StoreHarness, run_store_check


class SaysYesToEverything(SqliteStore):
    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        await super().finish(batch, worker=worker)
        return [Commit.COMMITTED] * len(batch)


class ForgetsWhatItCommitted(SqliteStore):
    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        commits = await super().finish(batch, worker=worker)
        return [Commit.FENCED if c is Commit.ALREADY else c for c in commits]


class SaysNothingOfWhatItBuried(SqliteStore):
    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        commits = await super().finish(batch, worker=worker)
        return [Commit.ALREADY if c is Commit.BURIED else c for c in commits]


class FailsTheWholeBatch(SqliteStore):
    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        commits = await super().finish(batch, worker=worker)
        return [Commit.FENCED] * len(batch) if Commit.FENCED in commits else commits


class IgnoresKeys(SqliteStore):
    async def claim(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker, adopt: bool = False
    ) -> Sequence[Verdict]:
        sub = msgspec.structs.replace(sub, dedup=False)
        return await super().claim(sub, batch, worker=worker, adopt=adopt)


class RunsWhatIsFinal(SqliteStore):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._granted: dict[str, Run] = {}

    async def claim(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker, adopt: bool = False
    ) -> Sequence[Verdict]:
        verdicts = []
        for verdict in await super().claim(sub, batch, worker=worker, adopt=adopt):
            if verdict.run is not None:
                self._granted[verdict.run.message.id] = verdict.run
            if verdict.answer is Answer.FINAL and verdict.delivery is not None:
                run = self._granted.get(verdict.delivery.identity or "")
                verdicts.append(Verdict(answer=Answer.RUN, run=run, delivery=verdict.delivery))
            else:
                verdicts.append(verdict)
        return verdicts


class TurnsVerdictsAround(SqliteStore):
    async def claim(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker, adopt: bool = False
    ) -> Sequence[Verdict]:
        return list(reversed(await super().claim(sub, batch, worker=worker, adopt=adopt)))


class LetsEveryoneFetch(SqliteStore):
    async def adopt_in_order(
        self,
        sub: Subscription,
        batch: Sequence[Candidate],
        *,
        worker: Worker,
        opened: Collection[str] = (),
    ) -> Sequence[Verdict] | None:
        found = await super().adopt_in_order(sub, batch, worker=worker, opened=opened)
        return [] if found is None else found


class EveryoneOwnsEveryPart(SqliteStore):
    opens = True

    async def adopt_in_order(
        self,
        sub: Subscription,
        batch: Sequence[Candidate],
        *,
        worker: Worker,
        opened: Collection[str] = (),
    ) -> Sequence[Verdict] | None:
        parts = {c.delivery.part for c in batch if c.delivery.part} if self.opens else set[str]()
        return await super().adopt_in_order(sub, batch, worker=worker, opened=parts)


class NeverGivesAPart(EveryoneOwnsEveryPart):
    opens = False


class AdoptsTheLastFirst(SqliteStore):
    async def adopt_in_order(
        self,
        sub: Subscription,
        batch: Sequence[Candidate],
        *,
        worker: Worker,
        opened: Collection[str] = (),
    ) -> Sequence[Verdict] | None:
        found = await super().adopt_in_order(sub, batch[::-1], worker=worker, opened=opened)
        return None if found is None else found[::-1]


class RefusesTheBatchForOnePart(SqliteStore):
    async def adopt_in_order(
        self,
        sub: Subscription,
        batch: Sequence[Candidate],
        *,
        worker: Worker,
        opened: Collection[str] = (),
    ) -> Sequence[Verdict] | None:
        found = await super().adopt_in_order(sub, batch, worker=worker, opened=opened)
        if any(verdict.answer is Answer.LEAVE for verdict in found or ()):
            return [Verdict(answer=Answer.LEAVE, delivery=c.delivery) for c in batch]
        return found


class ForgetsFailures(SqliteStore):
    async def claim(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker, adopt: bool = False
    ) -> Sequence[Verdict]:
        found = await super().claim(sub, batch, worker=worker, adopt=adopt)
        return [msgspec.structs.replace(verdict, failure=None) for verdict in found]


class NeverReaps(SqliteStore):
    async def reap(self, **options: Any) -> Reclaimed:
        return Reclaimed()


class EndsEveryName(SqliteStore):
    async def ended(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(names)


class ReapsTheLiving(SqliteStore):
    async def reap(self, **options: Any) -> Reclaimed:
        return await super().reap(**{**options, "lease_s": -1.0})


class CountsEveryDeath(SqliteStore):
    async def register(
        self, name: str, offers: Offers | None = None, *, parent: str | None = None
    ) -> Worker:
        return await super().register(name, offers)


class IgnoresExitCodes(SqliteStore):
    async def reap(self, **options: Any) -> Reclaimed:
        ended = dict.fromkeys(options.get("ended") or {}, -9)
        return await super().reap(**{**options, "ended": ended})


class ForgetsEffects(SqliteStore):
    async def effect_begin(
        self, run: Run, name: str, *, again: bool = False
    ) -> tuple[EffectState, bytes | None]:
        await super().effect_begin(run, name, again=again)
        return EffectState.NEW, None


class HasNoFence(SqliteStore):
    async def heartbeat(self, run: Run, data: Any) -> None:
        try:
            await super().heartbeat(run, data)
        except LeaseLost:
            return


class SharesRoles(SqliteStore):
    async def hold_role(self, role: str, *, worker: Worker) -> bool:
        await super().hold_role(role, worker=worker)
        return True


class KeepsWhatItHeldOnLeaving(SqliteStore):
    async def leave(self, worker: Worker, *, running: bool = False) -> None:
        def op(conn: Any) -> None:
            conn.execute(
                "UPDATE workers SET state = 'left' WHERE worker_id = ?", (worker.worker_id,)
            )

        await self.file.write(op)


FAULTS: list[tuple[type[SqliteStore], StoreCheck]] = [
    (SaysYesToEverything, store_finish.a_late_result_is_fenced),
    (SaysYesToEverything, store_finish.an_old_claim_of_the_same_worker_is_fenced),
    (ForgetsWhatItCommitted, store_finish.a_repeat_is_already),
    (SaysNothingOfWhatItBuried, store_finish.one_unstorable_item_harms_no_other),
    (SaysNothingOfWhatItBuried, store_finish.a_repeat_of_what_was_buried_is_buried),
    (FailsTheWholeBatch, store_finish.one_fenced_item_harms_no_other),
    (IgnoresKeys, store_waiting.a_key_has_one_run_at_a_time),
    (IgnoresKeys, store_waiting.twins_in_one_batch),
    (RunsWhatIsFinal, store_claims.what_is_final_stays_final),
    (TurnsVerdictsAround, store_claims.verdicts_stand_in_order),
    (TurnsVerdictsAround, store_claims.new_messages_run),
    (LetsEveryoneFetch, store_waiting.an_ordered_source_has_one_fetcher),
    (EveryoneOwnsEveryPart, store_parts.a_part_that_moved_is_closed_to_its_last_owner),
    (EveryoneOwnsEveryPart, store_parts.a_worker_that_registers_again_opens_its_parts_again),
    (EveryoneOwnsEveryPart, store_parts.a_late_opening_passes_over_nothing),
    (NeverGivesAPart, store_parts.a_part_comes_back_without_a_lease),
    (NeverGivesAPart, store_parts.a_part_is_opened_by_a_message_without_a_key),
    (AdoptsTheLastFirst, store_parts.parts_change_owners_while_batches_are_written),
    (RefusesTheBatchForOnePart, store_parts.parts_of_one_batch_have_different_owners),
    (ForgetsFailures, store_parts.a_copy_of_a_failed_message_says_why_it_failed),
    (NeverReaps, store_workers.the_dead_are_reaped_once),
    (NeverReaps, store_finish.a_late_result_is_fenced),
    (EndsEveryName, store_workers.names_of_workers_that_ended),
    (NeverReaps, store_workers.names_of_workers_that_ended),
    (ReapsTheLiving, store_workers.the_living_are_not_reaped),
    (CountsEveryDeath, store_workers.a_death_that_nothing_outlived_counts_for_nobody),
    (CountsEveryDeath, store_workers.a_child_without_its_parent_counts_for_nobody),
    (IgnoresExitCodes, store_workers.an_explained_crash_alone_ends_a_message),
    (ForgetsEffects, store_workers.effects),
    (ForgetsEffects, store_workers.effects_outlive_their_attempt),
    (HasNoFence, store_workers.writes_of_a_run_that_is_over_are_refused),
    (SharesRoles, store_workers.a_role_has_one_holder),
    (KeepsWhatItHeldOnLeaving, store_workers.leaving_hands_back),
]


class _Harness(StoreHarness):
    def __init__(self, kind: type[SqliteStore], path: Path) -> None:
        self._kind = kind
        self._path = path
        self.setup_method()

    async def make_store(self) -> Store:
        return self._kind(self._path, clock=self.clock)

    async def let_die(self, store: Store, worker: Worker) -> None:
        assert isinstance(store, SqliteStore)
        store._leases.release(worker.worker_id)

    def forget_all(self, store: Store) -> None:
        assert isinstance(store, SqliteStore)
        store._leases._seen.clear()


def _id(value: Any) -> str:
    return str(value.__name__)


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=_id)
async def test_a_planted_fault_is_found(fault: type[SqliteStore], check: StoreCheck) -> None:
    for kind in (SqliteStore, fault):
        with tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp") as folder:
            path = Path(folder) / "store.db"
            ensure_schema(path)
            if kind is SqliteStore:
                await run_store_check(_Harness(kind, path), check)
            else:
                with pytest.raises(AssertionError):
                    await run_store_check(_Harness(kind, path), check)
