"""The connection: one batch of commands, one batch of answers, within a deadline."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from hiredis import pack_command
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ackbone.core.errors import BrokerDenied, BrokerError, BrokerUnavailable, ConfigError

log = logging.getLogger("ackbone.brokers.redis")
Command = Sequence[str | bytes | int | float]
Answer = Any
"""An answer of the server. Its errors are values here, so that a bad command fails alone."""

PART, PART_BYTES = 100, 1_000_000
"""Commands and bytes that are sent at a time. The server begins with the first part while the next
one is packed."""
_AWAY = (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError)
_IN_SCRIPT = re.compile(r"Error running script .*: -([A-Z]+) (.*)", re.DOTALL)
_BY_CODE = {"OOM": OutOfMemoryError, "READONLY": ReadOnlyError}
_NOT_NOW = (ClusterDownError, MasterDownError, TryAgainError)
"""Errors of a server that may accept the command later."""
_NOT_NOW_WORDS = ("MISCONF", "NOREPLICAS", "BUSY ")
"""The same, where the driver has no class: disk errors, missing replicas, a long-running script."""


class AnswerUnknown(BrokerUnavailable):
    """The commands were sent and no answer came. The server may have executed them."""


class Wire:
    """Connections to one server. Commands are never repeated automatically."""

    def __init__(
        self, url: str, *, timeout_s: float, url_now: Callable[[], str] | None = None
    ) -> None:
        """`url_now` is called for a new URL when the server refuses the credentials of `url`."""
        self.timeout_s = timeout_s
        self.where = _without_secrets(url)
        self._url = url
        self._url_now = url_now
        self._pool = self._pool_of(url)

    def _pool_of(self, url: str) -> ConnectionPool:
        try:
            return ConnectionPool.from_url(
                url,
                protocol=2,
                socket_connect_timeout=self.timeout_s,
                socket_timeout=None,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError([f"broker: {self.where}: {error}"]) from None

    async def close(self) -> None:
        await self._pool.disconnect()

    async def ask(self, *commands: Command, wait_s: float = 0.0) -> list[Answer]:
        """Return the answers in the order of the commands.

        `wait_s`: how long the server itself may wait (BLOCK). The time limit starts over whenever
        bytes arrive. With one limit for the whole batch, a batch that is too large for a slow
        network would fail and be repeated for ever.

        Raises BrokerUnavailable if nothing was sent, AnswerUnknown if that is not certain.
        """
        deadline = asyncio.get_running_loop().time() + self.timeout_s + wait_s
        pool, connection = await self._connected()
        try:
            async with asyncio.timeout_at(deadline) as limit:
                for n, part in enumerate(_packed(commands)):
                    if n > 0:
                        self._restart(limit, wait_s)
                    await connection.send_packed_command(part, False)
                answers = await _answers(
                    connection, len(commands), lambda: self._restart(limit, wait_s)
                )
        except _AWAY as error:
            await connection.disconnect(nowait=True)
            if _is_denied(error):  # the first command was refused, and all others with it
                raise self._denied(error) from error
            detail = str(error) or f"no answer within {self.timeout_s + wait_s:.1f} s"
            raise AnswerUnknown(f"{self.where}: {detail}") from error
        except BaseException:  # cancelled: the next caller must not read the answer to this call
            await connection.disconnect(nowait=True)
            raise
        finally:
            await pool.release(connection)
        return answers

    def _restart(self, limit: asyncio.Timeout, wait_s: float) -> None:
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s + wait_s)

    async def ask_one(self, *command: str | bytes | int | float, wait_s: float = 0.0) -> Answer:
        """Return the answer to one command. An error of the server is raised as ours."""
        return (await self.ask_all(command, wait_s=wait_s))[0]

    async def ask_all(self, *commands: Command, wait_s: float = 0.0) -> list[Answer]:
        """As `ask`, but the first error of the server is raised as ours."""
        answers = await self.ask(*commands, wait_s=wait_s)
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise self.refused(answer)
        return answers

    def refused(self, error: ResponseError) -> BrokerError:
        """Translate an error of the server."""
        text = str(error)
        if isinstance(error, OutOfMemoryError):
            return BrokerUnavailable(
                f"{self.where}: Redis is full (maxmemory) and took nothing; give it more memory, "
                "or let workers empty the queues"
            )
        if isinstance(error, ReadOnlyError):
            return BrokerUnavailable(
                f"{self.where}: this Redis is a replica and takes no writes; name the primary"
            )
        if isinstance(error, _NOT_NOW) or text.startswith(_NOT_NOW_WORDS):
            return BrokerUnavailable(f"{self.where}: {text}")
        return BrokerError(f"{self.where}: {text}")

    async def _connected(self) -> tuple[ConnectionPool, AbstractConnection]:
        try:
            async with asyncio.timeout(self.timeout_s):
                try:
                    return await _one_of(self._pool)
                except RedisConnectionError as error:  # the driver wraps the server's error
                    refused = isinstance(error.__cause__ or error, AuthenticationError)
                    if not refused or not await self._renewed():
                        raise
                return await _one_of(self._pool)
        except (RedisError, OSError, TimeoutError) as error:
            if _is_denied(error):
                raise self._denied(error) from error
            detail = str(error) or f"no connection within {self.timeout_s:.1f} s"
            raise BrokerUnavailable(f"{self.where}: {detail}") from error

    def _denied(self, error: BaseException) -> BrokerDenied:
        said = str(error).rstrip(".")
        return BrokerDenied(
            f"{self.where} refuses the login: {said}. Correct the user, the password or the number "
            "of the database in `broker`"
        )

    async def _renewed(self) -> bool:
        """Read the URL again. Returns True if it has changed: new connections use the new one."""
        if self._url_now is None:
            return False
        try:
            url = await asyncio.to_thread(self._url_now)
        except ConfigError as error:  # somebody may be editing it at this moment
            log.warning("%s: the credentials are refused: %s", self.where, error)
            return False
        if url == self._url:
            return False
        log.warning("%s: the credentials were refused; using the new ones", self.where)
        self._url, self._pool, old = url, self._pool_of(url), self._pool
        await old.disconnect(inuse_connections=False)
        return True


def _is_denied(error: BaseException) -> bool:
    """Return True if the server refused the login. The driver wraps the server's error."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, AuthenticationError | AuthorizationError):
            return True
        if isinstance(found, ResponseError) and "DB index" in str(found):
            return True
        found = found.__cause__
    return False


