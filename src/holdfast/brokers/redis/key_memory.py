"""Dedup keys in Redis, in the layout of `RedisIdempotencyStore`, with scoped names.

| key                                               | value                          |
|---------------------------------------------------|--------------------------------|
| `idempotency:<tenant>:<subscription>:<key>`       | the result, JSON               |
| `idempotency-claim:<tenant>:<subscription>:<key>` | the message that it belongs to |

Both live for the window. A colon in the name of a tenant or a subscription is written as %3A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from redis.exceptions import ResponseError

from holdfast.core.key_memory import KeyHolder, SharedKey

from .address import read_address
from .wire import Answer, Command, Wire

FREE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""Only what is still the message's: it may have expired, and be another's."""


class RedisKeyMemory:
    """A `KeyMemory` of one server. Every call ends within the URL's `timeout_s`."""

    def __init__(self, url: str, *, url_now: Callable[[], str] | None = None) -> None:
        """`url_now` is asked when the server refuses the credentials of `url`."""
        address = read_address(url)
        now = None if url_now is None else (lambda: read_address(url_now()).url)
        self._wire = Wire(address.url, timeout_s=address.timeout_s, url_now=now)

    async def close(self) -> None:
        await self._wire.close()

    async def look(self, keys: Sequence[SharedKey]) -> Sequence[KeyHolder | None]:
        (answer,) = await self._ask([_read(keys)])
        return [
            None if owner is None and result is None else KeyHolder(_text(owner), result)
            for owner, result in _pairs(answer)
        ]

    async def take(self, keys: Sequence[SharedKey]) -> Sequence[KeyHolder]:
        claims: list[Command] = [
            ("SET", _claim(each), each.message_id, "NX", "PX", _ms(each)) for each in keys
        ]
        *took, answer = await self._ask([*claims, _read(keys)])
        holders = [KeyHolder(_text(owner), result) for owner, result in _pairs(answer)]
        # A result without a claim, of somebody who makes none: the claim just made is not ours.
        strays = [
            key
            for key, was_free, holder in zip(keys, took, holders, strict=True)
            if was_free is not None and holder.result is not None
        ]
        if strays:
            await self._ask([_free(key) for key in strays])
            return [
                KeyHolder(None, holder.result) if key in strays else holder
                for key, holder in zip(keys, holders, strict=True)
            ]
        return holders

    async def keep(self, done: Sequence[tuple[SharedKey, bytes]]) -> None:
        await self._ask(
            [
                command
                for key, result in done
                for command in (
                    ("SET", _claim(key), key.message_id, "PX", _ms(key)),
                    ("SET", _result(key), result, "PX", _ms(key)),
                )
            ]
        )

    async def free(self, keys: Sequence[SharedKey]) -> None:
        freed = await self._ask([_free(key) for key in keys])
        results = [_result(key) for key, was_its in zip(keys, freed, strict=True) if was_its]
        if results:
            await self._ask([("DEL", *results)])

    async def _ask(self, commands: Sequence[Command]) -> list[Answer]:
        answers = await self._wire.ask(*commands)
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise self._wire.refused(answer)
        return answers


def _read(keys: Sequence[SharedKey]) -> Command:
    return ("MGET", *(name for key in keys for name in (_claim(key), _result(key))))


def _pairs(answer: Answer) -> list[tuple[bytes | None, bytes | None]]:
    return list(zip(answer[::2], answer[1::2], strict=True))


def _free(key: SharedKey) -> Command:
    return ("EVAL", FREE, 1, _claim(key), key.message_id)


def _result(key: SharedKey) -> str:
    return f"idempotency:{_scope(key)}:{key.key}"


def _claim(key: SharedKey) -> str:
    return f"idempotency-claim:{_scope(key)}:{key.key}"


def _scope(key: SharedKey) -> str:
    """A colon in a name would let one tenant's key pass for another's."""
    return f"{key.tenant_id.replace(':', '%3A')}:{key.subscription.replace(':', '%3A')}"


def _ms(key: SharedKey) -> int:
    return max(1, int(key.window_s * 1000))


def _text(owner: bytes | None) -> str | None:
    return None if owner is None else owner.decode("utf-8", "replace")
