"""The hash chain of the ledger: the same record and the same hash in every dialect."""

from __future__ import annotations

import hashlib

import msgspec

GENESIS = b"\0" * 32
_encode = msgspec.json.Encoder().encode

Record = tuple[int, str, str, str, str, str, int, int]
"""seq, tenant_id, subscription, task_id, event_type, data, created_at, worker_id"""


def link(previous: bytes, record: Record) -> bytes:
    """The hash of one event: covers everything in its row, and the hash before it."""
    return hashlib.sha256(previous + _encode(record)).digest()
