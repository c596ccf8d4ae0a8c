"""Let a run's writes wait while the store is away: an outage is not a failure of the handler.

The result of an effect is kept until it is written, however long that takes and however its run
ends, because only this process knows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ackbone.core.errors import StoreUnavailable
from ackbone.core.store import EffectState, Reply, Run

from .context import RunStore

T = TypeVar("T")
log = logging.getLogger("ackbone.engine")

WAIT_S = 60.0
"""A run waits this long for its store. After that it is handed back and runs again later."""
LAST_WAIT_S = 5.0
"""A worker that stops waits this long for results of effects that are not written yet."""
SLOW_S = 1.0
"""A write without an answer for this long counts as waiting: servers and disks may hang."""
PAUSE_S = 0.05
"""The first pause between two attempts. It doubles each time, up to a second."""


class _Write:
    """A write of a run that has not succeeded yet."""

    __slots__ = ("run", "since")

    def __init__(self, run: Run, since: float) -> None:
        self.run = run
        self.since = since


class PatientStore:
    """A `RunStore` that repeats the writes of another one while it is away."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._writes: set[_Write] = set()
        self._unwritten: set[asyncio.Task[None]] = set()

    def is_waiting(self, run: Run) -> bool:
        """Return True if this run waits for the store, after an error or for a late answer."""
        slow = asyncio.get_running_loop().time() - SLOW_S
        return any(each.run is run and each.since <= slow for each in self._writes)

    async def effect_begin(
        self, run: Run, name: str, *, again: bool = False
    ) -> tuple[EffectState, bytes | None]:
        return await self._repeat(run, lambda repeat: self._begin(run, name, again or repeat))

    async def _begin(self, run: Run, name: str, again: bool) -> tuple[EffectState, bytes | None]:
        """Write the intent. If cancelled meanwhile, take it back: nothing was done."""
        asked = asyncio.ensure_future(self._store.effect_begin(run, name, again=again))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # the cancellation is what must be raised
                state, _ = await asked
                if state is EffectState.NEW:
                    await self._store.effect_clear(run, name)
            raise

    async def effect_done(self, run: Run, name: str, result: bytes, *, again: bool = False) -> None:
        """Return when it is written. If the caller is cancelled, this object goes on writing."""

        async def write() -> None:
            await self._repeat(
                run,
                lambda repeat: self._store.effect_done(run, name, result, again=again or repeat),
                for_ever=True,
            )

        what = f"effect {name!r} of message {run.message.id}"
        writing = asyncio.create_task(write(), name=what)
        self._unwritten.add(writing)
        writing.add_done_callback(self._written)
        await asyncio.shield(writing)

    async def effect_raised(self, run: Run, name: str, error: str) -> None:
        await self._repeat(run, lambda _: self._store.effect_raised(run, name, error))

    async def effect_clear(self, run: Run, name: str) -> None:
        await self._repeat(run, lambda _: self._store.effect_clear(run, name))

    async def heartbeat(self, run: Run, data: Mapping[str, Any]) -> None:
        await self._repeat(run, lambda _: self._store.heartbeat(run, data))

    async def reply_now(self, run: Run, reply: Reply, n: int) -> str:
        return await self._repeat(run, lambda _: self._store.reply_now(run, reply, n))

    async def close(self) -> None:
        """Wait a little for results that are not written yet, then give them up."""
        if self._unwritten:
            await asyncio.wait(set(self._unwritten), timeout=LAST_WAIT_S)
        for writing in set(self._unwritten):
            log.error("the store is away, and the result of %s is lost", writing.get_name())
            writing.cancel()

    def _written(self, writing: asyncio.Task[None]) -> None:
        self._unwritten.discard(writing)
        if not writing.cancelled():
            writing.exception()  # read, so that asyncio does not log it: its run has got it

    async def _repeat(
        self, run: Run, call: Callable[[bool], Awaitable[T]], *, for_ever: bool = False
    ) -> T:
        """Repeat `call` while the store is away. Its argument says whether an earlier call may have
        been committed."""
        loop = asyncio.get_running_loop()
        write = _Write(run, loop.time())
        self._writes.add(write)
        try:
            try:
                return await call(False)
            except StoreUnavailable as error:
                log.warning("message %s waits for the store: %s", run.message.id, error)
            write.since = -math.inf
            deadline = math.inf if for_ever else loop.time() + WAIT_S
            pause = PAUSE_S
            while True:
                await asyncio.sleep(pause)
                try:
                    return await call(True)
                except StoreUnavailable:
                    if loop.time() >= deadline:
                        raise
                pause = min(1.0, pause * 2)
        finally:
            self._writes.discard(write)
