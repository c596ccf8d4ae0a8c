"""The hash chain of the ledger. Every dialect hashes the same record to the same value."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable

import msgspec

Chain = tuple[str, int]
"""tenant_id, worker_id"""
GENESIS = b"\0" * 32
_encode = msgspec.json.Encoder().encode

Record = tuple[int, str, str, str, str, str, int, int]
"""seq, tenant_id, subscription, task_id, event_type, data, created_at, worker_id"""


_EMPTY = hashlib.sha256()
"""Copied for each event: OpenSSL takes longer to look the algorithm up again."""


def link(previous: bytes, record: Record) -> bytes:
    """The hash of one event. It covers its whole row and the previous hash."""
    return hashlib.sha256(previous + _encode(record)).digest()


def links(previous: bytes, records: Iterable[Record]) -> list[bytes]:
    """The hashes of several events of one chain, in order."""
    begin, encode = _EMPTY.copy, _encode
    found: list[bytes] = []
    for record in records:
        digest = begin()
        digest.update(previous + encode(record))
        previous = digest.digest()
        found.append(previous)
    return found


class Chains:
    """The chains of one process, which has given out the ids of its workers."""

    _given_out: Container[int]
    """Worker ids that this process gave out: they have no chains from before."""
    _begun: Iterable[Chain]

    def is_blank(self, worker_id: int) -> bool:
        """Return True if it is certain that nothing was ever written under this worker id."""
        return worker_id in self._given_out and all(worker_id != each for _, each in self._begun)
