"""Store checks: who may run a message."""

from __future__ import annotations

import msgspec

from ackbone.core.events import EXPIRED, FAILED
from ackbone.core.message import Priority
from ackbone.core.outcome import Dead, Done, Released, Retry
from ackbone.core.store import Answer, Candidate, Commit, Company
from ackbone.engine.decoder import decoder
from ackbone.testing.harness import expect
from tests.suites.store_harness import StoreTrial, answers, expect_answers


async def new_messages_run(trial: StoreTrial) -> None:
    worker = await trial.worker()
    batch = [trial.candidate(f"m{n}", payload={"n": n}) for n in range(300)]
    verdicts = await trial.claim(worker, *batch)
    runs = [trial.granted(verdict) for verdict in verdicts]
    for n, run in enumerate(runs):
        expect(run.message.id == f"m{n}", f"verdict {n} is about {run.message.id}")
        expect(run.message.payload == {"n": n}, "the payload is another one")
        expect((run.attempt, run.crashes, run.failures) == (1, 0, 0), f"a new run: {run}")
        expect(run.token.worker_id == worker.worker_id, "the token is another worker's")
        expect(run.delivery is batch[n].delivery, "the broker's copy is to be settled later")


async def verdicts_stand_in_order(trial: StoreTrial) -> None:
    worker = await trial.worker()
    done = await trial.run(worker, "done")
    await trial.committed(worker, done, Done())
    verdicts = await trial.claim(
        worker,
        trial.candidate("new"),
        trial.decoded(b"\xff", identity="junk"),
        trial.candidate("done"),
        trial.candidate("late", ttl_s=-1),
        trial.candidate("other"),
    )
    expect_answers(verdicts, Answer.RUN, Answer.DEAD, Answer.FINAL, Answer.EXPIRED, Answer.RUN)


async def two_copies_in_one_batch(trial: StoreTrial) -> None:
    worker = await trial.worker()
    verdicts = await trial.claim(
        worker, trial.candidate("m"), trial.candidate("x"), trial.candidate("m")
    )
    got = answers(verdicts)
    expect(got[:2] == [Answer.RUN, Answer.RUN], f"{got}")
    expect(got[2] is not Answer.RUN, "both copies of one message were to run")


async def a_copy_of_what_runs_elsewhere(trial: StoreTrial) -> None:
    """The store takes the whole message, so that the second copy may go."""
    first, second = await trial.worker(), await trial.worker()
    run = await trial.run(first, "m")
    expect_answers(await trial.claim(second, trial.candidate("m")), Answer.ADOPTED)
    expect_answers(await trial.claim(second, trial.candidate("m")), Answer.KNOWN)
    await trial.committed(first, run, Done())
    expect_answers(await trial.claim(second, trial.candidate("m")), Answer.FINAL)
    expect(await trial.ready(second) == [], "what was done is to run again")


async def what_is_final_stays_final(trial: StoreTrial) -> None:
    worker = await trial.worker()
    for message_id, outcome in (("good", Done()), ("bad", Dead(reason="r"))):
        run = await trial.run(worker, message_id)
        await trial.committed(worker, run, outcome)
        for _ in range(2):
            expect_answers(await trial.claim(worker, trial.candidate(message_id)), Answer.FINAL)
        expect(len(trial.finals(message_id)) == 1, f"{trial.finals(message_id)}")


async def one_id_two_payloads(trial: StoreTrial) -> None:
    """The second one is kept apart, and the first one knows nothing of it."""
    worker = await trial.worker()
    run = await trial.run(worker, "m", payload=1)
    conflict = trial.candidate("m", payload=2)
    expect_answers(await trial.claim(worker, conflict), Answer.DEAD)
    expect_answers(await trial.claim(worker, conflict), Answer.DEAD)
    await trial.committed(worker, run, Done())
    expect(len(trial.finals("m")) == 1, f"{trial.finals('m')}")
    others = [e for e in trial.events if e.type == FAILED]
    expect(len(others) == 1 and others[0].task_id != "m", f"the conflict's own end: {others}")


async def one_id_two_types(trial: StoreTrial) -> None:
    """The same id and payload with another type is another message, whatever the first one does."""
    worker = await trial.worker()
    run = await trial.run(worker, "m", payload=1, type="create")
    cancel, refund = (trial.candidate("m", payload=1, type=t) for t in ("cancel", "refund"))
    expect_answers(await trial.claim(worker, cancel, refund), Answer.DEAD, Answer.DEAD)
    await trial.committed(worker, run, Done())
    expect_answers(await trial.claim(worker, cancel), Answer.DEAD)
    copy = trial.candidate("m", payload=1, type="create")
    expect_answers(await trial.claim(worker, copy), Answer.FINAL)
    others = [e for e in trial.events if e.type == FAILED]
    expect(len({e.task_id for e in others} - {"m"}) == len(others) == 2, f"one end each: {others}")


