"""`RedisIdempotencyStore`: a trigger's second dedup memory in Redis, shared by whoever writes it.

| key                       | value                      | lives                               |
|---------------------------|----------------------------|-------------------------------------|
| `idempotency:<key>`       | the result, JSON           | for the window, from its recording  |
| `idempotency-claim:<key>` | the message that may run   | for the window, or until it fails   |

A claim has a key of its own: to others that know only the first one, `exists` means a result.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any, TypeVar

from ackbone.core.errors import ConfigError
from ackbone.core.json_text import dumps, loads

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
"""Only what is still the owner's: it may have expired, and somebody else may have it."""


class RedisIdempotencyStore(IdempotencyStore):
    """Results in Redis. `redis_client` is a `redis.asyncio.Redis` or anything that behaves so.

    Without one it makes its own, for the address in REDIS_URL; `close` closes that. Every call ends
    within `timeout_s`. What the client raises is raised: a trigger warns, counts and goes on.
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
        # Whose result it is, is known for as long as the result itself.
        await self._asked(self.redis.expire(_claim(key), ttl))

    async def claim(self, key: str, owner: str, ttl: int) -> bool:
        """True: it is the owner's, now or since an earlier attempt."""
        if not await self._asked(self.redis.set(_claim(key), owner, nx=True, ex=ttl)):
            holder = await self._asked(self.redis.get(_claim(key)))
            return holder is not None and _bytes(holder) == owner.encode()
        if await self.exists(key):  # of somebody who claims nothing, or whose claim is over
            await self.release(key, owner)
            return False
        return True

    async def release(self, key: str, owner: str) -> None:
        await self._asked(self.redis.eval(RELEASE, 1, _claim(key), owner))

    async def health_check(self) -> bool:
        """By a write: one that is full or a replica answers a PING, and remembers nothing."""
        return bool(await self._asked(self.redis.set(PROBE, b"", ex=1)))

    async def close(self) -> None:
        """Let go of the client, if it is our own."""
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
    """A client may be told to decode what it reads."""
    return value.encode() if isinstance(value, str) else value


def _checked(client: Any) -> Any:
    """A client that blocks would fail at every message; it is better told at once."""
    for kind in type(client).__mro__:
        if (kind.__module__, kind.__name__) in _BLOCKING:
            raise TypeError(
                f"RedisIdempotencyStore needs an asyncio client, and this {kind.__name__} is none: "
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
            ["RedisIdempotencyStore needs the Redis driver: pip install 'ackbone[redis]'"]
        ) from None
    try:
        return Redis.from_url(url, socket_connect_timeout=timeout_s, socket_timeout=timeout_s)
    except ValueError:  # its text holds the address, and that may hold a password
        raise ConfigError([f"{URL_VARIABLE} is no address of a Redis server"]) from None
