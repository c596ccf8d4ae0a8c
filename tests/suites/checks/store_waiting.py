"""Store checks: what waits for a key or for its turn."""

from __future__ import annotations

import msgspec

from ackbone.core.events import DUPLICATE, EXPIRED
from ackbone.core.outcome import NO_HANDLER, Dead, Done, Park, ParkKind, Released, Retry
from ackbone.core.store import Answer, Run, Worker
from ackbone.testing.harness import expect
from tests.suites.store_harness import StoreTrial, answers, expect_answers


async def a_key_has_one_run_at_a_time(trial: StoreTrial) -> None:
    first, second = await trial.worker(), await trial.worker()
    run = await trial.run(first, "a", idempotency_key="k")
    expect_answers(
        await trial.claim(second, trial.candidate("b", idempotency_key="k")), Answer.WAITING
    )
    expect(await trial.ready(second) == [], "it waits for the key")
    await trial.committed(first, run, Done(), result=b'"r"')
    expect(trial.finals("b") == [DUPLICATE], f"{trial.finals('b')}")
    expect_answers(
        await trial.claim(second, trial.candidate("c", idempotency_key="k")), Answer.DUPLICATE
    )
    for message_id in "abc":
        expect_answers(
            await trial.claim(second, trial.candidate(message_id, idempotency_key="k")),
            Answer.FINAL,
        )


async def twins_in_one_batch(trial: StoreTrial) -> None:
    worker = await trial.worker()
    twins = [trial.candidate(f"m{n}", idempotency_key=f"k{n % 3}") for n in range(12)]
    got = answers(await trial.claim(worker, *twins))
    expect(got.count(Answer.RUN) == 3, f"one run per key: {got}")
    expect(got.count(Answer.WAITING) == 9, f"the others wait: {got}")


async def a_failure_frees_its_key(trial: StoreTrial) -> None:
    """The next in line runs, and only that one."""
    worker = await trial.worker()
    run = await trial.run(worker, "a", idempotency_key="k")
    await trial.claim(worker, *(trial.candidate(m, idempotency_key="k") for m in "bc"))
    await trial.committed(worker, run, Dead(reason="r"))
    second = await trial.one_ready(worker)
    expect(second.message.id == "b", f"{second.message.id} before b")
    expect((second.attempt, second.failures) == (1, 0), "waiting spends no attempt")
    await trial.committed(worker, second, Done())
    expect(trial.finals("c") == [DUPLICATE], f"{trial.finals('c')}")


async def a_retry_keeps_its_key(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "a", idempotency_key="k")
    await trial.claim(worker, trial.candidate("b", idempotency_key="k"))
    for outcome in (Retry(5.0, "again"), Released(after_s=5.0)):
        await trial.committed(worker, run, outcome)
        expect(await trial.ready(worker) == [], "b took the key of what waits")
        trial.clock.advance(5)
        run = await trial.one_ready(worker)
        expect(run.message.id == "a", f"{run.message.id} before a")
    await trial.committed(worker, run, Done())
    expect(trial.finals("b") == [DUPLICATE], f"{trial.finals('b')}")


async def a_parked_message_keeps_its_key(trial: StoreTrial) -> None:
    """It will go on: were another one with its key to run meanwhile, both would have."""
    worker = await trial.worker()
    run = await trial.run(worker, "a", idempotency_key="k")
    await trial.claim(worker, trial.candidate("b", idempotency_key="k"))
    await trial.committed(worker, run, Park(ParkKind.WORKFLOW_PENDING, f"{NO_HANDLER} 't'"))
    expect(await trial.ready(worker) == [], "b took the key of what is parked")
    await trial.store.resume_parked(
        ParkKind.WORKFLOW_PENDING, ["t"], subscription=trial.sub.name, worker=worker
    )
    run = await trial.one_ready(worker)
    expect(run.message.id == "a", f"{run.message.id} before a")
    await trial.committed(worker, run, Done())
    expect(trial.finals("b") == [DUPLICATE], f"{trial.finals('b')}")


