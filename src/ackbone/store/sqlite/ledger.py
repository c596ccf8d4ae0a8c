"""The ledger: one hash chain per (tenant, worker), appended inside the transaction it tells of.

A worker's number has one writer and is never used again, so a chain needs no lock: its head is kept
in memory, and read again from the table after anything was rolled back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from itertools import groupby, repeat

import msgspec

from ackbone.core import events
from ackbone.core.ids import uuid7_block
from ackbone.core.subscribers import Subscribers
from ackbone.sqlite import rows
from ackbone.sqlite.file import SqliteFile
from ackbone.sqlite.wake import OUTGOING
from ackbone.store.chain import GENESIS, links
from ackbone.store.outgoing import telling_rows

from .notices import NoticeWriter
from .outbox_rows import DELIVERY

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

    def __init__(self, file: SqliteFile, subscribers: Subscribers | None = None) -> None:
        """`subscribers`: whoever is told of events, by deliveries that are committed with them."""
        self._file = file
        self._heads: dict[tuple[str, int], tuple[int, bytes]] = {}
        self._given_out: set[int] = set()
        self._begun: set[tuple[str, int]] = set()
        self.notices: NoticeWriter | None = None
        """Tells others what ended, where a subscription asks for it."""
        self.subscribers = subscribers
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
        tenants, subscriptions, tasks, kinds, data = zip(*entries, strict=True)
        texts = [_encode(each).decode() for each in data]
        seqs: list[int] = []
        hashes: list[bytes] = []
        at = 0
        for tenant, alike in groupby(tenants):  # one chain after the other
            part = slice(at, at := at + len(list(alike)))
            seq, digest = self._head(conn, (tenant, worker_id))
            numbers = range(seq + 1, seq + 1 + part.stop - part.start)
            seqs += numbers
            records = zip(
                numbers, tenants[part], subscriptions[part], tasks[part], kinds[part], texts[part],
                repeat(now_us), repeat(worker_id),
            )  # fmt: skip
            hashes += links(digest, records)
            self._heads[(tenant, worker_id)] = (seqs[-1], hashes[-1])
        ids = uuid7_block(len(entries))
        rows.insert_columns(
            conn,
            _INSERT,
            (seqs, tenants, subscriptions, tasks, kinds, texts, ids, hashes),
            shared=(now_us, worker_id),
            alike=_ALIKE,
        )
        if self.notices is not None:
            self.notices.tell(conn, entries, told, now_us)
        if self.subscribers:
            self._tell(conn, self.subscribers, entries, now_us)
        if self.heard is not None:
            self.heard.extend(entries)
        self._file.ledger_head = hashes[-1]

    def _tell(
        self,
        conn: sqlite3.Connection,
        subscribers: Subscribers,
        entries: Sequence[Entry],
        now_us: int,
    ) -> None:
        found = telling_rows(subscribers, entries, now_us)
        if found:
            rows.insert(conn, DELIVERY, found)
            self._file.wake_after_commit(OUTGOING)

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
