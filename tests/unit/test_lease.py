"""The lease's thread outlives a store that is away, and asks what became of it."""

import asyncio
import threading
from typing import Any, cast

from ackbone.core.clock import SystemClock
from ackbone.core.errors import StoreUnavailable
from ackbone.core.store import Worker
from ackbone.engine.lease import Lease, LeaseLimits


class Away:
    """A store whose beats fail for a while."""

    def __init__(self, failures: int, *, alive: bool) -> None:
        self.left = failures
        self.alive = alive
        self.beaten = threading.Event()
        self.asked = threading.Event()

    def beat(self, worker: Worker) -> None:
        if self.left:
            self.left -= 1
            raise StoreUnavailable("away")
        self.beaten.set()

    def is_registered(self, worker: Worker) -> bool:
        self.asked.set()
        return self.alive


def lease_on(store: Any, lost: asyncio.Event) -> Lease:
    return Lease(
        store,
        Worker(worker_id=1),
        LeaseLimits(lease_s=0.15, stall_limit_s=60, stuck_grace_s=60),
        clock=SystemClock(),
        lost=lost.set,
    )


async def test_it_goes_on_beating_when_the_store_is_back() -> None:
    store, lost = Away(2, alive=True), asyncio.Event()
    lease = lease_on(store, lost)
    try:
        assert await asyncio.to_thread(store.beaten.wait, 20)
    finally:
        await asyncio.to_thread(lease.close)
    assert not lost.is_set()


async def test_after_longer_than_a_lease_it_asks_and_is_told() -> None:
    store, lost = Away(6, alive=False), asyncio.Event()
    lease = lease_on(store, lost)
    try:
        async with asyncio.timeout(20):
            await lost.wait()
    finally:
        await asyncio.to_thread(lease.close)
    assert store.beaten.is_set()
    assert store.asked.is_set()


async def test_who_was_declared_dead_at_once_is_told() -> None:
    """It beats in time, and was registered so slowly that somebody took it for dead before."""
    store, lost = Away(0, alive=False), asyncio.Event()
    lease = lease_on(store, lost)
    try:
        async with asyncio.timeout(20):
            await lost.wait()
    finally:
        await asyncio.to_thread(lease.close)


async def test_the_first_sign_of_life_comes_at_once() -> None:
    store, lost = Away(0, alive=True), asyncio.Event()
    lease = Lease(
        cast(Any, store),
        Worker(worker_id=1),
        LeaseLimits(lease_s=600, stall_limit_s=60, stuck_grace_s=60),
        clock=SystemClock(),
        lost=lost.set,
    )
    try:
        assert await asyncio.to_thread(store.beaten.wait, 20)
    finally:
        await asyncio.to_thread(lease.close)
