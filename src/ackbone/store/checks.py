"""Checks of `ackbone doctor` that are the same for every database."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

from ackbone.core.errors import StoreError
from ackbone.core.findings import Check, ok, refused

MIGRATE = "run 'ackbone migrate'"
MOST_NAMED = 5
"""Names that one finding lists."""


def named(names: Sequence[str]) -> str:
    """List the first few names."""
    return ", ".join(names[:MOST_NAMED]) + (" …" if len(names) > MOST_NAMED else "")


def check_revision(
    revision: str | None, head: str, is_behind: Callable[[], bool], empty: Check
) -> Check:
    """Compare the schema with the one that this program needs. `empty` is the finding for a
    database without tables; `is_behind` raises StoreError for a schema that a newer version or
    another program made."""
    if revision == head:
        return ok("schema", f"at {head}, the newest")
    if revision is None:
        return empty
    if not (revision.isdigit() and revision < head):
        try:
            is_behind()
        except StoreError as error:
            return refused("schema", str(error))
    return refused("schema", f"at {revision}, {head} is needed", MIGRATE)


def check_bodies(stored: Iterable[tuple[str, str, bytes, int | None]]) -> Check:
    """Compare stored bodies with their checksums, given as table, message id, body, checksum."""
    count = 0
    bad: list[str] = []
    for table, message_id, body, crc in stored:
        count += 1
        if crc is not None and zlib.crc32(body) != crc:
            bad.append(f"{message_id} ({table})")
    if not bad:
        return ok("bodies", f"{count} stored bodies, all as they were written")
    return refused(
        "bodies",
        f"{len(bad)} of {count} stored bodies are not the ones that were written: {named(bad)}",
        "they will not be run, and become dead letters; edit them with 'ackbone dlq edit'",
    )
