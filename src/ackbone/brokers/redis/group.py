"""A queue as one consumer group sees it: reading, taking back, settling.

Every entry that Redis handed to this consumer was either given out (`_held`) or is in the buffer. A
read whose answer got lost leaves entries that are neither. They are found by reading what this
consumer has pending. A server may execute the command of an abandoned connection at any later time,
so the counts are also compared from time to time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from ackbone.core.broker import Delivery, Result, Settlement, Verb
from ackbone.core.errors import BrokerError

from .entries import LEVELS, NORMAL, delivery_of, key_of
from .pending import (
    CHUNK,
    FORGET,
    MAKE_GROUP,
    RELEASED,
    START,
    Owned,
    after,
    counts,
    gone,
    others,
    owners,
    place_in_order,
)
from .server_time import ServerTime
from .settlements import Settlements, by_level
from .wire import AnswerUnknown, Wire

log = logging.getLogger("ackbone.brokers.redis")

CLEAN_S = 60.0
"""How often to look for consumers of processes that have ended."""
_NO_REJECT = BrokerError("Redis Streams have no dead-letter queue")
LOOK_S = 1.0
"""How often to look for released and abandoned entries."""


class Group:
    """One queue, one group, one consumer name."""

    def __init__(
        self,
        wire: Wire,
        queue: str,
        group: str,
        consumer: str,
        *,
        lease_s: float,
        scan: bool,
        delete_acked: str,
    ) -> None:
        self._wire = wire
        self._ask = wire.ask_all
        self._queue = queue
        self._group = group
        self._consumer = consumer
        self._lease_ms = int(lease_s * 1000)
        self._scan = scan
        """Take stale entries by XPENDING and XCLAIM: servers before 6.2 have no XAUTOCLAIM."""
        self._keys = {level: key_of(queue, level) for level in LEVELS}
        self._buffer: dict[int, dict[bytes, Delivery]] = {level: {} for level in LEVELS}
        self._held: dict[int, set[bytes]] = {level: set() for level in LEVELS}
        self._unsent = Settlements(wire, self._keys, group, consumer, delete_acked=delete_acked)
        self._time = ServerTime(wire)
        self._made = False
        self._unsure = True
        """True if an answer may be lost: look for entries that are neither held nor buffered."""
        self._high = False
        """True if the last look found messages above the normal priority."""
        self._looked_at = float("-inf")
        self._cleaned_at = float("-inf")
        self._cursors = dict.fromkeys(LEVELS, START)
        """How far the scan for stale entries of other consumers has come."""
        self._others: dict[int, list[str]] = {}
        """Our other consumers that had pending entries when this one last looked."""
        self._ended: frozenset[str] = frozenset()
        """Those of them whose workers have ended."""
        self._sole = False
        """True for the only reader of an ordered queue. It gives out nothing while another
        consumer may have an older entry."""
        self._in_order = True
        """True if no other consumer has an entry that is older than those in the buffer."""
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    # -- receive ----------------------------------------------------------------------------------

    async def receive(self, *, limit: int, wait: float) -> Sequence[Delivery]:
        if limit < 1:
            return []  # Redis takes a count of 0 as "all"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while True:
            if self._high or not self._in_order or not any(self._buffer.values()):
                left = deadline - loop.time()
                await self._read(limit, min(max(0.0, left), LOOK_S), max(0.0, left))
            if self._closed:
                return []
            taken = self._take(limit)
            if taken or loop.time() >= deadline:
                return taken

    async def _read(self, limit: int, block_s: float, patience_s: float) -> None:
        """Read, one read at a time. When a caller gives up, its read serves the next caller."""
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
        return self._wire.timeout_s

    async def _fill(self, limit: int, block_s: float) -> None:
        try:
            await self._make()
            await self._look_after()
            self._in_order = not self._sole
            if not await self._read_now(limit) and block_s > 0 and not self._more_to_see:
                await self._wait_for_some(limit, block_s)
            if not self._in_order:
                await self._overtake()
            await self._time.look(chain.from_iterable(b.values() for b in self._buffer.values()))
        except AnswerUnknown:
            self._unsure = True
            raise
        except BrokerError as error:
            if "NOGROUP" not in str(error):
                raise
            # Somebody removed the stream or the group. Create it again, from the first entry on.
            log.warning("%s: the group %s is gone; creating it again", self._queue, self._group)
            self._made = False

    async def _wait_for_some(self, limit: int, block_s: float) -> None:
        keys = list(self._keys.values())
        count = ("COUNT", limit, "BLOCK", max(1, int(block_s * 1000)))
        streams = ("STREAMS", *keys, *[">"] * len(keys))
        self._take_in(await self._wire.ask_one(*self._reader, *count, *streams, wait_s=block_s))

    @property
    def _more_to_see(self) -> bool:
        """True if entries are buffered, or if the scan for stale entries is not finished."""
        return any(self._buffer.values()) or any(at != START for at in self._cursors.values())

    async def _read_now(self, limit: int) -> int:
        """Read entries that are there, the highest priority first, without waiting."""
        lengths = [("XLEN", self._keys[level]) for level in (3, 2)]
        if not self._high:
            answers = await self._ask(*lengths, self._read_command(NORMAL, limit))
            found = self._take_in(answers[2])
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
        return self._take_in(answer)

    def _read_command(self, level: int, limit: int, since: str = ">") -> Sequence[Any]:
        return (*self._reader, "COUNT", limit, "STREAMS", self._keys[level], since)

    @property
    def _reader(self) -> Sequence[str]:
        return ("XREADGROUP", "GROUP", self._group, self._consumer)

    def _take_in(self, answer: Any) -> int:
        """Put the entries of an XREADGROUP into the buffer."""
        found = 0
        for key, entries in answer or ():
            level = self._level_of(key)
            self._buffer[level].update(
                [(e, delivery_of(self._queue, level, e, fields, 1)) for e, fields in entries]
            )
            found += len(entries)
        return found

    def _keep(
        self, level: int, entry: bytes, fields: list[bytes] | None, owned: Owned | None = None
    ) -> None:
        """Put one entry into the buffer. `owned`: its consumer before it was taken over."""
        count = 1 if owned is None else owned.deliveries + 1
        delivery = delivery_of(self._queue, level, entry, fields, count)
        taken_from = None
        if owned is not None and owned.consumer not in (RELEASED, self._consumer):
            taken_from = owned.consumer
        self._buffer[level][entry] = msgspec.structs.replace(
            delivery, entry=entry.decode(), taken_from=taken_from
        )

    def _level_of(self, key: bytes) -> int:
        text = key.decode()
        return next(level for level, known in self._keys.items() if known == text)

    def _take(self, limit: int) -> list[Delivery]:
        taken: list[Delivery] = []
        for level in LEVELS if self._in_order else ():
            waiting = self._buffer[level]
            now = list(waiting)[: limit - len(taken)]
            taken += [waiting.pop(entry) for entry in now]
            self._held[level].update(now)
        return self._time.timed(taken)

    # -- stale and lost entries -------------------------------------------------------------------

    async def _make(self) -> None:
        """Create the group, from the first entry on: older messages are not lost."""
        if self._made:
            return
        create = [("EVAL", MAKE_GROUP, 1, key, self._group) for key in self._keys.values()]
        for answer in await self._wire.ask(*create):
            if isinstance(answer, ResponseError) and "BUSYGROUP" not in str(answer):
                raise self._wire.refused(answer)
        self._made = True

    async def _look_after(self) -> None:
        if self._unsent:
            await self._send()
        if self._unsure:
            for level in LEVELS:
                await self._find_own(level)
            self._unsure = False
        under_way = [level for level, cursor in self._cursors.items() if cursor != START]
        now = asyncio.get_running_loop().time()
        if not under_way and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            under_way = list(LEVELS)
        for level in under_way:
            await self._take_back(level)
        if now - self._cleaned_at >= CLEAN_S:
            self._cleaned_at = now
            await self._remove_ended()

    async def _remove_ended(self) -> None:
        """Remove consumers of ended processes. Each process would leave one behind for ever."""
        for key in self._keys.values():
            (found,) = await self._ask(("XINFO", "CONSUMERS", key, self._group))
            for name in gone(found, self._consumer, self._lease_ms):
                await self._ask(("EVAL", FORGET, 1, key, self._group, name))

    def _known(self, level: int) -> set[bytes]:
        return self._held[level].union(self._buffer[level])

    async def _find_own(self, level: int) -> None:
        """Find entries that Redis gave to this consumer in an answer that got lost."""
        since = START
        while True:
            before = self._known(
                level
            )  # an entry that is settled meanwhile must not be found again
            (answer,) = await self._ask(self._read_command(level, CHUNK, since.decode()))
            entries = answer[0][1] if answer else []
            known = before | self._known(level)
            for entry, fields in entries:
                if entry not in known:
                    self._keep(level, entry, fields)
            if len(entries) < CHUNK:
                break
            since = entries[-1][0]

    async def _find_missed(self, level: int, summary: Sequence[Any]) -> None:
        """Find entries that are pending with this consumer, unknown to it, after a late answer."""
        if counts(summary).get(self._consumer, 0) > len(self._known(level)):
            await self._find_own(level)

    async def _take_back(self, level: int) -> None:
        """Take released entries, and entries that another consumer has had for too long."""
        key, since = self._keys[level], self._cursors[level]
        # Only XPENDING reports the consumer and the number of deliveries.
        pending = ("XPENDING", key, self._group)
        if self._scan:
            found, summary = await self._ask((*pending, since, "+", CHUNK), pending)
            stale = [entry for entry, _, idle, _ in found if idle >= self._lease_ms]
            claim = ("XCLAIM", key, self._group, self._consumer, self._lease_ms)
            claimed = (await self._ask((*claim, *stale)))[0] if stale else ()
            self._cursors[level] = after(found[-1][0]) if len(found) == CHUNK else START
        else:
            auto = ("XAUTOCLAIM", key, self._group, self._consumer, self._lease_ms, since)
            found, answer, summary = await self._ask(
                (*pending, "IDLE", self._lease_ms, since, "+", CHUNK),
                (*auto, "COUNT", CHUNK),
                pending,
            )
            self._cursors[level], claimed = answer[:2]
        before = owners(found)
        taken = self._take_claimed(level, claimed, before)
        for consumer, n in Counter(before[e].consumer for e in taken if e in before).items():
            if consumer not in (RELEASED, self._consumer):
                log.warning(
                    "%s: taking over %d entries that were pending with %s for more than %.0f s",
                    self._queue,
                    n,
                    consumer,
                    self._lease_ms / 1000,
                )
        await self._find_missed(level, summary)
        self._others[level] = others(summary, self._consumer)
        for consumer in self._ended.intersection(self._others[level]):
            n = await self._claim_from(level, consumer)
            log.warning("%s: taking over %d entries of %s, which ended", self._queue, n, consumer)

    @property
    def holders(self) -> frozenset[str]:
        """Our other consumers that had pending entries when this one last looked."""
        return frozenset(chain.from_iterable(self._others.values())) - {RELEASED}

    def take_from(self, consumers: Collection[str]) -> None:
        """Take the entries of these consumers at the next look, without waiting for the lease."""
        self._ended = frozenset(consumers)
        if consumers:
            self._looked_at = float("-inf")

    def _take_claimed(
        self, level: int, claimed: Iterable[Any], before: Mapping[bytes, Owned]
    ) -> list[bytes]:
        taken = []
        for entry, fields in filter(None, claimed):
            self._held[level].discard(entry)
            self._keep(level, entry, fields, before.get(entry, Owned(self._consumer, 1)))
            taken.append(entry)
        return taken

    # -- one reader, in order ---------------------------------------------------------------------

    def take_over(self) -> None:
        """Become the only reader of an ordered queue."""
        self._sole, self._in_order = True, False

    async def _overtake(self) -> None:
        """Take the entries of our other consumers: they are older than those just read.

        This is repeated at each read. A process that was suspended does not know that it was
        replaced, and may read more.
        """
        summaries = await self._ask(
            *[("XPENDING", key, self._group) for key in self._keys.values()]
        )
        for level, summary in zip(self._keys, summaries, strict=True):
            await self._find_missed(level, summary)
            for consumer in others(summary, self._consumer):
                taken = await self._claim_from(level, consumer)
                what = "1 entry" if taken == 1 else f"{taken} entries"
                log.info("%s: took over %s of %s", self._queue, what, consumer)
            in_order = sorted(self._buffer[level].items(), key=lambda item: place_in_order(item[0]))
            self._buffer[level] = dict(in_order)
        self._in_order = True

    async def _claim_from(self, level: int, consumer: str) -> int:
        key, taken = self._keys[level], 0
        while True:
            (found,) = await self._ask(
                ("XPENDING", key, self._group, "-", "+", CHUNK, consumer),
            )
            before = owners(found)
            if not before:
                return taken
            # With the idle time, an entry that yet another consumer takes meanwhile is left to it.
            idle_ms = min(idle for _, _, idle, _ in found)
            claim = ("XCLAIM", key, self._group, self._consumer, idle_ms)
            (claimed,) = await self._ask((*claim, *before))
            taken += len(self._take_claimed(level, claimed, before))

    # -- settle -----------------------------------------------------------------------------------

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        """ACK or RELEASE. Settlements that do not reach the server are sent at the next read."""
        reject = Verb.REJECT
        self._unsent.add({each.delivery.tag: each for each in batch if each.verb is not reject})
        await self._send()
        return [
            Result(
                id=each.delivery.identity or "", error=_NO_REJECT if each.verb is reject else None
            )
            for each in batch
        ]

    async def _send(self) -> None:
        confirmed = await self._unsent.send()
        for level, entries in by_level(confirmed).items():
            self._held[level].difference_update(entries)
        release = Verb.RELEASE
        if any(item.verb is release for item in confirmed.values()):
            self._looked_at = float("-inf")  # the released entries can be taken at once

    async def extend(self, batch: Sequence[Delivery]) -> None:
        """Renew the lease of entries that are being processed."""
        commands = self._unsent.extend_commands([delivery.tag for delivery in batch])
        if commands:
            await self._ask(*commands)

    async def pause(self) -> None:
        """Release the entries in the buffer, so that other consumers find them at once."""
        if self._reading is not None:  # cancelled, it could leave entries pending unseen
            await asyncio.wait({self._reading})
        back = [delivery for level in self._buffer.values() for delivery in level.values()]
        for level, waiting in self._buffer.items():
            self._held[level].update(waiting)
            waiting.clear()
        if back:
            await self.settle([Settlement(delivery=each, verb=Verb.RELEASE) for each in back])

    async def close(self) -> None:
        """Release everything that this consumer holds, and remove the consumer."""
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if not self._made:
            return
        if self._unsent:
            await self._send()
        for level, key in self._keys.items():
            pending = ("XPENDING", key, self._group, "-", "+", CHUNK, self._consumer)
            while mine := (await self._ask(pending))[0]:
                await self._ask(*self._unsent.release_commands((level, e) for e, *_ in mine))
            await self._ask(("EVAL", FORGET, 1, key, self._group, self._consumer))
