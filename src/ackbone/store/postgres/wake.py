"""Telling other processes that there is work: NOTIFY, gathered, outside of the hot transactions.

A NOTIFY inside a transaction takes a lock over the whole database at its commit; here it is a
statement of its own, at most `1 / PAUSE_S` of them a second. One that gets lost costs a second at
most (whoever waits looks by itself that often), so nothing here is allowed to raise.
"""

from __future__ import annotations

import asyncio
import logging
import os

import psycopg

from ackbone.core.errors import StoreError

from .database import Database

log = logging.getLogger("ackbone.store")

WORK, OUTGOING = "w", "o"
"""What there may be: messages to run; replies and follow-ups to carry out."""
CHANNEL = "ackbone"
PAUSE_S = 0.02
_AGAIN_S = (0.1, 5.0)
_CANCELLED_S = 0.5


class Bells:
    """Rings in this process at once, in the others soon after."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[asyncio.Event, str] = {}
        self._me = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._rung: set[str] = set()
        self._to_tell = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for work in (self._listen(), self._notify()):
            self._tasks.append(asyncio.create_task(work, name="ackbone-bells"))

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        left = set(tasks)
        while left:  # before Python 3.12 the driver may drop a cancellation while it connects
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=_CANCELLED_S)
        await asyncio.gather(*tasks, return_exceptions=True)

    def subscribe(self, topics: str = WORK) -> asyncio.Event:
        event = asyncio.Event()
        self._waiting[event] = topics
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._waiting.pop(event, None)

    def ring(self, topics: str) -> None:
        """There may be something to do."""
        self.ring_here(topics)
        self._rung.update(topics)
        self._to_tell.set()

    def ring_here(self, topics: str) -> None:
        for event, wanted in self._waiting.items():
            if not set(wanted).isdisjoint(topics):
                event.set()

    async def _notify(self) -> None:
        while True:
            await self._to_tell.wait()
            self._to_tell.clear()
            topics, self._rung = "".join(sorted(self._rung)), set()
            try:
                await self._database.read(
                    "SELECT pg_notify($1, $2)", CHANNEL, f"{topics} {self._me}"
                )
            except (StoreError, psycopg.Error) as error:
                log.debug("other processes were not told of work: %s", error)
            await asyncio.sleep(PAUSE_S)

    async def _listen(self) -> None:
        pause, longest = _AGAIN_S
        while True:
            try:
                conn = await self._database.connect()
                async with conn:
                    await conn.execute(f"LISTEN {CHANNEL}")
                    pause = _AGAIN_S[0]
                    self.ring_here(WORK + OUTGOING)  # whatever was missed meanwhile
                    async for notice in conn.notifies():
                        topics, _, sender = notice.payload.partition(" ")
                        if sender != self._me:
                            self.ring_here(topics)
            except (psycopg.Error, OSError) as error:
                log.debug("not listening for work just now: %s", error)
            await asyncio.sleep(pause)
            pause = min(longest, pause * 2)
