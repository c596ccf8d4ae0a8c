"""`RedisBroker`: the broker port on Redis Streams."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import ClassVar

import msgspec
from redis.exceptions import ResponseError

from ackbone.core.broker import (
    Capabilities,
    Delivery,
    Durability,
    Health,
    Outgoing,
    QueueStats,
    Result,
    Subscription,
)
from ackbone.core.clock import Clock
from ackbone.core.errors import (
    AckboneError,
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    InvalidMessage,
    MessageTooLarge,
    PublishUnknown,
)
from ackbone.core.findings import Check, unanswered
from ackbone.core.ids import new_id
from ackbone.core.task_protocol import ONCE

from .address import DELETE_ACKED, TIMEOUT_S, VISIBILITY_TIMEOUT_S, read_address
from .entries import LEVELS, fields_of, key_of
from .group import Group
from .once import once_command
from .pending import BIND, OURS
from .server_checks import durability, judge, look, unsafe
from .streams import copies, stats_of, trim
from .wire import Answer, AnswerUnknown, Command, Wire

log = logging.getLogger("ackbone.brokers.redis")

MAX_BODY = 64 * 1024 * 1024
AUTOCLAIM_SINCE = (6, 2)


class RedisBroker:
    """`Broker`, and every optional role but `Transactional`, on one Redis server.

    `lease_s`: how long an entry may be pending without a sign of life before another worker takes
    it. `delete_acked`: `auto` deletes acknowledged entries unless another group reads the stream.
    `allow_unsafe`: accept a server that may lose messages.
    """

    _warned_of: ClassVar[set[str]] = set()
    """Servers that this process has logged a warning about. It opens brokers more than once."""

    def __init__(
        self,
        url: str,
        *,
        lease_s: float = VISIBILITY_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
        delete_acked: str = "auto",
        allow_unsafe: bool = False,
        scan: bool | None = None,
    ) -> None:
        if delete_acked not in DELETE_ACKED:
            raise ConfigError([f"broker: delete_acked must be one of {', '.join(DELETE_ACKED)}"])
        self._url = url
        self._timeout_s = timeout_s
        self._delete_acked = delete_acked
        self._allow_unsafe = allow_unsafe
        self._scan = scan
        self._url_now: Callable[[], str] | None = None
        self._wire: Wire | None = None
        self._why_closed = "the Redis broker is not open"
        self._groups: dict[tuple[str, str], Group] = {}
        self._queues: set[str] = set()
        self.name_consumer(f"{socket.gethostname()}:{os.getpid()}")
        self.capabilities = Capabilities(
            durability=Durability.PROCESS,
            priority=True,
            ttl=True,
            ordered=True,
            release=True,
            lease_s=lease_s,
            max_body=MAX_BODY,
        )

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> RedisBroker:
        """Read `redis://[user:password@]host[:port][/db]`, `rediss://` or `unix:///path`.

        Parameters after a `?`: visibility_timeout_s, timeout_s, delete_acked, allow_unsafe, and
        those of the driver that `address.py` lists.
        """
        found = read_address(url)
        return cls(
            found.url,
            lease_s=found.lease_s,
            timeout_s=found.timeout_s,
            delete_acked=found.delete_acked,
            allow_unsafe=found.allow_unsafe,
        )

    def name_consumer(self, name: str) -> str:
        """Set the name that XINFO CONSUMERS shows. It is random, because process ids are reused."""
        self._consumer = f"{OURS}{new_id()[-6:]}-{name}"
        return self._consumer

    def renew_by(self, url_now: Callable[[], str]) -> None:
        self._url_now = lambda: read_address(url_now()).url

    # -- open and close ---------------------------------------------------------------------------

    async def open(self) -> None:
        if self._wire is not None:
            return
        wire = Wire(self._url, timeout_s=self._timeout_s, url_now=self._url_now)
        try:
            seen = await look(wire)
        except BaseException as error:
            if isinstance(error, BrokerUnavailable):
                self._why_closed = str(error)
            await wire.close()
            raise
        if self._scan is None:  # scanning works on every version
            self._scan = seen.version is None or seen.version < AUTOCLAIM_SINCE
        self.capabilities = msgspec.structs.replace(self.capabilities, durability=durability(seen))
        lost = unsafe(seen)
        if lost and not self._allow_unsafe and wire.where not in self._warned_of:
            self._warned_of.add(wire.where)
            log.warning("%s: %s. See: ackbone doctor", wire.where, "; ".join(lost))
        self._wire = wire

    async def close(self) -> None:
        if self._wire is None:
            return
        wire, self._wire = self._wire, None
        groups, self._groups = list(self._groups.values()), {}
        try:
            await asyncio.gather(*(group.close() for group in groups))
        except BrokerError as error:
            log.warning("%s; pending entries come back when their lease is over", error)
        finally:
            await wire.close()

    @property
    def wire(self) -> Wire:
        if self._wire is None:
            raise BrokerUnavailable(self._why_closed)
        return self._wire

    # -- publish ----------------------------------------------------------------------------------

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        wire = self.wire
        self._queues.add(queue)
        results: dict[int, Result] = {}
        commands: list[Command] = []
        plain: list[int] = []
        marked: list[int] = []
        for n, out in enumerate(batch):
            try:
                command = _xadd(queue, out)
            except InvalidMessage as error:
                results[n] = Result(id=out.id, error=error)
                continue
            if ONCE in out.headers:
                marked.append(n)
            else:
                plain.append(n)
                commands.append(command)
        if marked:
            commands.append(once_command(queue, [batch[n] for n in marked]))
        asked = [*plain, *marked]
        answers: list[Answer] = []
        if commands:
            try:
                answers = await wire.ask(*commands)
            except AnswerUnknown as error:
                raise PublishUnknown([batch[n].id for n in asked], str(error)) from error
        if marked:  # one script publishes all of them, so they share one answer
            answers += [answers[-1]] * (len(marked) - 1)
        for n, answer in zip(asked, answers, strict=True):
            refused = wire.refused(answer) if isinstance(answer, ResponseError) else None
            results[n] = Result(id=batch[n].id, error=refused)
        return [results[n] for n in range(len(batch))]

    # -- read -------------------------------------------------------------------------------------

    async def subscribe(self, sub: Subscription, *, room: int) -> Group:
        return self._group(sub, self._delete_acked)

    async def subscribe_beside(self, sub: Subscription, *, room: int) -> Group:
        return self._group(sub, "never")

    def _group(self, sub: Subscription, delete_acked: str) -> Group:
        wire = self.wire
        self._queues.add(sub.queue)
        name = (sub.queue, sub.group)
        if name not in self._groups:
            self._groups[name] = Group(
                wire,
                sub.queue,
                sub.group,
                self._consumer,
                lease_s=self.capabilities.lease_s or VISIBILITY_TIMEOUT_S,
                scan=bool(self._scan),
                delete_acked=delete_acked,
            )
        return self._groups[name]

    async def bind(self, sub: Subscription, store: str, *, for_s: float) -> str | None:
        if self._allow_unsafe:
            return None
        key = f"{{{sub.queue}}}:store:{sub.group}"
        owner = await self.wire.ask_one("EVAL", BIND, 1, key, store, int(for_s * 1000))
        found = owner.decode()
        return None if found == store else found

    async def trim(self, queue: str, *, older_than_s: float) -> int:
        return await trim(
            self.wire, queue, older_than_s=older_than_s, by_minid=not bool(self._scan)
        )

    def copies(self, sub: Subscription) -> AsyncIterator[Sequence[Delivery]]:
        return copies(self.wire, sub.queue, sub.group)

    # -- health and statistics -----------------------------------------------------------------

    async def examine(self, queues: Collection[str] = ()) -> list[Check]:
        wire = Wire(self._url, timeout_s=self._timeout_s)
        try:
            return judge(await look(wire), wire.where, allow_unsafe=self._allow_unsafe)
        except BrokerError as error:
            return [unanswered("redis", error)]
        finally:
            await wire.close()

    async def health(self) -> Health:
        try:
            await self.wire.ask_one("PING")
        except AckboneError as error:
            return Health(ok=False, detail=str(error))
        return Health(ok=True)

    async def stats(self, queues: Collection[str] = ()) -> Sequence[QueueStats]:
        return [
            await stats_of(
                self.wire, queue, [group for known, group in self._groups if known == queue]
            )
            for queue in sorted(self._queues | set(queues))
        ]


def _xadd(queue: str, out: Outgoing) -> Command:
    if len(out.body) > MAX_BODY:
        raise MessageTooLarge(f"{out.id}: {len(out.body)} bytes, the limit is {MAX_BODY}")
    if out.delay_s > 0:
        raise InvalidMessage(f"{out.id}: Redis Streams cannot hold a message back")
    level = out.priority if out.priority in LEVELS else 1
    return ("XADD", key_of(queue, level), "*", *fields_of(out))
