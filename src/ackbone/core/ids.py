"""Ids: UUIDv7 for new ones, UUIDv5 for ids that must be the same on every redelivery."""

from __future__ import annotations

import os
import struct
import threading
import time
import uuid

_NAMESPACE = uuid.UUID("5f3d1c7e-9a42-5b0e-8d61-2f7c0a9be413")
_LOWER_HALF = (1 << 47) - 1
"""The random start of the last 48 bits, which count upwards. They cannot overflow within a
millisecond."""
_WORDS = struct.Struct(">QQ")
_LOWER_WORD = (1 << 64) - 1
_lock = threading.Lock()
_last_ms = 0
_counter = 0
_prefix = ""
"""Beginning of this millisecond's ids as text. Empty after `uuid7_block`."""
_tail = 0


def uuid7_block(count: int) -> list[bytes]:
    """Return `count` ids of 16 bytes that sort by time. Ids of one process never go backwards."""
    global _prefix  # noqa: PLW0603 - one sequence per process is the point
    place = os.urandom(8)
    with _lock:
        _prefix = ""
        first = _first(time.time_ns() // 1_000_000, place)
    upper, lower = first >> 64, first & _LOWER_WORD
    pack = _WORDS.pack
    return [pack(upper, lower + n) for n in range(count)]


def uuid7_bytes() -> bytes:
    """Return one id of 16 bytes."""
    return uuid7_block(1)[0]


def new_id() -> str:
    """Return a new UUIDv7 as text. Ids of one millisecond count upwards, so they are not secret."""
    global _prefix, _tail  # noqa: PLW0603
    with _lock:
        now_ms = time.time_ns() // 1_000_000
        if _prefix and now_ms <= _last_ms:
            _tail += 1
        else:
            text = f"{_first(now_ms, os.urandom(8)):032x}"
            _prefix = f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-"
            _tail = int(text[20:], 16) & _LOWER_HALF
        return f"{_prefix}{_tail:012x}"


def _first(now_ms: int, place: bytes) -> int:
    """Return the next id to count from, as a number. The caller holds the lock."""
    global _last_ms, _counter  # noqa: PLW0603
    if now_ms > _last_ms:
        _last_ms, _counter = now_ms, 0
    elif _counter == 0xFFF:
        _last_ms, _counter = _last_ms + 1, 0
    else:
        _counter += 1
    head = _last_ms << 80 | (0x7000 | _counter) << 64 | 0x8 << 60
    # Start at a random place in the lower half of the remaining bits, so that counting cannot
    # overflow.
    return head | int.from_bytes(place, "big") >> 3


def _forget_count() -> None:
    """Start over in the child of a fork: it must not continue from the parent's last id."""
    global _prefix, _lock
    _prefix, _lock = "", threading.Lock()


os.register_at_fork(after_in_child=_forget_count)


def derived_id(*parts: str) -> str:
    """Return the same id for the same parts, for messages that have no id of their own."""
    return str(uuid.uuid5(_NAMESPACE, "\x1f".join(parts)))
