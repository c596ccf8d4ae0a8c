"""Relays: when they step, when they must not, and how they end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ackbone.core.errors import StoreUnavailable
from ackbone.core.store import Worker
from ackbone.engine import relays
from ackbone.engine.relays import Relay, run_relay
from ackbone.testing import Signal

NEVER_S = 3600.0


class Host:
    def __init__(self) -> None:
        self.worker = Worker(worker_id=7)
        self.roles: list[str] = []
        self.holds = True

    async def hold_role(self, role: str) -> bool:
        self.roles.append(role)
        return self.holds


class Bell:
    def __init__(self) -> None:
        self.events: list[asyncio.Event] = []

    def subscribe(self) -> asyncio.Event:
        self.events.append(asyncio.Event())
        return self.events[-1]

    def unsubscribe(self, event: asyncio.Event) -> None:
        self.events.remove(event)


@asynccontextmanager
async def running(relay: Relay, host: Host) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(run_relay(relay, host))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_it_steps_as_the_worker_that_it_runs_in_whenever_its_bell_rings():
    host, bell = Host(), Bell()
    stepped: Signal[int] = Signal("stepped")

    async def step(worker: Worker) -> None:
        stepped.emit(worker.worker_id)

    relay = Relay(name="r", every_s=NEVER_S, step=step, bell=bell)
    async with running(relay, host):
        assert await stepped.wait(1) == 7
        host.worker = Worker(worker_id=8)  # a lost lease
        bell.events[0].set()
        assert await stepped.wait(2) == 8
    assert bell.events == [], "given back"


async def test_the_role_is_asked_for_only_if_there_is_something_to_do():
    host, bell = Host(), Bell()
    asked: Signal[None] = Signal("asked")
    there = False

    async def due() -> bool:
        asked.emit(None)
        return there

    stepped: Signal[None] = Signal("stepped")

    async def step(worker: Worker) -> None:
        stepped.emit(None)

    relay = Relay(name="r", every_s=NEVER_S, step=step, role="r", due=due, bell=bell)
    async with running(relay, host):
        await asked.wait(1)
        there = True
        bell.events[0].set()
        await stepped.wait(1)
        assert host.roles == ["r"]
        host.holds = False
        bell.events[0].set()
        await asked.wait(3)
        bell.events[0].set()
        await asked.wait(4)
        assert stepped.count == 1, "another worker holds it"


async def test_a_store_that_is_away_is_waited_out_and_any_other_error_ends_it():
    host, bell = Host(), Bell()
    errors = iter([StoreUnavailable("away"), None, KeyError("a bug")])
    stepped: Signal[None] = Signal("stepped")

    async def step(worker: Worker) -> None:
        stepped.emit(None)
        error = next(errors)
        if error is not None:
            raise error

    relay = Relay(name="r", every_s=NEVER_S, step=step, bell=bell)
    async with running(relay, host) as task:
        await stepped.wait(1)
        bell.events[0].set()
        await stepped.wait(2)
        bell.events[0].set()
        with pytest.raises(KeyError):
            await asyncio.wait_for(asyncio.shield(task), 30)


@pytest.mark.parametrize("at_end", [True, False])
async def test_a_step_with_an_end_of_its_own_is_not_cut_in_two(at_end):
    began, go_on = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def step(worker: Worker) -> None:
        began.set()
        try:
            await go_on.wait()
            ended.append("whole")
        except asyncio.CancelledError:
            ended.append("cut")
            raise

    relay = Relay(name="r", every_s=NEVER_S, step=step, at_end=at_end)
    task = asyncio.create_task(run_relay(relay, Host()))
    await asyncio.wait_for(began.wait(), 30)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert ended == ["whole" if at_end else "cut"]


async def test_a_step_that_takes_too_long_is_cut_all_the_same(monkeypatch):
    monkeypatch.setattr(relays, "TO_THE_END_S", 0.01)
    began, cut = asyncio.Event(), asyncio.Event()

    async def step(worker: Worker) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()

    relay = Relay(name="r", every_s=NEVER_S, step=step, at_end=True)
    task = asyncio.create_task(run_relay(relay, Host()))
    await asyncio.wait_for(began.wait(), 30)
    task.cancel()
    await asyncio.wait({task})
    await asyncio.wait_for(cut.wait(), 30)
