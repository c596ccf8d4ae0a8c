"""The ledger: one hash chain per (tenant, worker), appended inside the transaction it tells of.

A worker's number has one writer and is never used again, so a chain needs no lock: its head is kept
in memory, and read again from the table after anything was rolled back.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.core.ids import uuid7_block
from holdfast.sqlite import rows
from holdfast.sqlite.file import SqliteFile

_INSERT = (
    "INSERT INTO event_log (id, tenant_id, subscription, task_id, event_type, data, created_at,"
    " worker_id, seq, hash)"
)
GENESIS = b"\0" * 32
_encode = msgspec.json.Encoder().encode

Entry = tuple[str, str, str, str, Mapping[str, Any]]
"""tenant_id, subscription, task_id, event_type, data"""


Record = tuple[int, str, str, str, str, str, int, int]
"""seq, tenant_id, subscription, task_id, event_type, data, created_at, worker_id"""


def link(previous: bytes, record: Record) -> bytes:
    """The hash of one event: covers everything in its row, and the hash before it."""
    return hashlib.sha256(previous + _encode(record)).digest()


class Ledger:
    """Appends to the chains of this process. Used in the writer thread only."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._heads: dict[tuple[str, int], tuple[int, bytes]] = {}
        file.on_rollback(self._heads.clear)

    def append(
        self, conn: sqlite3.Connection, worker_id: int, entries: Sequence[Entry], now_us: int
    ) -> None:
        """Write the events, in order."""
        if not entries:
            return
        written = []
        digest = b""
        ids = uuid7_block(len(entries))
        for row_id, (tenant_id, subscription, task_id, event_type, data) in zip(
            ids, entries, strict=True
        ):
            chain = (tenant_id, worker_id)
            head = self._heads.get(chain)
            seq, previous = head if head is not None else _read_head(conn, chain)
            text = _encode(data).decode()
            seq += 1
            record = (seq, tenant_id, subscription, task_id, event_type, text, now_us, worker_id)
            digest = link(previous, record)
            self._heads[chain] = (seq, digest)
            written.append(
                (
                    row_id,
                    tenant_id,
                    subscription,
                    task_id,
                    event_type,
                    text,
                    now_us,
                    worker_id,
                    seq,
                    digest,
                )
            )
        rows.insert(conn, _INSERT, written)
        self._file.ledger_head = digest


def _read_head(conn: sqlite3.Connection, chain: tuple[str, int]) -> tuple[int, bytes]:
    found = conn.execute(
        "SELECT seq, hash FROM event_log WHERE tenant_id = ? AND worker_id = ?"
        " ORDER BY rowid DESC LIMIT 1",
        chain,
    ).fetchone()
    return (found[0], found[1]) if found else (0, GENESIS)
