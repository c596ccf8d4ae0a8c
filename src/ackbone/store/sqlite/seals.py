"""Anchors, checkpoints and chain ends in the table of SQLite, by rowid: rows are in the order of
their commits."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator

import msgspec

from ackbone.store.anchors import Moved
from ackbone.store.ledger import (
    ANCHOR_TASK,
    PRUNED_TASK,
    TENANT,
    Anchor,
    Chain,
    Checkpoint,
    Seal,
    Tip,
    read_anchor,
    read_checkpoint,
    readable,
)
from ackbone.store.unit import Tx

from .store import SqliteStore, SqliteTx

WINDOW = 20_000
"""Rows of the ledger that one statement reads: a long read keeps SQLite's log from shrinking."""


# ── the ledger's own rows ────────────────────────────────────────────────────────────────────────

_OWN = (
    "SELECT rowid, data, created_at FROM event_log WHERE tenant_id = ? AND task_id = ?"
    " ORDER BY rowid"
)


def last_anchor(conn: sqlite3.Connection) -> tuple[int, Anchor] | None:
    """The newest anchor and its rowid."""
    return _last(conn, ANCHOR_TASK, read_anchor)


def last_checkpoint(conn: sqlite3.Connection) -> tuple[int, Checkpoint] | None:
    """The newest checkpoint and its rowid."""
    return _last(conn, PRUNED_TASK, read_checkpoint)


def _last(
    conn: sqlite3.Connection, task: str, read: Callable[[str], Seal]
) -> tuple[int, Seal] | None:
    found = conn.execute(f"{_OWN} DESC LIMIT 1", (TENANT, task)).fetchone()
    return None if found is None else (found[0], readable(read, found[1], task))


def anchor_before(conn: sqlite3.Connection, moment_us: int) -> tuple[int, Anchor] | None:
    """The newest anchor that is not younger than `moment_us`, and its rowid."""
    for rowid, data, at in conn.execute(f"{_OWN} DESC", (TENANT, ANCHOR_TASK)):
        if at <= moment_us:
            return rowid, readable(read_anchor, data, ANCHOR_TASK)
    return None


def anchor_row(conn: sqlite3.Connection, n: int) -> int | None:
    """The rowid of anchor number `n`."""
    for rowid, data, _at in conn.execute(_OWN, (TENANT, ANCHOR_TASK)):
        try:
            number = read_anchor(data).n
        except (msgspec.MsgspecError, TypeError):
            continue  # `verify` reports such a row by itself
        if number == n:
            return int(rowid)
    return None


# ── the ends of the chains ───────────────────────────────────────────────────────────────────────


def tips(
    conn: sqlite3.Connection, after: int, upto: int | None = None
) -> Iterator[tuple[dict[Chain, Tip], int]]:
    """The ends of chains among the rows after `after`, window by window, with its last row.

    Without `upto`, it continues until it has caught up with the writers.
    """
    while True:
        (last,) = conn.execute("SELECT max(rowid) FROM event_log").fetchone()
        end = min(last or 0, after + WINDOW, after + WINDOW if upto is None else upto)
        if end <= after:
            return
        # max(rowid) is the only aggregate, so SQLite takes the other columns from that very row.
        yield (
            {
                (tenant_id, worker_id): Tip(seq, digest, rowid)
                for tenant_id, worker_id, seq, digest, rowid in conn.execute(
                    "SELECT tenant_id, worker_id, seq, hash, max(rowid) FROM event_log"
                    " WHERE rowid > ? AND rowid <= ? GROUP BY tenant_id, worker_id",
                    (after, end),
                )
            },
            end,
        )
        after = end


class SqliteChainEnds:
    """`ChainEnds` of a SQLite file. A reader looks at almost all rows; the transaction looks only
    at those that were written since."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._moved = Moved(None, {})
        self._seen = 0
        """The last row that the reader looked at."""

    async def look(self) -> bool:
        at, self._seen, self._moved = await self._store.file.read(_look)
        return self._seen > at

    async def moved(self, tx: Tx) -> Moved | None:
        assert isinstance(tx, SqliteTx)  # noqa: S101 - this store's transactions are
        newest = last_anchor(tx.conn)
        if (None if newest is None else newest[1]) != self._moved.previous:
            return None  # another process signed meanwhile
        found = dict(self._moved.tips)
        for ends, _ in tips(tx.conn, self._seen):
            found.update(ends)
        return Moved(self._moved.previous, found)

    def signed(self, anchor: Anchor) -> None:
        """The next look begins at the row of the anchor."""


def _look(conn: sqlite3.Connection) -> tuple[int, int, Moved]:
    """The row of the last anchor, the last row seen, and the chains that moved between them."""
    newest = last_anchor(conn)
    at, previous = newest if newest is not None else (0, None)
    moved: dict[Chain, Tip] = {}
    seen = at
    # The last anchor's own row moved its chain; alone it is no reason for another anchor.
    for ends, last in tips(conn, max(0, at - 1)):
        moved.update(ends)
        seen = last
    return at, seen, Moved(previous, moved)
