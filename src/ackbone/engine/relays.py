"""Relays: background loops of a worker. A role makes sure that only one worker runs a relay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from ackbone.core.errors import BrokerError, StoreError
from ackbone.core.store import Worker

from .outages import DEFAULT, Outages, broker_side

TO_THE_END_S = 2.0
"""How long a step in progress may take when its worker stops."""

Step = Callable[[Worker], Awaitable[object]]


class Bell(Protocol):
    """Sends wake-ups: its events are set when there may be work before the time is up."""

    def subscribe(self) -> asyncio.Event: ...

    def unsubscribe(self, event: asyncio.Event) -> None: ...


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """One loop: makes `step` every `every_s`, and at each wake-up."""

    name: str
    every_s: float
    step: Step
    """It gets the registration of the worker, which changes after a lost lease."""
    role: str | None = None
    """Only the worker that holds this role makes the step. None: every worker does."""
    due: Callable[[], Awaitable[bool]] | None = None
    """Asked before the role. If it returns False, there is nothing to do."""
    bell: Bell | None = None
    at_end: bool = False
    """Make one more step when the worker stops in order, after its last run was committed. A step
    in progress is not cancelled at once, either."""
    channels: frozenset[str] = frozenset()
    """The channels by which it sends replies."""
    last: Step | None = None
    """The step to make at the end, if it is another one."""


class Host(Protocol):
    """A worker as its relays see it."""

    @property
    def worker(self) -> Worker: ...

    async def hold_role(self, role: str) -> bool: ...


async def run_relay(
    relay: Relay, host: Host, outages: Outages | None = None, *, after_s: float = 0.0
) -> None:
    """Run a relay until cancelled. It waits while the store is away. Any other error ends it, and
    with it the worker. `after_s`: how long to wait before the first step.
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
    """Make a step. If cancelled, give the step `TO_THE_END_S` to finish."""
    step = asyncio.create_task(step_once(relay, host, outages), name=f"ackbone step {relay.name}")
    try:
        await asyncio.shield(step)
    except asyncio.CancelledError:
        _, late = await asyncio.wait({step}, timeout=TO_THE_END_S)
        for task in late:
            task.cancel()
        raise


async def step_once(relay: Relay, host: Host, outages: Outages, *, last: bool = False) -> None:
    """Make one step, if it is due and this worker holds the role."""
    step = relay.last if last and relay.last is not None else relay.step
    try:
        is_due = relay.due is None or await relay.due()
        if is_due and (relay.role is None or await host.hold_role(relay.role)):
            await step(host.worker)
        outages.worked(relay.name, "")
    except (StoreError, BrokerError) as error:
        # The next step may be an hour away. Other loops notice earlier that the outage is over, if
        # they ask the same broker.
        name = getattr(error, "broker", DEFAULT)
        outages.failed(relay.name, error, asks_again=name != DEFAULT, broker=broker_side(name))