async def one_that_is_over_frees_no_key_of_another(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "a", idempotency_key="k")
    await trial.claim(worker, trial.candidate("late", idempotency_key="k", ttl_s=-1))
    expect(trial.finals("late") == [EXPIRED], f"{trial.finals('late')}")
    expect_answers(
        await trial.claim(worker, trial.candidate("b", idempotency_key="k")), Answer.WAITING
    )
    await trial.committed(worker, run, Done())
    expect(trial.finals("b") == [DUPLICATE], f"{trial.finals('b')}")


async def keys_are_of_one_tenant_and_subscription(trial: StoreTrial) -> None:
    worker = await trial.worker()
    other = msgspec.structs.replace(trial.sub, name="other")
    for sub in (trial.sub, other):
        for tenant in ("a", "b"):
            candidate = trial.candidate(tenant_id=tenant, idempotency_key="k")
            expect_answers(await trial.claim(worker, candidate, sub=sub), Answer.RUN)


async def a_key_elsewhere_ends_nobody_who_waits(trial: StoreTrial) -> None:
    """Another subscription and another tenant are done with a key of that name."""
    worker = await trial.worker()
    run = await trial.run(worker, "a", idempotency_key="k")
    await trial.claim(worker, trial.candidate("b", idempotency_key="k"))
    other = msgspec.structs.replace(trial.sub, name="other")
    for sub, tenant in ((other, run.message.tenant_id), (trial.sub, "another")):
        candidate = trial.candidate(tenant_id=tenant, idempotency_key="k")
        (verdict,) = await trial.claim(worker, candidate, sub=sub)
        await trial.committed(worker, trial.granted(verdict), Done())
    expect(await trial.ready(worker) == [], "b waits for its own key")
    await trial.committed(worker, run, Dead(reason="r"))
    second = await trial.one_ready(worker)
    expect(second.message.id == "b", f"{second.message.id}, not b")


async def a_key_is_free_after_its_window(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "a", idempotency_key="k")
    await trial.committed(worker, run, Done(), dedup_window_s=60.0)
    trial.clock.advance(59)
    expect_answers(
        await trial.claim(worker, trial.candidate("b", idempotency_key="k")), Answer.DUPLICATE
    )
    trial.clock.advance(2)
    trial.store.expiry_paused = True
    expect_answers(
        await trial.claim(worker, trial.candidate("c", idempotency_key="k")), Answer.DUPLICATE
    )
    trial.store.expiry_paused = False
    expect_answers(await trial.claim(worker, trial.candidate("d", idempotency_key="k")), Answer.RUN)


async def a_key_belongs_to_the_one_that_took_it_over(trial: StoreTrial) -> None:
    """After its window: it is kept with the second success, and given back by a failure."""
    worker = await trial.worker()
    await trial.committed(
        worker, await trial.run(worker, "a", idempotency_key="k"), Done(), dedup_window_s=60.0
    )
    trial.clock.advance(61)
    run = await trial.run(worker, "b", idempotency_key="k")
    expect_answers(
        await trial.claim(worker, trial.candidate("c", idempotency_key="k")), Answer.WAITING
    )
    await trial.committed(worker, run, Dead(reason="r"))
    run = await trial.one_ready(worker)
    await trial.committed(worker, run, Done(), dedup_window_s=60.0)
    trial.clock.advance(61)
    run = await trial.run(worker, "d", idempotency_key="k")
    await trial.claim(worker, trial.candidate("e", idempotency_key="k"))
    await trial.committed(worker, run, Done(), dedup_window_s=60.0)
    expect(trial.finals("e") == [DUPLICATE], f"{trial.finals('e')}")
    expect_answers(
        await trial.claim(worker, trial.candidate("f", idempotency_key="k")), Answer.DUPLICATE
    )