async def one_id_two_messages_while_nobody_runs_it(trial: StoreTrial) -> None:
    """It was handed back to the broker. What comes then under its id does not take its place."""
    worker = await trial.worker()
    run = await trial.run(worker, "m", payload=1, type="create")
    await trial.committed(worker, run, Released())
    for payload, kind in ((2, "create"), (1, "cancel")):
        other = trial.candidate("m", payload=payload, type=kind)
        expect_answers(await trial.claim(worker, other), Answer.DEAD)
    (verdict,) = await trial.claim(worker, trial.candidate("m", payload=1, type="create"))
    run = trial.granted(verdict)
    expect((run.message.payload, run.message.type, run.attempt) == (1, "create", 1), f"{run}")
    await trial.committed(worker, run, Done())


async def a_copy_after_the_default_type_was_changed(trial: StoreTrial) -> None:
    """It brings no type of its own, so it is the same message, and runs again."""
    worker = await trial.worker()
    body = b'{"message_id": "m", "payload": 1}'
    await trial.claim(worker, trial.decoded(body, identity="m"))
    await trial.die(worker)
    second = await trial.worker()
    await trial.reap(second)
    now = msgspec.structs.replace(trial.sub, default_type="another")
    delivery = trial.decoded(body, identity="m").delivery
    (verdict,) = await trial.claim(second, decoder(now)(delivery), sub=now)
    expect(verdict.answer in (Answer.RUN, Answer.WAITING), f"to run again, not {verdict.answer}")


async def undecodable(trial: StoreTrial) -> None:
    worker = await trial.worker()
    junk = [trial.decoded(body, identity=f"j{n}") for n, body in enumerate((b"", b"\xff", b"[]"))]
    expect_answers(await trial.claim(worker, *junk), *[Answer.DEAD] * 3)
    expect_answers(await trial.claim(worker, junk[0]), Answer.DEAD)
    trial.expect_one_final_each()
    expect(sum(e.type == FAILED for e in trial.events) == 3, "each one ended once")


async def given_up_by_the_broker(trial: StoreTrial) -> None:
    """The server moved copies to a dead-letter queue. Each message ends once; what runs or waits in
    the store goes on, and the store has all of it."""
    worker, victim = await trial.worker(), await trial.worker()
    crashed = trial.candidate("crashed", idempotency_key="k")
    await trial.claim(victim, crashed)
    await trial.die(victim)
    await trial.reap(worker)
    for _ in range(2):
        await trial.claim(victim := await trial.worker(), trial.candidate("suspect"))
        await trial.die(victim)
        await trial.reap(worker)
    running = await trial.run(worker, "running")
    waiting = await trial.run(worker, "waiting")
    await trial.committed(worker, waiting, Retry(after_s=5.0, reason="later"))
    done = await trial.run(worker, "done")
    await trial.committed(worker, done, Done())
    new = trial.candidate("new", ttl_s=1)
    trial.clock.advance(2)  # its own time is over, too; the server was first
    dead = [
        _moved(each)
        for each in (
            new,
            crashed,
            trial.candidate("running"),
            trial.candidate("waiting"),
            trial.candidate("suspect"),
            trial.candidate("done"),
            trial.decoded(b"junk", identity="junk"),
        )
    ]
    for wanted in (
        "dead dead adopted known waiting final dead",
        "final final known known known final dead",
    ):  # the second time after a crash between the commit and the acknowledgement
        expect_answers(await trial.claim(worker, *dead), *map(Answer, wanted.split()))
    ended = {e.task_id: e.data.get("error") for e in trial.events if e.type == FAILED}
    expect(ended.keys() == {"new", "crashed", "junk"}, f"{ended}")
    expect(ended["new"] == ended["crashed"] == "too often", f"{ended}")
    expect(str(ended["junk"]).startswith("too often; "), f"{ended}")
    await trial.committed(worker, running, Done())
    trial.clock.advance(5)
    expect((await trial.one_ready(worker)).message.id == "waiting", "its retry goes on")
    alone = await trial.one_ready(worker, company=Company.FEW)
    expect(alone.message.id == "suspect", "the store tries it apart from the others")
    await trial.run(worker, "next", idempotency_key="k")
    trial.expect_one_final_each()


def _moved(candidate: Candidate) -> Candidate:
    delivery = msgspec.structs.replace(candidate.delivery, failure="too often")
    return msgspec.structs.replace(candidate, delivery=delivery)


