"""The oracle: what handlers really did, written down outside of everything that is under test.

A handler appends one line for each effect, synced before it goes on, so that a kill at the next
instruction cannot take it back. One `write` of a short line to a file opened for appending is never
mixed with another process's line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec


class Effect(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a handler did to the world."""

    key: str
    """What must not happen twice: the message's key, or one of its own."""
    message_id: str
    attempt: int
    pid: int
    """The process that did it."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Effect).decode


class Oracle:
    """The file of effects. Safe to share between any number of processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def record(self, key: str, message_id: str, attempt: int) -> None:
        """Write the effect down and sync it; it has happened when this returns."""
        line = _encode(Effect(key, message_id, attempt, os.getpid())) + b"\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)

    def effects(self) -> list[Effect]:
        """Everything recorded so far, in order."""
        if not self.path.exists():
            return []
        # A line without its end is a write that a kill cut short: it did not return, so it did
        # not happen.
        *whole, _cut = self.path.read_bytes().split(b"\n")
        return [_decode(line) for line in whole]


def times(effects: Iterable[Effect]) -> dict[str, int]:
    """How often each key's effect happened."""
    counts: dict[str, int] = {}
    for effect in effects:
        counts[effect.key] = counts.get(effect.key, 0) + 1
    return counts