async def a_dead_workers_key_goes_with_its_message(trial: StoreTrial) -> None:
    late, worker = await trial.worker(), await trial.worker()
    await trial.run(late, "a", idempotency_key="k")
    await trial.claim(worker, trial.candidate("b", idempotency_key="k"))
    await trial.die(late)
    await trial.reap(worker)
    expect(await trial.ready(worker) == [], "b took the key of what was reclaimed")
    (verdict,) = await trial.claim(worker, trial.candidate("a", idempotency_key="k"))
    await trial.committed(worker, trial.granted(verdict), Done())
    expect(trial.finals("b") == [DUPLICATE], f"{trial.finals('b')}")


# -- lanes ----------------------------------------------------------------------------------------


async def _sent(trial: StoreTrial, worker: Worker, *names: str) -> None:
    """Messages into their lanes: "a1" is the first of conversation a."""
    batch = [trial.candidate(name, ordering_key=name[0]) for name in names]
    verdicts = await trial.store.adopt_in_order(trial.lanes, batch, worker=worker)
    expect(verdicts is not None, "the only fetcher was refused")
    expect_answers(verdicts or (), *[Answer.WAITING] * len(names))


async def _heads(trial: StoreTrial, worker: Worker) -> dict[str, Run]:
    runs = await trial.ready(worker, sub=trial.lanes)
    return {run.message.id: run for run in runs}


async def a_lane_runs_in_order(trial: StoreTrial) -> None:
    worker = await trial.worker()
    await _sent(trial, worker, "a1", "a2", "b1", "a3", "b2")
    heads = await _heads(trial, worker)
    expect(set(heads) == {"a1", "b1"}, f"{set(heads)}")
    expect(await _heads(trial, worker) == {}, "a lane has one run at a time")
    await trial.committed(worker, heads["a1"], Done())
    await _sent(trial, worker, "a4", "c1")
    heads = await _heads(trial, worker)
    expect(set(heads) == {"a2", "c1"}, f"{set(heads)}")


async def a_retry_holds_its_lane(trial: StoreTrial) -> None:
    worker = await trial.worker()
    await _sent(trial, worker, "a1", "a2")
    head = (await _heads(trial, worker))["a1"]
    for outcome in (Retry(5.0, "again"), Released(after_s=5.0)):
        await trial.committed(worker, head, outcome)
        expect(await _heads(trial, worker) == {}, "the next one overtook it")
        trial.clock.advance(5)
        heads = await _heads(trial, worker)
        expect(set(heads) == {"a1"}, f"{set(heads)}")
        head = heads["a1"]
    await trial.committed(worker, head, Dead(reason="r"))
    expect(set(await _heads(trial, worker)) == {"a2"}, "a dead letter lets its lane go")


async def a_parked_message_holds_its_lane_or_not(trial: StoreTrial) -> None:
    worker = await trial.worker()
    await _sent(trial, worker, "a1", "a2", "b1", "b2")
    heads = await _heads(trial, worker)
    await trial.committed(worker, heads["a1"], Park("k", "r"), on_parked="wait")
    await trial.committed(worker, heads["b1"], Park("k", "r"), on_parked="skip")
    expect(set(await _heads(trial, worker)) == {"b2"}, "a waits, b goes on")


async def ends_at_the_claim_let_a_lane_go(trial: StoreTrial) -> None:
    """Expired or a duplicate: the message never ran, its conversation must go on at once."""
    worker = await trial.worker()
    (verdict,) = await trial.claim(
        worker, trial.candidate("done", idempotency_key="k"), sub=trial.lanes
    )
    await trial.committed(worker, trial.granted(verdict), Done())
    batch = [
        trial.candidate("a1", ordering_key="a", ttl_s=60),
        trial.candidate("a2", ordering_key="a"),
        trial.candidate("a3", ordering_key="a", idempotency_key="k"),
        trial.candidate("a4", ordering_key="a"),
    ]
    await trial.store.adopt_in_order(trial.lanes, batch, worker=worker)
    trial.clock.advance(61)
    expect(await _heads(trial, worker) == {}, "a1 is over its time")
    head = (await _heads(trial, worker))["a2"]
    await trial.committed(worker, head, Done())
    expect(await _heads(trial, worker) == {}, "a3 is a duplicate")
    expect(set(await _heads(trial, worker)) == {"a4"}, "and so on")


