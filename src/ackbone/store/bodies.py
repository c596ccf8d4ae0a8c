"""Stored bodies against their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from ackbone.core.checks import Check, ok, refused

_MOST_NAMED = 5


def check_bodies(stored: Iterable[tuple[str, str, bytes, int | None]]) -> Check:
    """Table, message id, body and checksum of each."""
    count = 0
    bad: list[str] = []
    for table, message_id, body, crc in stored:
        count += 1
        if crc is not None and zlib.crc32(body) != crc:
            bad.append(f"{message_id} ({table})")
    if not bad:
        return ok("bodies", f"{count} stored bodies, all as they were written")
    named = ", ".join(bad[:_MOST_NAMED]) + (" …" if len(bad) > _MOST_NAMED else "")
    return refused(
        "bodies",
        f"{len(bad)} of {count} stored bodies are not the ones that were written: {named}",
        "they will not be run, and become dead letters; edit them with 'ackbone dlq edit'",
    )
