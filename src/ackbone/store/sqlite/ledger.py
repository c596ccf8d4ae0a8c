"""The ledger: one hash chain per (tenant, worker), written in the transaction that it records.

A worker id has one writer and is never used again, so a chain needs no lock: its head is kept in
memory, and is read again from the table after anything was rolled back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from ackbone.core import events
from ackbone.sqlitefile import rows
from ackbone.sqlitefile.file import SqliteFile
from ackbone.store.ledger import GENESIS, Chain, Chains, chained

_INSERT = (
    "INSERT INTO event_log (created_at, worker_id, seq, tenant_id, subscription, task_id,"
    " event_type, data, id, hash)"
)
_ALIKE = (1, 2, 4)
"""Positions of tenant, subscription and event type among the columns that are written."""

Entry = events.Entry


class Ledger(Chains):
    """Appends to the chains of this process. Used in the writer thread only."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._heads: dict[Chain, tuple[int, bytes]] = {}
        self._given_out: set[int] = set()
        self._begun: set[Chain] = set()
        file.on_rollback(self._heads.clear)

    def begin(self, worker_id: int) -> None:
        """A worker id that was given out just now has no chains, so none need be searched for."""
        self._given_out.add(worker_id)

    def write(
        self, conn: sqlite3.Connection, worker_id: int, entries: Sequence[Entry], now_us: int
    ) -> None:
        """Write the events, in order."""
        if not entries:
            return
        tenants = dict.fromkeys(entry[0] for entry in entries)
        ends = {tenant: self._head(conn, (tenant, worker_id)) for tenant in tenants}
        columns = chained(entries, worker_id, now_us, ends)
        self._heads |= {(tenant, worker_id): end for tenant, end in ends.items()}
        rows.insert_columns(conn, _INSERT, columns, shared=(now_us, worker_id), alike=_ALIKE)
        self._file.ledger_head = columns[-1][-1]

    def _head(self, conn: sqlite3.Connection, chain: Chain) -> tuple[int, bytes]:
        """Return the end of a chain. The first event of a worker id costs no look at the table."""
        known = self._heads.get(chain)
        if known is not None:
            return known
        if chain[1] in self._given_out and chain not in self._begun:
            self._begun.add(chain)
            return 0, GENESIS
        return _read_head(conn, chain)


def _read_head(conn: sqlite3.Connection, chain: Chain) -> tuple[int, bytes]:
    # Backwards from the end, where the chain of a living worker ends. With the index of the tenant,
    # SQLite would sort everything that the tenant ever did.
    found = conn.execute(
        "SELECT seq, hash FROM event_log NOT INDEXED WHERE tenant_id = ? AND worker_id = ?"
        " ORDER BY rowid DESC LIMIT 1",
        chain,
    ).fetchone()
    return (found[0], found[1]) if found else (0, GENESIS)
