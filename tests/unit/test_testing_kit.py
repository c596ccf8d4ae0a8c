"""Clock, signals and the public names of `ackbone.testing`."""

import asyncio
import subprocess
import sys
import threading

import pytest

import ackbone.testing
from ackbone.core.clock import Clock
from ackbone.testing import FakeClock, Signal, SignalTimeout


def test_clock_stands_still_until_it_is_moved() -> None:
    clock = FakeClock()
    port: Clock = clock
    start = (port.now_us(), port.monotonic())
    assert (port.now_us(), port.monotonic()) == start
    clock.advance(1.5)
    assert port.now_us() - start[0] == 1_500_000
    assert port.monotonic() - start[1] == pytest.approx(1.5)


def test_a_wall_jump_leaves_the_monotonic_clock() -> None:
    clock = FakeClock()
    wall, monotonic = clock.now_us(), clock.monotonic()
    clock.jump_wall(-86_400)
    assert clock.now_us() - wall == -86_400_000_000
    assert clock.monotonic() == monotonic


def test_time_does_not_go_backwards() -> None:
    with pytest.raises(ValueError, match="jump_wall"):
        FakeClock().advance(-1)


def test_moves_are_told_until_forgotten() -> None:
    clock = FakeClock()
    seen: list[int] = []
    forget = clock.on_advance(lambda: seen.append(clock.now_us()))
    clock.advance(1)
    clock.jump_wall(1)
    forget()
    forget()
    clock.advance(1)
    assert len(seen) == 2
    assert seen[0] < seen[1]


async def test_signal_gives_the_nth_payload_past_or_future() -> None:
    signal: Signal[str] = Signal("letters")
    signal.emit("a")
    assert await signal.wait() == "a"
    later = asyncio.create_task(signal.wait(3))
    await asyncio.sleep(0)
    signal.emit("b")
    await asyncio.sleep(0)
    assert not later.done()
    signal.emit("c")
    assert await later == "c"
    assert signal.seen == ["a", "b", "c"]
    assert signal.count == 3


async def test_signal_waits_for_what_matches() -> None:
    signal: Signal[int] = Signal()
    waiting = asyncio.create_task(signal.wait_for(lambda n: n > 10))
    for n in (3, 30, 300):
        signal.emit(n)
    assert await waiting == 30


async def test_signal_says_what_it_saw_instead() -> None:
    signal: Signal[str] = Signal("replies")
    signal.emit("hello")
    with pytest.raises(SignalTimeout) as caught:
        await signal.wait(2, timeout=0.01)
    assert str(caught.value) == (
        "replies: waited 0.01 s for occurrence 2, which did not come; 1 seen; the last: 'hello'"
    )
    with pytest.raises(SignalTimeout, match="for an error"):
        await signal.wait_for(lambda text: text == "error", timeout=0.01, what="an error")
    with pytest.raises(ValueError, match="counted from 1"):
        await signal.wait(0)


async def test_signal_crosses_threads() -> None:
    signal: Signal[int] = Signal("from a thread")
    waiting = asyncio.create_task(signal.wait(500))
    await asyncio.sleep(0)

    def shout() -> None:
        for n in range(100):
            signal.emit(n)

    threads = [threading.Thread(target=shout) for _ in range(5)]
    for thread in threads:
        thread.start()
    await waiting
    for thread in threads:
        thread.join()
    assert signal.count == 500


async def test_several_waiters_are_all_woken() -> None:
    signal: Signal[int] = Signal()
    waiters = [asyncio.create_task(signal.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    signal.emit(1)
    assert await asyncio.gather(*waiters) == [1, 1, 1]


def test_public_names_exist_and_need_no_pytest() -> None:
    for name in ackbone.testing.__all__:
        assert hasattr(ackbone.testing, name)
    program = "import sys, ackbone.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