async def _one_of(pool: ConnectionPool) -> tuple[ConnectionPool, AbstractConnection]:
    connection: AbstractConnection = await pool.get_connection()  # type: ignore[no-untyped-call]
    return pool, connection


def _packed(commands: Sequence[Command]) -> Iterator[bytes]:
    """Yield the commands as bytes, a part at a time."""
    for at in range(0, len(commands), PART):
        # The driver packs in Python: 17 us for a command of 13 parts. hiredis needs 3 us.
        packed = b"".join([pack_command(tuple(each)) for each in commands[at : at + PART]])  # type: ignore[arg-type]
        if len(packed) <= PART_BYTES:
            yield packed
        else:
            yield from (packed[n : n + PART_BYTES] for n in range(0, len(packed), PART_BYTES))


async def _answers(
    connection: AbstractConnection, count: int, heard: Callable[[], None]
) -> list[Answer]:
    """Wait for `count` answers. Errors of the server are values. `heard` is called when some have
    arrived and others have not.

    This uses the driver's parser without its `read_response`, which takes 8 us for each answer.
    """
    parser: Any = connection._parser
    answers: list[Answer] = []
    reads = 0
    while len(answers) < count:
        answer = parser._reader.gets()
        if answer is NOT_ENOUGH_DATA:
            if reads > 0:
                heard()
            await parser.read_from_socket()
            reads += 1
        elif isinstance(
            answer, RedisConnectionError
        ):  # the server is loading, or refuses the connection
            raise answer
        else:
            answers.append(_unwrapped(answer) if isinstance(answer, ResponseError) else answer)
    return answers


def _unwrapped(error: ResponseError) -> ResponseError:
    """Return the error that a script met. Before 7.0 it is wrapped in the text of another one."""
    found = _IN_SCRIPT.search(str(error))
    if found is None:
        return error
    code, text = found.groups()
    kind = _BY_CODE.get(code)
    return ResponseError(f"{code} {text}") if kind is None else kind(text)


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"
