"""Store checks: queues with parts, and what becomes of copies of a message that failed."""

from __future__ import annotations

import asyncio
import random

import msgspec

from ackbone.core.outcome import Dead, Done
from ackbone.core.store import Answer, Candidate, Verdict, Worker, opened_parts
from ackbone.testing.harness import expect
from tests.suites.store_harness import StoreTrial, expect_answers


def _copy(trial: StoreTrial, name: str, part: str, *, opens: bool = False) -> Candidate:
    """A copy of a message of the conversation that its name begins with."""
    made = trial.candidate(name, ordering_key=name[0])
    delivery = msgspec.structs.replace(made.delivery, part=part, opens_part=opens)
    return msgspec.structs.replace(made, delivery=delivery)


async def _adopt(trial: StoreTrial, worker: Worker, *batch: Candidate) -> list[Verdict]:
    verdicts = await trial.store.adopt_in_order(
        trial.lanes, batch, worker=worker, opened=opened_parts(batch)
    )
    if verdicts is None:
        raise AssertionError("a reader of parts was refused as a whole")
    expect([v.delivery for v in verdicts] == [c.delivery for c in batch], "another order")
    return list(verdicts)


async def _in_order(trial: StoreTrial, worker: Worker) -> list[str]:
    """Run everything that is there, each conversation one after the other."""
    ran = []
    while runs := await trial.ready(worker, sub=trial.lanes):
        for run in runs:
            await trial.committed(worker, run, Done())
            ran.append(run.message.id)
    return ran


async def a_part_that_moved_is_closed_to_its_last_owner(trial: StoreTrial) -> None:
    """The last owner has read m5 and m6, and stood still until the new one was at m4."""
    late, heir = await trial.worker(), await trial.worker()
    first = _copy(trial, "m1", "P", opens=True), _copy(trial, "m2", "P")
    expect_answers(await _adopt(trial, late, *first), Answer.WAITING, Answer.WAITING)
    batch = _copy(trial, "m3", "P", opens=True), _copy(trial, "m4", "P")
    expect_answers(await _adopt(trial, heir, *batch), Answer.WAITING, Answer.WAITING)
    stale = _copy(trial, "m5", "P"), _copy(trial, "m6", "P")
    # In its own order m6 would come before m5, which the new owner reads first.
    expect_answers(await _adopt(trial, late, stale[1]), Answer.LEAVE)
    expect_answers(await _adopt(trial, heir, *stale), Answer.WAITING, Answer.WAITING)
    ran = await _in_order(trial, heir)
    expect(ran == ["m1", "m2", "m3", "m4", "m5", "m6"], f"{ran}")


async def a_part_comes_back_without_a_lease(trial: StoreTrial) -> None:
    one, two = await trial.worker(), await trial.worker()
    for n, worker in enumerate((one, two, one, two)):
        opened = await _adopt(trial, worker, _copy(trial, f"m{2 * n}", "P", opens=True))
        expect_answers(opened, Answer.WAITING)
        expect_answers(
            await _adopt(trial, worker, _copy(trial, f"m{2 * n + 1}", "P")), Answer.WAITING
        )
    ran = await _in_order(trial, one)
    expect(ran == [f"m{n}" for n in range(8)], f"{ran}")


async def parts_of_one_batch_have_different_owners(trial: StoreTrial) -> None:
    one, two = await trial.worker(), await trial.worker()
    await _adopt(trial, one, _copy(trial, "a1", "A", opens=True))
    await _adopt(trial, two, _copy(trial, "b1", "B", opens=True))
    verdicts = await _adopt(
        trial,
        one,
        _copy(trial, "b2", "B"),
        _copy(trial, "a2", "A"),
        _copy(trial, "c1", "C", opens=True),
        _copy(trial, "b3", "B"),
        _copy(trial, "d2", "D"),
    )
    expect_answers(
        verdicts, Answer.LEAVE, Answer.WAITING, Answer.WAITING, Answer.LEAVE, Answer.LEAVE
    )
    other = msgspec.structs.replace(trial.lanes, name="other")
    again = await trial.store.adopt_in_order(other, [_copy(trial, "b2", "B")], worker=two)
    expect_answers(again or (), Answer.LEAVE)  # parts belong to a subscription
    expect(set(await _in_order(trial, one)) == {"a1", "a2", "b1", "c1"}, "what was left ran")


