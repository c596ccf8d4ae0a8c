"""Natural batching: what comes while a flush is under way is the next flush."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.engine.batcher import Batcher


class Flusher:
    """A flush that waits until it is let go, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, batch: Sequence[int]) -> Sequence[int | BaseException]:
        self.batches.append(list(batch))
        self.begun.set()
        await self.gate.wait()
        return [ValueError(f"no {item}") if item < 0 else item * 10 for item in batch]


async def test_one_item_is_flushed_at_once() -> None:
    flusher = Flusher()
    assert await Batcher(flusher).add(1) == 10
    assert flusher.batches == [[1]]


async def test_what_comes_meanwhile_is_one_batch() -> None:
    flusher = Flusher()
    batcher = Batcher(flusher)
    flusher.gate.clear()
    first = batcher.add(1)
    await flusher.begun.wait()
    rest = [batcher.add(n) for n in (2, 3, 4)]
    flusher.gate.set()
    assert await asyncio.gather(first, *rest) == [10, 20, 30, 40]
    assert flusher.batches == [[1], [2, 3, 4]]


async def test_a_batch_has_a_limit() -> None:
    flusher = Flusher()
    batcher = Batcher(flusher, limit=3)
    assert await asyncio.gather(*(batcher.add(n) for n in range(8))) == [n * 10 for n in range(8)]
    assert [len(batch) for batch in flusher.batches] == [3, 3, 2]


async def test_an_error_belongs_to_its_item() -> None:
    batcher = Batcher(Flusher())
    good, bad, other = batcher.add(1), batcher.add(-2), batcher.add(3)
    assert await good == 10
    assert await other == 30
    with pytest.raises(ValueError, match="no -2"):
        await bad