async def a_duplicate_that_waited_lets_its_lane_go(trial: StoreTrial) -> None:
    """It was the head of its conversation, and waited for a key when that was done."""
    worker = await trial.worker()
    (verdict,) = await trial.claim(
        worker, trial.candidate("holder", idempotency_key="k"), sub=trial.lanes
    )
    batch = [
        trial.candidate("a1", ordering_key="a", idempotency_key="k"),
        trial.candidate("a2", ordering_key="a"),
    ]
    await trial.store.adopt_in_order(trial.lanes, batch, worker=worker)
    expect(await _heads(trial, worker) == {}, "a1 waits for the key, a2 for a1")
    await trial.committed(worker, trial.granted(verdict), Done())
    expect(trial.finals("a1") == [DUPLICATE], f"{trial.finals('a1')}")
    expect(set(await _heads(trial, worker)) == {"a2"}, "a1 has ended, it is the turn of a2")


async def lanes_are_of_one_tenant_and_subscription(trial: StoreTrial) -> None:
    """The same ordering key elsewhere is another conversation: none waits for another one."""
    worker = await trial.worker()
    other = msgspec.structs.replace(trial.lanes, name="other")
    places = [(sub, tenant) for sub in (trial.lanes, other) for tenant in ("x", "y")]
    for sub, tenant in places:
        batch = [trial.candidate(m, ordering_key="a", tenant_id=tenant) for m in ("a1", "a2")]
        await trial.store.adopt_in_order(sub, batch, worker=worker)
    for name in ("a1", "a2"):
        for sub in (trial.lanes, other):
            runs = await trial.ready(worker, sub=sub)
            heads = sorted((run.message.tenant_id, run.message.id) for run in runs)
            expect(heads == [("x", name), ("y", name)], f"{sub.name}: {heads}")
            for run in runs:
                await trial.committed(worker, run, Done())


async def copies_of_what_is_in_a_lane(trial: StoreTrial) -> None:
    worker = await trial.worker()
    await _sent(trial, worker, "a1", "a2")
    await _sent(trial, worker, "a1", "a2", "a3")
    seen = []
    for _ in range(3):
        ((name, run),) = (await _heads(trial, worker)).items()
        await trial.committed(worker, run, Done())
        seen.append(name)
    expect(seen == ["a1", "a2", "a3"], f"{seen}")
    expect(await _heads(trial, worker) == {}, "a copy ran again")


async def a_copy_of_what_is_over_heads_no_lane(trial: StoreTrial) -> None:
    """It comes in one batch with the next one of its conversation, which must run."""
    worker = await trial.worker()
    await _sent(trial, worker, "a1")
    await trial.committed(worker, (await _heads(trial, worker))["a1"], Done())
    await _sent(trial, worker, "a1", "a2")
    expect(set(await _heads(trial, worker)) == {"a2"}, "a2 waits for what is over")


async def what_came_before_there_were_lanes(trial: StoreTrial) -> None:
    """Released while no order was asked for: its copy is let go, so it must run from the store."""
    worker = await trial.worker()
    no_order = msgspec.structs.replace(trial.lanes, ordered=False)
    candidate = trial.candidate("a1", ordering_key="a")
    (verdict,) = await trial.claim(worker, candidate, sub=no_order)
    await trial.committed(worker, trial.granted(verdict), Released())
    await _sent(trial, worker, "a1")
    heads = await _heads(trial, worker)
    expect(set(heads) == {"a1"}, f"{set(heads)}")
    expect(heads["a1"].attempt == 1, "to be released spends no attempt")
    await trial.committed(worker, heads["a1"], Done())


