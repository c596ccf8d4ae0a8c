"""The handler that holds up the event loop is named, and nobody else is."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from ackbone.core.broker import Subscription
from ackbone.core.clock import SystemClock
from ackbone.core.message import Message
from ackbone.core.store import Run, Token
from ackbone.engine.executor import Active
from ackbone.engine.handlers import Handler
from ackbone.engine.watchdog import LOOK_S, Watchdog

LIMIT_S = 0.6
"""Short, for a test."""


async def agent(ctx: object) -> None: ...


def run_of(message_id: str) -> Active:
    message = Message(id=message_id, type="t")
    run = Run(
        message=message,
        subscription="q",
        queue="q",
        token=Token(worker_id=1, epoch=1),
        attempt=1,
        crashes=0,
        claimed_at_us=0,
        created_at_us=0,
    )
    handler = Handler(type="t", queue="q", call=agent)
    context: Any = None
    return Active(run, Subscription(name="q", queue="q"), handler, context)


async def watched(*steps: Callable[[], None], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings that these steps, each in a run of its own, lead to."""
    runs = [run_of(f"m-{n}") for n in range(len(steps))]
    dog = Watchdog(lambda: runs, SystemClock(), limit_s=LIMIT_S)
    try:
        for active, step in zip(runs, steps, strict=True):

            async def blocking(step: Callable[[], None] = step) -> None:
                step()

            active.task = asyncio.create_task(blocking())
            await active.task
            await asyncio.sleep(3 * LOOK_S)  # it looks, and sees that the loop moves
    finally:
        dog.close()
    return [record.getMessage() for record in caplog.records if "blocked" in record.getMessage()]


async def test_a_block_is_told_once_with_handler_message_place_and_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (told,) = await watched(lambda: time.sleep(2.5), caplog=caplog)
    assert re.match(r"handler agent \(message m-0\) blocked the event loop for \d+\.\d s", told)
    assert f'("{__file__}", line' in told


async def test_short_steps_and_waiting_are_no_block(caplog: pytest.LogCaptureFixture) -> None:
    assert await watched(*[lambda: time.sleep(0.1)] * 3, caplog=caplog) == []


async def test_many_short_steps_in_one_go_are_nobodys_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dog = Watchdog(list, SystemClock(), limit_s=LIMIT_S)

    async def short() -> None:
        time.sleep(0.05)

    try:
        await asyncio.gather(*(short() for _ in range(30)))
        await asyncio.sleep(3 * LOOK_S)
    finally:
        dog.close()
    assert "blocked" not in caplog.text


async def test_a_block_without_an_end_is_told_while_it_lasts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ackbone.engine.watchdog.ENDLESS_S", 1.0)
    seen: list[str] = []

    def step() -> None:
        deadline = time.monotonic() + 30
        while not seen and time.monotonic() < deadline:
            seen.extend(r.getMessage() for r in caplog.records if "blocked" in r.getMessage())
            time.sleep(0.01)

    assert len(await watched(step, caplog=caplog)) == 1
    assert seen
