"""Ids: UUIDv7 for what we mint, UUIDv5 for what must come out the same on every redelivery."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid

_NAMESPACE = uuid.UUID("5f3d1c7e-9a42-5b0e-8d61-2f7c0a9be413")
_lock = threading.Lock()
_last_ms = 0
_counter = 0


def uuid7_block(count: int) -> list[bytes]:
    """`count` ids of 16 bytes that sort by time; one process's ids never go backwards."""
    global _last_ms, _counter  # noqa: PLW0603 - one sequence per process is the point
    tails = os.urandom(8 * count)
    made = []
    with _lock:
        now_ms = time.time_ns() // 1_000_000
        if now_ms > _last_ms:
            _last_ms = now_ms
            _counter = tails[0] & 0x3F  # leaves room to count upwards within the millisecond
        ms = _last_ms.to_bytes(6, "big")
        for at in range(0, 8 * count, 8):
            _counter += 1
            if _counter > 0xFFF:
                _last_ms += 1
                _counter = 0
                ms = _last_ms.to_bytes(6, "big")
            head = (0x7000 | _counter) << 8 | 0x80 | (tails[at] & 0x3F)
            made.append(ms + head.to_bytes(3, "big") + tails[at + 1 : at + 8])
    return made


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
    digest = bytearray(hashlib.sha1(_NAMESPACE.bytes + name, usedforsecurity=False).digest()[:16])
    digest[6] = (digest[6] & 0x0F) | 0x50
    digest[8] = (digest[8] & 0x3F) | 0x80
    return bytes(digest)
