"""Ids: UUIDv7 for what we mint, UUIDv5 for what must come out the same on every redelivery."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid

_NAMESPACE = uuid.UUID("5f3d1c7e-9a42-5b0e-8d61-2f7c0a9be413")
_PREFIX = _NAMESPACE.bytes
_MARKS_OF_5 = 0x5 << 76 | 0x2 << 62
_NO_MARKS = (1 << 128) - 1 ^ (0xF << 76 | 0x3 << 62)
"""Version and variant: six bits of a UUID that are not part of its digest."""
_lock = threading.Lock()
_last_ms = 0
_counter = 0


def uuid7_block(count: int) -> list[bytes]:
    """`count` ids of 16 bytes that sort by time; one process's ids never go backwards."""
    global _last_ms, _counter  # noqa: PLW0603 - one sequence per process is the point
    with _lock:
        now_ms = time.time_ns() // 1_000_000
        if now_ms > _last_ms:
            _last_ms, _counter = now_ms, 0
        elif _counter == 0xFFF:
            _last_ms, _counter = _last_ms + 1, 0
        else:
            _counter += 1
        head = _last_ms << 80 | (0x7000 | _counter) << 64 | 0x8 << 60
    # A random place in the lower half of what is left, then upwards: the block cannot overflow.
    first = head | int.from_bytes(os.urandom(8), "big") >> 3
    return [(first + n).to_bytes(16, "big") for n in range(count)]


def uuid7_bytes() -> bytes:
    """One id of 16 bytes."""
    return uuid7_block(1)[0]


def new_id() -> str:
    """A new UUIDv7 as text."""
    h = uuid7_bytes().hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def derived_id(*parts: str) -> str:
    """The same text for the same parts, always: identity of messages without an id of their own."""
    return str(uuid.uuid5(_NAMESPACE, "\x1f".join(parts)))


def task_uuid(tenant_id: str, subscription: str, message_id: str) -> bytes:
    """The `id` of a row in queue_executions: the UUIDv5 of its identity, made quickly."""
    name = f"{tenant_id}\x1f{subscription}\x1f{message_id}".encode("utf-8", "surrogatepass")
    digest = hashlib.sha1(_PREFIX + name, usedforsecurity=False).digest()
    number = int.from_bytes(digest[:16], "big") & _NO_MARKS | _MARKS_OF_5
    return number.to_bytes(16, "big")
