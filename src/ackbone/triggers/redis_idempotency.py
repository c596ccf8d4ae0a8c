"""`RedisIdempotencyStore`: a trigger's dedup store in Redis, which other programs may share.

| key                       | value                      | lives                               |
|---------------------------|----------------------------|-------------------------------------|
| `idempotency:<key>`       | the result, JSON           | for the window, from its recording  |
| `idempotency-claim:<key>` | the message that may run   | for the window, or until it fails   |

A claim has its own key, because programs that know only the first key take it as a result.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any, TypeVar

from ackbone.core.codecs.values import dumps, loads
from ackbone.core.errors import ConfigError, install_extra

from .ports import IdempotencyStore

T = TypeVar("T")
TIMEOUT_S = 5.0
URL_VARIABLE = "REDIS_URL"

PROBE = "idempotency-probe"
_BLOCKING = (("redis.client", "Redis"), ("redis.cluster", "RedisCluster"))

RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""Delete a claim only if it is still the owner's. It may have expired and have another owner."""


class RedisIdempotencyStore(IdempotencyStore):
    """Results in Redis. `redis_client` is a `redis.asyncio.Redis`, or behaves like one.

    Without a client it makes its own, for the address in REDIS_URL, and `close` closes that one.
    Every call ends within `timeout_s`. Errors of the client are raised; a trigger logs and counts
    them, and continues.
    """

    def __init__(self, redis_client: Any = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._own = redis_client is None
        self._timeout_s = timeout_s
        self.redis = _client(timeout_s) if redis_client is None else _checked(redis_client)

    async def exists(self, key: str) -> bool:
        return bool(await self._asked(self.redis.exists(_result(key))))

    async def get(self, key: str) -> Any | None:
        value = await self._asked(self.redis.get(_result(key)))
        return None if value is None else loads(_bytes(value))

    async def set(self, key: str, value: Any, ttl: int) -> None:
        await self._asked(self.redis.set(_result(key), dumps(value), ex=ttl))
        # The owner of a result is known as long as the result.
        await self._asked(self.redis.expire(_claim(key), ttl))

    async def claim(self, key: str, owner: str, ttl: int) -> bool:
        """Return True if the key is the owner's, now or since an earlier attempt."""
        if not await self._asked(self.redis.set(_claim(key), owner, nx=True, ex=ttl)):
            holder = await self._asked(self.redis.get(_claim(key)))
            return holder is not None and _bytes(holder) == owner.encode()
        if await self.exists(
            key
        ):  # recorded by a program that does not claim, or whose claim has expired
            await self.release(key, owner)
            return False
        return True

    async def release(self, key: str, owner: str) -> None:
        await self._asked(self.redis.eval(RELEASE, 1, _claim(key), owner))

    async def health_check(self) -> bool:
        """Check with a write: a full server or a replica answers PING, but stores nothing."""
        return bool(await self._asked(self.redis.set(PROBE, b"", ex=1)))

    async def close(self) -> None:
        """Close the client, if it is our own."""
        if self._own:
            await self.redis.aclose()

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise TimeoutError(f"Redis did not answer within {self._timeout_s:g} s") from None


def _result(key: str) -> str:
    return f"idempotency:{key}"


def _claim(key: str) -> str:
    return f"idempotency-claim:{key}"


def _bytes(value: bytes | str) -> bytes:
    """Return text. A client may be set up to decode answers."""
    return value.encode() if isinstance(value, str) else value


def _checked(client: Any) -> Any:
    """Refuse a blocking client at once. It would fail at every message."""
    for kind in type(client).__mro__:
        if (kind.__module__, kind.__name__) in _BLOCKING:
            raise TypeError(
                f"RedisIdempotencyStore needs an asyncio client, but {kind.__name__} is not one: "
                "use redis.asyncio.Redis.from_url(…)"
            )
    return client


def _client(timeout_s: float) -> Any:
    url = os.environ.get(URL_VARIABLE)
    if not url:
        raise ConfigError(
            [
                f"{URL_VARIABLE} is not set: RedisIdempotencyStore needs a client, or the address "
                "of a server there, such as redis://localhost:6379/0"
            ]
        )
    try:
        from redis.asyncio import Redis
    except ModuleNotFoundError:
        raise ConfigError(
            [f"RedisIdempotencyStore needs the Redis driver: {install_extra('redis')}"]
        ) from None
    try:
        return Redis.from_url(url, socket_connect_timeout=timeout_s, socket_timeout=timeout_s)
    except ValueError:  # its text contains the address, which may contain a password
        raise ConfigError([f"{URL_VARIABLE} is not the address of a Redis server"]) from None
