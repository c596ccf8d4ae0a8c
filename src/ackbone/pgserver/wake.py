"""Wake-ups for other processes: NOTIFY, gathered, outside of the hot transactions.

A NOTIFY inside a transaction takes a lock over the whole database at its commit. Here it is a
statement of its own, at most `1 / PAUSE_S` of them a second. A wake-up that gets lost costs a
second at most (every waiting process looks by itself that often), so nothing here may raise.
"""

from __future__ import annotations

import asyncio
import logging
import os

import psycopg

from ackbone.core.errors import StoreError

from .connections import Connections

log = logging.getLogger("ackbone.store")

CHANNEL = "ackbone"
WORK, OUTGOING = "w", "o"
"""Topics that processes wait for: messages to run; replies and follow-ups to carry out."""
PAUSE_S = 0.02
_AGAIN_S = (0.1, 5.0)
_CANCELLED_S = 0.5


class WakeUps:
    """Wakes this process at once, and other processes soon after."""

    def __init__(self, database: Connections) -> None:
        self._database = database
        self._waiting: dict[asyncio.Event, str] = {}
        self._me = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._wanted: set[str] = set()
        self._is_wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *, listen: bool = True) -> None:
        self._tasks.append(asyncio.create_task(self._notify(), name="ackbone-wake-ups"))
        if listen:
            self.listen()

    def listen(self) -> None:
        """Be woken by other processes, too."""
        self._tasks.append(asyncio.create_task(self._listen(), name="ackbone-listen"))

    async def stop(self) -> None:
        if self._wanted:  # nobody will say it later
            await self._say()
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

    def wake(self, topics: str) -> None:
        """Wake all processes that wait for one of these topics."""
        self.wake_here(topics)
        self._wanted.update(topics)
        self._is_wanted.set()

    def wake_here(self, topics: str) -> None:
        for event, wanted in self._waiting.items():
            if not set(wanted).isdisjoint(topics):
                event.set()

    async def _notify(self) -> None:
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            await self._say()
            await asyncio.sleep(PAUSE_S)

    async def _say(self) -> None:
        topics, self._wanted = "".join(sorted(self._wanted)), set()
        try:
            await self._database.read("SELECT pg_notify($1, $2)", CHANNEL, f"{topics} {self._me}")
        except (StoreError, psycopg.Error) as error:
            log.debug("could not wake other processes: %s", error)

    async def _listen(self) -> None:
        pause, longest = _AGAIN_S
        while True:
            try:
                conn = await self._database.connect()
                async with conn:
                    await conn.execute(f"LISTEN {CHANNEL}")
                    pause = _AGAIN_S[0]
                    self.wake_here(WORK + OUTGOING)  # wake-ups may have been missed meanwhile
                    async for notice in conn.notifies():
                        topics, _, sender = notice.payload.partition(" ")
                        if sender != self._me:
                            self.wake_here(topics)
            except (psycopg.Error, OSError) as error:
                log.debug("not listening for wake-ups: %s", error)
            await asyncio.sleep(pause)
            pause = min(longest, pause * 2)
