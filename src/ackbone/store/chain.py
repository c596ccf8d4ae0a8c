"""The hash chain of the ledger: the same record and the same hash in every dialect."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

GENESIS = b"\0" * 32
_encode = msgspec.json.Encoder().encode

Record = tuple[int, str, str, str, str, str, int, int]
"""seq, tenant_id, subscription, task_id, event_type, data, created_at, worker_id"""


_EMPTY = hashlib.sha256()
"""To copy it takes OpenSSL less time than to look for the algorithm again, once for each event."""


def link(previous: bytes, record: Record) -> bytes:
    """The hash of one event: covers everything in its row, and the hash before it."""
    return hashlib.sha256(previous + _encode(record)).digest()


def links(previous: bytes, records: Iterable[Record]) -> list[bytes]:
    """`link` of each, one after the other."""
    begin, encode = _EMPTY.copy, _encode
    found: list[bytes] = []
    for record in records:
        digest = begin()
        digest.update(previous + encode(record))
        previous = digest.digest()
        found.append(previous)
    return found