async def parts_change_owners_while_batches_are_written(trial: StoreTrial) -> None:
    """Three workers write at the same time, each some parts in an order of its own."""
    dice = random.Random(7)
    workers = [await trial.worker() for _ in range(3)]
    settled = dict.fromkeys("abcd", 0)
    for _ in range(12):
        batches = []
        for _ in workers:
            parts = dice.sample(sorted(settled), 3)
            batches.append(
                [
                    _copy(trial, f"{part}{settled[part] + n:03}", part, opens=n == 0 and opens)
                    for part, opens in ((part, dice.random() < 0.7) for part in parts)
                    for n in range(3)
                ]
            )
        asked = [_adopt(trial, w, *batch) for w, batch in zip(workers, batches, strict=True)]
        for batch, verdicts in zip(batches, await asyncio.gather(*asked), strict=True):
            for candidate, verdict in zip(batch, verdicts, strict=True):
                if verdict.answer is not Answer.LEAVE and candidate.message is not None:
                    name = candidate.message.id
                    settled[name[0]] = max(settled[name[0]], int(name[1:]) + 1)
    ran = await _in_order(trial, workers[0])
    for part, n in settled.items():
        wanted = [f"{part}{at:03}" for at in range(n)]
        expect(n > 0, f"nobody adopted a message of {part}")
        expect([name for name in ran if name[0] == part] == wanted, f"{part} ran as {ran}")


async def a_part_is_opened_by_a_message_without_a_key(trial: StoreTrial) -> None:
    """Such a message is claimed in another call, and yet its worker has the part from now on."""
    one, two = await trial.worker(), await trial.worker()
    await _adopt(trial, one, _copy(trial, "m1", "P", opens=True))
    none = await trial.store.adopt_in_order(trial.lanes, [], worker=two, opened=["P"])
    expect(none == [], f"{none}")
    expect_answers(await _adopt(trial, one, _copy(trial, "m2", "P")), Answer.LEAVE)
    expect_answers(await _adopt(trial, two, _copy(trial, "m2", "P")), Answer.WAITING)


async def a_late_opening_passes_over_nothing(trial: StoreTrial) -> None:
    """It was given to a worker that stood still while another one read the part to its end."""
    late, heir = await trial.worker(), await trial.worker()
    batch = [_copy(trial, f"m{n}", "P", opens=n == 0) for n in range(4)]
    await _adopt(trial, heir, *batch)
    ran = await _in_order(trial, heir)
    expect_answers(await _adopt(trial, late, *batch), *[Answer.WAITING] * 4)
    # The broker's reader is refused once, reads from there again, and goes on.
    expect_answers(await _adopt(trial, heir, _copy(trial, "m4", "P")), Answer.LEAVE)
    expect_answers(await _adopt(trial, heir, _copy(trial, "m4", "P", opens=True)), Answer.WAITING)
    ran += await _in_order(trial, heir)
    expect(ran == [f"m{n}" for n in range(5)], f"{ran}")


async def a_worker_that_registers_again_opens_its_parts_again(trial: StoreTrial) -> None:
    late, other = await trial.worker(), await trial.worker()
    await _adopt(trial, late, _copy(trial, "m1", "P", opens=True))
    await trial.die(late)
    await trial.reap(other)
    again = await trial.worker()
    expect_answers(await _adopt(trial, again, _copy(trial, "m3", "P")), Answer.LEAVE)
    batch = _copy(trial, "m2", "P", opens=True), _copy(trial, "m3", "P")
    expect_answers(await _adopt(trial, again, *batch), Answer.WAITING, Answer.WAITING)
    ran = await _in_order(trial, again)
    expect(ran == ["m1", "m2", "m3"], f"{ran}")


async def a_copy_of_a_failed_message_says_why_it_failed(trial: StoreTrial) -> None:
    """Where the copies of failures are rejected, so is a copy that comes again."""
    worker = await trial.worker()
    rejecting = msgspec.structs.replace(trial.sub, ack_policy="nack")
    for name, outcome in (("bad", Dead(reason="too_hot")), ("good", Done())):
        run = await trial.run(worker, name)
        await trial.committed(worker, run, outcome)
    for sub, why in ((rejecting, "too_hot"), (trial.sub, None)):
        bad, good = await trial.claim(
            worker, trial.candidate("bad"), trial.candidate("good"), sub=sub
        )
        expect_answers([bad, good], Answer.FINAL, Answer.FINAL)
        expect((bad.failure, good.failure) == (why, None), f"{bad.failure}, {good.failure}")
    keyed = msgspec.structs.replace(rejecting, ordered=True)
    lane = [trial.candidate("bad", ordering_key="k"), trial.candidate("new", ordering_key="k")]
    verdicts = await trial.store.adopt_in_order(keyed, lane, worker=worker)
    expect_answers(verdicts or (), Answer.FINAL, Answer.WAITING)
    expect([v.failure for v in verdicts or ()] == ["too_hot", None], "an ordered queue forgot it")
