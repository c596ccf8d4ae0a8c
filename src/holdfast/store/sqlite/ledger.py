"""The ledger: one hash chain per (tenant, worker), appended inside the transaction it tells of.

A worker's number has one writer and is never used again, so a chain needs no lock: its head is kept
in memory, and read again from the table after anything was rolled back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence

import msgspec

from holdfast.core import events
from holdfast.core.ids import uuid7_block
from holdfast.sqlite import rows
from holdfast.sqlite.file import SqliteFile
from holdfast.store.chain import GENESIS, link

from .notices import NoticeWriter

_INSERT = (
    "INSERT INTO event_log (created_at, worker_id, seq, tenant_id, subscription, task_id,"
    " event_type, data, id, hash)"
)
_ALIKE = (1, 2, 4)
"""Tenant, subscription and type of the event: places in what is written."""
_encode = msgspec.json.Encoder().encode

Entry = events.Entry


class Ledger:
    """Appends to the chains of this process. Used in the writer thread only."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._heads: dict[tuple[str, int], tuple[int, bytes]] = {}
        self._given_out: set[int] = set()
        self._begun: set[tuple[str, int]] = set()
        self.notices: NoticeWriter | None = None
        """Tells others what ended, where a subscription asks for it."""
        self.heard: list[Entry] | None = None
        """While it is a list, what is appended is noted there, too."""
        file.on_rollback(self._heads.clear)

    def begin(self, worker_id: int) -> None:
        """A number that was given out just now has no chains: none need be searched for."""
        self._given_out.add(worker_id)

    def is_blank(self, worker_id: int) -> bool:
        """Is it certain that nothing was ever written under this number?"""
        begun = any(worker_id == each for _, each in self._begun)
        return worker_id in self._given_out and not begun

    def append(
        self,
        conn: sqlite3.Connection,
        worker_id: int,
        entries: Sequence[Entry],
        now_us: int,
        *,
        told: Collection[tuple[str, str, str]] = (),
    ) -> None:
        """Write the events, in order. `told`: tasks of which others hear by another way."""
        if not entries:
            return
        written = []
        seq, digest, tenant = 0, b"", None
        for entry, row_id in zip(entries, uuid7_block(len(entries)), strict=True):
            tenant_id, subscription, task_id, event_type, data = entry
            if tenant_id != tenant:  # on to the chain of another tenant
                if tenant is not None:
                    self._heads[(tenant, worker_id)] = (seq, digest)
                seq, digest = self._head(conn, (tenant_id, worker_id))
                tenant = tenant_id
            text = _encode(data).decode()
            seq += 1
            record = (seq, tenant_id, subscription, task_id, event_type, text, now_us, worker_id)
            digest = link(digest, record)
            written.append(
                (seq, tenant_id, subscription, task_id, event_type, text, row_id, digest)
            )
        self._heads[(tenant or "", worker_id)] = (seq, digest)
        rows.insert(conn, _INSERT, written, shared=(now_us, worker_id), alike=_ALIKE)
        if self.notices is not None:
            self.notices.tell(conn, entries, told, now_us)
        if self.heard is not None:
            self.heard.extend(entries)
        self._file.ledger_head = digest

    def _head(self, conn: sqlite3.Connection, chain: tuple[str, int]) -> tuple[int, bytes]:
        """Where a chain ends; a first event costs no look at the table."""
        known = self._heads.get(chain)
        if known is not None:
            return known
        if chain[1] in self._given_out and chain not in self._begun:
            self._begun.add(chain)
            return 0, GENESIS
        return _read_head(conn, chain)


def _read_head(conn: sqlite3.Connection, chain: tuple[str, int]) -> tuple[int, bytes]:
    # From the end backwards, where the chain of a living worker ends: by the tenant's index SQLite
    # would sort all that the tenant ever did.
    found = conn.execute(
        "SELECT seq, hash FROM event_log NOT INDEXED WHERE tenant_id = ? AND worker_id = ?"
        " ORDER BY rowid DESC LIMIT 1",
        chain,
    ).fetchone()
    return (found[0], found[1]) if found else (0, GENESIS)