async def a_dead_workers_lane_starts_again_at_its_head(trial: StoreTrial) -> None:
    late, worker = await trial.worker(), await trial.worker()
    await _sent(trial, late, "a1", "a2")
    await _heads(trial, late)
    await trial.die(late)
    await trial.reap(worker)
    heads = await _heads(trial, worker)
    expect(set(heads) == {"a1"}, f"{set(heads)}")


async def an_ordered_source_has_one_fetcher(trial: StoreTrial) -> None:
    first, second, third = [await trial.worker() for _ in range(3)]
    await _sent(trial, first, "a1")
    batch = [trial.candidate("a2", ordering_key="a")]

    async def tried(worker: Worker) -> bool:
        found = await trial.store.adopt_in_order(trial.lanes, batch, worker=worker)
        return found is not None

    expect(not await tried(second), "two fetchers at a time")
    await trial.store.leave(first)
    expect(await tried(second), "the first one left")
    expect(not await tried(third), "two fetchers at a time")
    await trial.die(second)
    await trial.reap(third)
    expect(await tried(third), "the second one died")


# -- somebody sets the clock ----------------------------------------------------------------------


async def a_retry_is_due_as_before_when_the_clock_is_set(trial: StoreTrial) -> None:
    worker = await trial.worker()
    for n, jump_s in enumerate((-600, 3600, -86_400, 86_400, -60, 60)):
        run = await trial.run(worker, f"m{n}")
        await trial.committed(worker, run, Retry(5.0, "again"))
        trial.clock.jump_wall(jump_s)
        expect(await trial.ready(worker) == [], f"early after {jump_s} s")
        trial.clock.advance(4)
        expect(await trial.ready(worker) == [], f"early after {jump_s} s")
        trial.clock.advance(2)
        again = await trial.one_ready(worker)
        await trial.committed(worker, again, Done())


async def what_is_written_after_a_jump_is_not_moved(trial: StoreTrial) -> None:
    """The first transaction after the jump is the one that writes the due time."""
    worker = await trial.worker()
    for n, jump_s in enumerate((-600, 3600)):
        run = await trial.run(worker, f"m{n}")
        trial.clock.jump_wall(jump_s)
        await trial.committed(worker, run, Retry(5.0, "again"))
        expect(await trial.ready(worker) == [], f"early after {jump_s} s")
        trial.clock.advance(6)
        await trial.committed(worker, await trial.one_ready(worker), Done())


async def nothing_expires_at_a_jump(trial: StoreTrial) -> None:
    worker = await trial.worker()
    candidate = trial.candidate("m", ttl_s=600.0)
    trial.clock.jump_wall(3600)
    expect_answers(await trial.claim(worker, candidate), Answer.RUN)


async def a_key_moves_with_the_clock(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "a", idempotency_key="k")
    await trial.committed(worker, run, Done(), dedup_window_s=600.0)
    trial.clock.jump_wall(3600)
    (verdict,) = await trial.claim(worker, trial.candidate("b", idempotency_key="k"))
    expect(verdict.answer is Answer.DUPLICATE, f"its key was forgotten early: {verdict.answer}")


async def a_time_to_live_by_the_brokers_clock(trial: StoreTrial) -> None:
    """The broker's clock is two minutes behind the store's, and the sender's, too."""
    worker = await trial.worker()
    sent_us = trial.clock.now_us() - 120_000_000
    for left_s, answer in ((60.0, Answer.RUN), (-1.0, Answer.EXPIRED)):
        candidate = trial.candidate(f"m{left_s}", ttl_s=60.0 - 120.0)
        delivery = msgspec.structs.replace(
            candidate.delivery,
            sent_at_us=sent_us,
            expires_at_us=sent_us + 60_000_000,
            expires_steady_s=trial.clock.monotonic() + left_s,
        )
        candidate = msgspec.structs.replace(candidate, delivery=delivery)
        expect_answers(await trial.claim(worker, candidate), answer)
