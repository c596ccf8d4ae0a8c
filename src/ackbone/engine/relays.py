"""Relays: small loops beside the work, in every worker; a role keeps those single that must be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from ackbone.core.errors import BrokerError, StoreError
from ackbone.core.store import Worker

from .outages import Outages

TO_THE_END_S = 2.0
"""What a step in progress gets when its worker stops."""

Step = Callable[[Worker], Awaitable[object]]


class Bell(Protocol):
    """Rings when there may be something to do before the time is up."""

    def subscribe(self) -> asyncio.Event: ...

    def unsubscribe(self, event: asyncio.Event) -> None: ...


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """One loop: `step` every `every_s`, and whenever its bell rings."""

    name: str
    every_s: float
    step: Step
    """Given the worker that it runs in: after a lost lease that is another one."""
    role: str | None = None
    """Only the worker that holds it makes the step."""
    due: Callable[[], Awaitable[bool]] | None = None
    """Asked before the role is: False, and there is nothing to do."""
    bell: Bell | None = None
    at_end: bool = False
    """Once more when the worker stops in order, after its last run was committed.

    A step that the stop finds in progress is not cut in two either.
    """
    channels: frozenset[str] = frozenset()
    """The channels by which it sends replies."""
    last: Step | None = None
    """What is done at the end instead of one more step."""


class Host(Protocol):
    """The worker, as its relays see it."""

    @property
    def worker(self) -> Worker: ...

    async def hold_role(self, role: str) -> bool: ...


async def run_relay(
    relay: Relay, host: Host, outages: Outages | None = None, *, after_s: float = 0.0
) -> None:
    """Runs until cancelled. The store being away is waited out; any other error ends the worker.

    `after_s`: when the first step is made.
    """
    outages = outages or Outages()
    if after_s:
        await asyncio.sleep(after_s)
    rung = relay.bell.subscribe() if relay.bell is not None else asyncio.Event()
    try:
        while True:
            rung.clear()
            whole = _whole_step if relay.at_end else step_once
            await whole(relay, host, outages)
            try:
                async with asyncio.timeout(relay.every_s):
                    await rung.wait()
            except TimeoutError:
                continue
    finally:
        if relay.bell is not None:
            relay.bell.unsubscribe(rung)


async def _whole_step(relay: Relay, host: Host, outages: Outages) -> None:
    """Cancelled, it still goes on to its end, if that is not too far."""
    step = asyncio.create_task(step_once(relay, host, outages), name=f"ackbone step {relay.name}")
    try:
        await asyncio.shield(step)
    except asyncio.CancelledError:
        _, late = await asyncio.wait({step}, timeout=TO_THE_END_S)
        for task in late:
            task.cancel()
        raise


async def step_once(relay: Relay, host: Host, outages: Outages, *, last: bool = False) -> None:
    """One step, if it is due and this worker's to make."""
    step = relay.last if last and relay.last is not None else relay.step
    try:
        if relay.due is not None and not await relay.due():
            return
        if relay.role is None or await host.hold_role(relay.role):
            await step(host.worker)
    except (StoreError, BrokerError) as error:
        # The next step may be an hour away: others find out sooner that the outage is over.
        outages.failed(relay.name, error, asks_again=False)