async def test_a_flush_that_raises_fails_its_batch_and_no_other() -> None:
    calls = 0

    async def flush(batch: Sequence[int]) -> Sequence[int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("away")
        return batch

    batcher = Batcher(flush, limit=2)
    answers = await asyncio.gather(*(batcher.add(n) for n in range(4)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [OSError, OSError, int, int]


@pytest.mark.parametrize("answers", [[], [1], [1, 2, 3]])
async def test_a_flush_with_the_wrong_number_of_answers_leaves_nobody_waiting(
    answers: list[int],
) -> None:
    async def flush(batch: Sequence[int]) -> Sequence[int]:
        return answers

    batcher = Batcher(flush)
    async with asyncio.timeout(20):
        got = await asyncio.gather(batcher.add(1), batcher.add(2), return_exceptions=True)
    assert all(isinstance(answer, RuntimeError) for answer in got)


async def test_a_cancelled_caller_stops_nothing() -> None:
    flusher = Flusher()
    batcher = Batcher(flusher)
    flusher.gate.clear()

    async def caller() -> int:
        return await batcher.add(1)

    gone = asyncio.create_task(caller())
    await flusher.begun.wait()
    stays = batcher.add(2)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    flusher.gate.set()
    assert await stays == 20
    assert flusher.batches == [[1], [2]]


async def test_a_batch_of_ones_own_is_answered_as_a_whole_and_in_its_turn() -> None:
    flusher = Flusher()
    batcher = Batcher(flusher)
    flusher.gate.clear()
    first = batcher.add(1)
    await flusher.begun.wait()
    before, own, after = batcher.add(2), batcher.add_all([3, -4]), batcher.add(5)
    flusher.gate.set()
    answers = await own
    assert answers[0] == 30
    assert isinstance(answers[1], ValueError), "one refusal is an answer among others"
    assert [await first, await before, await after] == [10, 20, 50]
    assert flusher.batches == [[1], [2], [3, -4], [5]]


async def test_a_batch_of_ones_own_times_out_and_fails_as_a_whole() -> None:
    flusher = Flusher()
    batcher = Batcher(flusher, timeout_s=0.01)
    flusher.gate.clear()
    with pytest.raises(TimeoutError):
        await batcher.add_all([1, 2])
    flusher.gate.set()
    await batcher.drain()

    async def broken(batch: Sequence[int]) -> Sequence[int]:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        await Batcher(broken).add_all([1, 2])


async def test_drain_waits_for_all() -> None:
    flusher = Flusher()
    batcher = Batcher(flusher, limit=1)
    futures = [batcher.add(n) for n in range(5)]
    await batcher.drain()
    assert all(future.done() for future in futures)
    await batcher.drain()


async def test_a_deadline_is_for_the_caller_not_for_the_flush() -> None:
    flusher = Flusher()
    batcher = Batcher(flusher, timeout_s=0.01)
    flusher.gate.clear()
    late = batcher.add(1)
    with pytest.raises(TimeoutError):
        await late
    flusher.gate.set()
    assert await batcher.add(2) == 20
    assert flusher.batches == [[1], [2]], "what was asked for was done all the same"


async def test_a_timer_from_before_does_not_shorten_a_deadline() -> None:
    """One timer serves all: it rings for the first, and is set again for those who came later."""
    flusher = Flusher()
    batcher = Batcher(flusher, limit=2, timeout_s=0.05)
    loop = asyncio.get_running_loop()
    assert await batcher.add(0) == 0  # in time: its timer goes on
    flusher.gate.clear()
    callers = []

    async def caller(n: int) -> tuple[int, float]:
        begin = loop.time()
        with pytest.raises(TimeoutError):
            await batcher.add(n)
        return n, loop.time() - begin

    for n in range(5):  # in flight, waiting and collecting
        callers.append(asyncio.create_task(caller(n)))
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        ended = [await done for done in asyncio.as_completed(callers)]
    assert [n for n, _ in ended] == [0, 1, 2, 3, 4]
    assert all(waited >= 0.05 for _, waited in ended), ended
    flusher.gate.set()
    await batcher.drain()
    assert await batcher.add(6) == 60


async def test_who_is_answered_does_not_time_out_with_the_others() -> None:
    flusher = Flusher()
    batcher = Batcher(flusher, limit=1, timeout_s=0.05)
    assert await batcher.add(1) == 10
    flusher.gate.clear()
    flusher.begun.clear()
    gone, late = asyncio.create_task(_await(batcher.add(2))), batcher.add(3)
    await flusher.begun.wait()
    gone.cancel()
    with pytest.raises(TimeoutError):
        await late
    with pytest.raises(asyncio.CancelledError):
        await gone
    flusher.gate.set()
    await batcher.drain()
    assert flusher.batches == [[1], [2], [3]]


async def test_who_comes_after_all_others_timed_out_has_a_deadline_too() -> None:
    """They share a batch that still waits for its turn, and nobody is left for whom to ring."""
    flusher = Flusher()
    batcher = Batcher(flusher, timeout_s=0.02)
    flusher.gate.clear()
    in_flight = batcher.add(1)
    await flusher.begun.wait()
    waiting = batcher.add(2)
    for late in (in_flight, waiting):
        with pytest.raises(TimeoutError):
            await late
    last = batcher.add(3)
    await asyncio.wait({last}, timeout=5)
    flusher.gate.set()
    with pytest.raises(TimeoutError):
        await last
    await batcher.drain()
    assert flusher.batches == [[1], [2, 3]]


async def _await(future: asyncio.Future[int]) -> int:
    return await future


@given(st.lists(st.lists(st.integers(-5, 50), max_size=12), max_size=8), st.integers(1, 5))
def test_every_item_gets_its_own_answer(waves: list[list[int]], limit: int) -> None:
    async def scenario() -> None:
        flusher = Flusher()
        batcher = Batcher(flusher, limit=limit)
        futures = []
        for wave in waves:
            futures += [(n, batcher.add(n)) for n in wave]
            await asyncio.sleep(0)
        for n, future in futures:
            if n < 0:
                with pytest.raises(ValueError, match=f"no {n}"):
                    await future
            else:
                assert await future == n * 10
        flat = [n for batch in flusher.batches for n in batch]
        assert flat == [n for wave in waves for n in wave], "in the order they came"
        assert all(0 < len(batch) <= limit for batch in flusher.batches)

    asyncio.run(scenario())
