"""Ids: UUIDv7 for what we mint, UUIDv5 for what must come out the same on every redelivery."""

from __future__ import annotations

import os
import struct
import threading
import time
import uuid

_NAMESPACE = uuid.UUID("5f3d1c7e-9a42-5b0e-8d61-2f7c0a9be413")
_LOWER_HALF = (1 << 47) - 1
"""Of the 48 bits at the end, which count upwards: a millisecond has no time to overflow them."""
_WORDS = struct.Struct(">QQ")
_LOWER_WORD = (1 << 64) - 1
_lock = threading.Lock()
_last_ms = 0
_counter = 0
_prefix = ""
"""What the texts of this millisecond begin with; empty once an id was minted in another way."""
_tail = 0


def uuid7_block(count: int) -> list[bytes]:
    """`count` ids of 16 bytes that sort by time; one process's ids never go backwards."""
    global _prefix  # noqa: PLW0603 - one sequence per process is the point
    place = os.urandom(8)
    with _lock:
        _prefix = ""
        first = _first(time.time_ns() // 1_000_000, place)
    upper, lower = first >> 64, first & _LOWER_WORD
    pack = _WORDS.pack
    return [pack(upper, lower + n) for n in range(count)]


def uuid7_bytes() -> bytes:
    """One id of 16 bytes."""
    return uuid7_block(1)[0]


def new_id() -> str:
    """A new UUIDv7 as text. Those of one millisecond count upwards: an id is no secret."""
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
    """The next id to count from, as a number. Only with the lock held."""
    global _last_ms, _counter  # noqa: PLW0603
    if now_ms > _last_ms:
        _last_ms, _counter = now_ms, 0
    elif _counter == 0xFFF:
        _last_ms, _counter = _last_ms + 1, 0
    else:
        _counter += 1
    head = _last_ms << 80 | (0x7000 | _counter) << 64 | 0x8 << 60
    # A random place in the lower half of what is left, then upwards: a count cannot overflow.
    return head | int.from_bytes(place, "big") >> 3


def _forget_count() -> None:
    """Parent and child of a fork must not count on from the same id."""
    global _prefix, _lock
    _prefix, _lock = "", threading.Lock()


os.register_at_fork(after_in_child=_forget_count)


def derived_id(*parts: str) -> str:
    """The same text for the same parts, always: identity of messages without an id of their own."""
    return str(uuid.uuid5(_NAMESPACE, "\x1f".join(parts)))