async def identity_has_three_parts(trial: StoreTrial) -> None:
    """Tenant, subscription and id: the same id elsewhere is another message."""
    worker = await trial.worker()
    other = msgspec.structs.replace(trial.sub, name="other")
    runs = [
        await trial.run(worker, "m", tenant_id="a"),
        await trial.run(worker, "m", tenant_id="b"),
        trial.granted(
            (await trial.claim(worker, trial.candidate("m", tenant_id="a"), sub=other))[0]
        ),
    ]
    commits = await trial.finish(worker, *((run, Done()) for run in runs))
    expect(commits == [Commit.COMMITTED] * 3, f"{commits}")


async def time_to_live(trial: StoreTrial) -> None:
    worker = await trial.worker()
    late, fine = trial.candidate("late", ttl_s=60), trial.candidate("fine", ttl_s=120)
    doubtful = trial.candidate("doubtful", ttl_s=60)
    trial.clock.advance(61)
    expect_answers(await trial.claim(worker, late, fine), Answer.EXPIRED, Answer.RUN)
    expect(trial.finals("late") == [EXPIRED], f"{trial.finals('late')}")
    trial.store.expiry_paused = True
    expect_answers(await trial.claim(worker, doubtful), Answer.RUN)


async def time_to_live_of_what_comes_again(trial: StoreTrial) -> None:
    """Handed back or left by a dead worker, it stayed with the broker until its time was over."""
    worker = await trial.worker()
    released = trial.candidate("released", ttl_s=60, idempotency_key="k")
    crashed = trial.candidate("crashed", ttl_s=60)
    doubtful = trial.candidate("doubtful", ttl_s=60)
    victim = await trial.worker()
    await trial.claim(victim, crashed)
    for verdict in await trial.claim(worker, released, doubtful):
        await trial.committed(worker, trial.granted(verdict), Released())
    await trial.die(victim)
    await trial.reap(worker)
    trial.clock.advance(61)
    trial.store.expiry_paused = True
    expect_answers(await trial.claim(worker, doubtful), Answer.RUN)
    trial.store.expiry_paused = False
    verdicts = await trial.claim(worker, released, crashed)
    expect_answers(verdicts, Answer.EXPIRED, Answer.EXPIRED)
    for message_id in ("released", "crashed"):
        expect(trial.finals(message_id) == [EXPIRED], f"{trial.finals(message_id)}")
    expect_answers(await trial.claim(worker, released), Answer.FINAL)
    await trial.run(worker, "next", idempotency_key="k")  # what is over has let go of its key


async def what_crashed_two_workers_does_not_run_among_others(trial: StoreTrial) -> None:
    """Nor does it come back to the broker: the store keeps it until a child process takes it."""
    worker = await trial.worker()
    for crash in range(1, 3):
        victim = await trial.worker()
        (verdict,) = await trial.claim(victim, trial.candidate("m"))
        expect(trial.granted(verdict).crashes == crash - 1, f"{verdict.run}")
        await trial.die(victim)
        await trial.reap(worker)
    expect_answers(await trial.claim(worker, trial.candidate("m")), Answer.WAITING)
    expect(await trial.ready(worker) == [], "it runs among others")
    run = await trial.one_ready(worker, company=Company.FEW)
    expect((run.message.id, run.crashes) == ("m", 2), f"{run}")


async def the_urgent_run_first_then_those_that_wait_longest(trial: StoreTrial) -> None:
    worker = await trial.worker()
    for name, priority, wait_s in (
        ("last", Priority.LOW, 1.0),
        ("third", Priority.NORMAL, 4.0),
        ("second", Priority.NORMAL, 2.0),
        ("first", Priority.HIGH, 3.0),
    ):
        run = await trial.run(worker, name, priority=priority)
        await trial.committed(worker, run, Retry(wait_s, "later"))
    trial.clock.advance(5)
    seen = [(await trial.one_ready(worker, limit=1)).message.id for _ in range(4)]
    expect(seen == ["first", "second", "third", "last"], f"{seen}")


async def adoption(trial: StoreTrial) -> None:
    """The store holds the whole message: its worker may die, the broker's copy may go."""
    first, second = await trial.worker(), await trial.worker()
    run = await trial.run(first, "m", payload="whole")
    expect(list(await trial.store.adopt([run], worker=first)) == [True], "its own run")
    expect(list(await trial.store.adopt([run], worker=second)) == [False], "not its run")
    await trial.die(first)
    await trial.reap(second)
    again = await trial.one_ready(second)
    expect(again.message.payload == "whole", "it is not the message that was adopted")
    expect(list(await trial.store.adopt([run], worker=first)) == [False], "it is no longer its run")
    await trial.committed(second, again, Done())
