"""One timer heap for all timeouts."""

import asyncio
import random

import pytest

from ackbone.engine.deadlines import Deadlines


async def test_they_come_in_order_of_time() -> None:
    deadlines = Deadlines()
    seen: list[int] = []
    done = asyncio.Event()
    now = asyncio.get_running_loop().time()
    order = list(range(20))
    random.Random(3).shuffle(order)
    for n in order:
        deadlines.add(now + n * 0.001, lambda n=n: seen.append(n))  # type: ignore[misc]
    deadlines.add(now + 0.05, done.set)
    await asyncio.wait_for(done.wait(), 20)
    assert seen == list(range(20))


async def test_a_cancelled_one_does_not_come() -> None:
    deadlines = Deadlines()
    seen: list[str] = []
    done = asyncio.Event()
    now = asyncio.get_running_loop().time()
    gone = deadlines.add(now + 0.001, lambda: seen.append("gone"))
    deadlines.add(now + 0.002, lambda: seen.append("stays"))
    deadlines.add(now + 0.02, done.set)
    gone.cancel()
    await asyncio.wait_for(done.wait(), 20)
    assert seen == ["stays"]


async def test_an_earlier_one_that_comes_later() -> None:
    deadlines = Deadlines()
    early = asyncio.Event()
    now = asyncio.get_running_loop().time()
    deadlines.add(now + 3600, lambda: None)
    deadlines.add(now + 0.001, early.set)
    await asyncio.wait_for(early.wait(), 20)
    deadlines.close()


async def test_one_that_is_over_already() -> None:
    deadlines = Deadlines()
    past = asyncio.Event()
    deadlines.add(asyncio.get_running_loop().time() - 5, past.set)
    await asyncio.wait_for(past.wait(), 20)


async def test_one_that_adds_another() -> None:
    deadlines = Deadlines()
    second = asyncio.Event()
    now = asyncio.get_running_loop().time()

    def first() -> None:
        deadlines.add(now + 0.001, second.set)

    deadlines.add(now, first)
    await asyncio.wait_for(second.wait(), 20)


async def test_one_that_raises_keeps_nobody_else_waiting() -> None:
    deadlines = Deadlines()
    others = [asyncio.Event(), asyncio.Event()]
    now = asyncio.get_running_loop().time()
    errors: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(str(context.get("exception"))))

    def raises() -> None:
        raise RuntimeError("a deadline's own")

    deadlines.add(now, raises)
    deadlines.add(now, others[0].set)
    deadlines.add(now + 0.01, others[1].set)
    for other in others:
        await asyncio.wait_for(other.wait(), 20)
    assert errors == ["a deadline's own"]


async def test_nothing_comes_after_close() -> None:
    deadlines = Deadlines()
    seen: list[int] = []
    now = asyncio.get_running_loop().time()
    deadlines.add(now, lambda: seen.append(1))
    deadlines.close()
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, later.set)
    await later.wait()
    assert seen == []


@pytest.mark.parametrize("kept", [0, 50])
async def test_met_deadlines_take_no_room(kept: int) -> None:
    """A timeout of an hour over runs of a millisecond: what was met must not pile up."""
    deadlines = Deadlines()
    far = asyncio.get_running_loop().time() + 3600
    stay = [deadlines.add(far + n, lambda: None) for n in range(kept)]
    for n in range(20_000):
        deadlines.add(far - n, lambda: None).cancel()
    assert len(deadlines) <= 2 * (kept + 100)
    for entry in stay:
        entry.cancel()
    deadlines.close()
