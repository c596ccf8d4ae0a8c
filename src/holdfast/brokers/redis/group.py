"""A queue as one consumer group sees it: reading, taking back, settling.

Every entry that Redis handed to this consumer is either in somebody's hands (`_held`) or in the
buffer. A read whose answer got lost leaves entries that are neither: they are found by reading what
this consumer has pending.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from holdfast.core.broker import Delivery
from holdfast.core.errors import BrokerError

from .entries import LEVELS, NORMAL, delivery_of, key_of
from .wire import AnswerUnknown, Wire

log = logging.getLogger("holdfast.brokers.redis")

RELEASED = "_released"
"""The consumer that holds what was given back, marked by an age that nothing else has."""
LOOK_S = 1.0
"""How often released and forgotten entries are looked for."""
CHUNK = 500

_RELEASE = """
local moved = 0
for i = 3, #ARGV do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], '_released', 0, ARGV[i],
               'IDLE', '315360000000', 'JUSTID')
    moved = moved + 1
  end
end
return moved
"""
"""Only what is still ours: another consumer may have it by now."""
_FORGET = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  return redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
return -1
"""
"""DELCONSUMER deletes what is pending: it is asked for only where nothing is, in one step."""

Place = tuple[int, bytes]
"""Level and entry id."""


class Group:
    """One queue, one group, one consumer name."""

    def __init__(
        self, wire: Wire, queue: str, group: str, consumer: str, *, lease_s: float, scan: bool
    ) -> None:
        self._wire = wire
        self._queue = queue
        self._group = group
        self._consumer = consumer
        self._lease_ms = int(lease_s * 1000)
        self._scan = scan
        """Take stale entries by XPENDING and XCLAIM: servers before 6.2 have no XAUTOCLAIM."""
        self._keys = {level: key_of(queue, level) for level in LEVELS}
        self._buffer: dict[int, deque[Delivery]] = {level: deque() for level in LEVELS}
        self._held: set[Place] = set()
        self._made = False
        self._unsure = True
        """An answer may have got lost: look for entries that nobody holds."""
        self._high = False
        """There were messages above the usual priority at the last look."""
        self._looked_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    # -- receive ----------------------------------------------------------------------------------

    async def receive(self, limit: int, wait: float) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while True:
            if self._high or not any(self._buffer.values()):
                left = deadline - loop.time()
                await self._read(limit, min(max(0.0, left), LOOK_S), max(0.0, left))
            if self._closed:
                return []
            taken = self._take(limit)
            if taken or loop.time() >= deadline:
                return taken

    async def _read(self, limit: int, block_s: float, patience_s: float) -> None:
        """One read at a time. A caller that gives up leaves it to the next one."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._fill(limit, block_s))
        reading = self._reading
        await asyncio.wait({reading}, timeout=patience_s + self._grace_s)
        if reading.done():
            if self._reading is reading:
                self._reading = None
            if not reading.cancelled():
                reading.result()

    @property
    def _grace_s(self) -> float:
        return self._wire.timeout_s * 2

    async def _fill(self, limit: int, block_s: float) -> None:
        try:
            await self._make()
            await self._look_after()
            if not await self._read_now(limit) and block_s > 0:
                keys = list(self._keys.values())
                count = ("COUNT", limit, "BLOCK", max(1, int(block_s * 1000)))
                await self._take_in(
                    await self._wire.ask_one(
                        *self._reader, *count, "STREAMS", *keys, *[">"] * len(keys), wait_s=block_s
                    )
                )
        except AnswerUnknown:
            self._unsure = True
            raise
        except BrokerError as error:
            if "NOGROUP" not in str(error):
                raise
            # Somebody removed the stream or the group: it is made again, from the beginning.
            log.warning("%s: the group %s was gone, and is made again", self._queue, self._group)
            self._made = False

    async def _read_now(self, limit: int) -> int:
        """What is there, the highest priority first; without waiting."""
        lengths = [("XLEN", self._keys[level]) for level in (3, 2)]
        if not self._high:
            answers = await self._ask(*lengths, self._read_command(NORMAL, limit))
            found = await self._take_in(answers[2])
            if not answers[0] and not answers[1]:
                if not found:
                    found = await self._read_level(0, limit)
                return found
            self._high = True
        found = 0
        for level in LEVELS:
            found += len(self._buffer[level])
            if found < limit:
                found += await self._read_level(level, limit - found)
            if level > NORMAL:
                self._high = found > 0
        return found

    async def _read_level(self, level: int, limit: int) -> int:
        (answer,) = await self._ask(self._read_command(level, limit))
        return await self._take_in(answer)

    def _read_command(self, level: int, limit: int, since: str = ">") -> Sequence[Any]:
        return (*self._reader, "COUNT", limit, "STREAMS", self._keys[level], since)

    @property
    def _reader(self) -> Sequence[str]:
        return ("XREADGROUP", "GROUP", self._group, self._consumer)

    async def _take_in(self, answer: Any, count: int = 1) -> int:
        """Entries of an XREADGROUP into the buffer."""
        found = 0
        for key, entries in answer or ():
            level = self._level_of(key)
            for entry, fields in entries:
                self._keep(delivery_of(self._queue, level, entry, fields, count))
            found += len(entries)
        return found

    def _keep(self, delivery: Delivery) -> None:
        level, _ = delivery.tag
        self._buffer[level].append(delivery)

    def _level_of(self, key: bytes) -> int:
        text = key.decode()
        return next(level for level, known in self._keys.items() if known == text)

    def _take(self, limit: int) -> list[Delivery]:
        taken: list[Delivery] = []
        for level in LEVELS:
            waiting = self._buffer[level]
            while waiting and len(taken) < limit:
                taken.append(waiting.popleft())
        self._held.update(delivery.tag for delivery in taken)
        return taken

    # -- what nobody works on ---------------------------------------------------------------------

    async def _make(self) -> None:
        """The group, from the first entry on: what was sent before it existed is not lost."""
        if self._made:
            return
        create = [
            ("XGROUP", "CREATE", key, self._group, "0", "MKSTREAM") for key in self._keys.values()
        ]
        for answer in await self._wire.ask(*create):
            if isinstance(answer, ResponseError) and "BUSYGROUP" not in str(answer):
                raise self._wire.refused(answer)
        self._made = True

    async def _look_after(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._unsure:
            await self._find_own()
            self._unsure = False
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            for level in LEVELS:
                await self._take_back(level)

    async def _find_own(self) -> None:
        """Entries that were given to this consumer in an answer that it never saw."""
        for level in LEVELS:
            since = b"0"
            while True:
                (answer,) = await self._ask(self._read_command(level, CHUNK, since.decode()))
                entries = answer[0][1] if answer else []
                known = {d.tag[1] for d in self._buffer[level]}
                for entry, fields in entries:
                    if (level, entry) not in self._held and entry not in known:
                        self._keep(delivery_of(self._queue, level, entry, fields, 1))
                if len(entries) < CHUNK:
                    break
                since = entries[-1][0]

    async def _take_back(self, level: int) -> None:
        """What was released, and what its consumer has had for too long, is ours now."""
        key = self._keys[level]
        # A stranger's name and the number of deliveries stand in XPENDING alone.
        pending = ("XPENDING", key, self._group)
        if self._scan:
            (found,) = await self._ask((*pending, "-", "+", CHUNK))
            stale = [entry for entry, _, idle, _ in found or () if idle >= self._lease_ms]
            claim = ("XCLAIM", key, self._group, self._consumer, self._lease_ms)
            claimed = (await self._ask((*claim, *stale)))[0] if stale else ()
        else:
            auto = ("XAUTOCLAIM", key, self._group, self._consumer, self._lease_ms, "0-0")
            found, answer = await self._ask(
                (*pending, "IDLE", self._lease_ms, "-", "+", CHUNK), (*auto, "COUNT", CHUNK)
            )
            claimed = answer[1]
        before = {entry: (consumer, count) for entry, consumer, _, count in found or ()}
        for entry, fields in filter(None, claimed):
            consumer, count = before.get(entry, (b"", 1))
            self._held.discard((level, entry))
            self._keep(delivery_of(self._queue, level, entry, fields, count + 1))
            if consumer.decode() not in (RELEASED, self._consumer, ""):
                log.warning(
                    "%s: entry %s was pending with %s for more than %.0f s and is taken over",
                    self._queue,
                    entry.decode(),
                    consumer.decode(),
                    self._lease_ms / 1000,
                )

    # -- settle -----------------------------------------------------------------------------------

    def ack_commands(self, places: Iterable[Place], *, delete: bool) -> list[Sequence[Any]]:
        commands: list[Sequence[Any]] = []
        for level, ids in _by_level(places).items():
            key = self._keys[level]
            commands.append(("XACK", key, self._group, *ids))
            if delete:
                commands.append(("XDEL", key, *ids))
        return commands

    def release_commands(self, places: Iterable[Place]) -> list[Sequence[Any]]:
        return [
            ("EVAL", _RELEASE, 1, self._keys[level], self._group, self._consumer, *ids)
            for level, ids in _by_level(places).items()
        ]

    def settled(self, acked: Iterable[Place], released: Sequence[Place]) -> None:
        self._held.difference_update(acked)
        self._held.difference_update(released)
        if released:
            self._looked_at = float("-inf")  # they are there for the taking

    async def extend(self, places: Iterable[Place]) -> None:
        """Make them young again. JUSTID: it is no delivery, and counts as none."""
        commands = [
            ("XCLAIM", self._keys[level], self._group, self._consumer, 0, *ids, "JUSTID")
            for level, ids in _by_level(places).items()
        ]
        if commands:
            await self._ask(*commands)

    async def close(self) -> None:
        """Hand everything back, and leave no consumer behind."""
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if not self._made:
            return
        for level in LEVELS:
            (answer,) = await self._ask(
                ("XPENDING", self._keys[level], self._group, "-", "+", 10_000, self._consumer)
            )
            mine = [(level, entry) for entry, *_ in answer or ()]
            forget = ("EVAL", _FORGET, 1, self._keys[level], self._group, self._consumer)
            await self._ask(*self.release_commands(mine), forget)

    async def _ask(self, *commands: Sequence[Any]) -> list[Any]:
        answers = await self._wire.ask(*commands)
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise self._wire.refused(answer)
        return answers


def _by_level(places: Iterable[Place]) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for level, entry in places:
        found.setdefault(level, []).append(entry)
    return found
