"""The ends of the ledger's chains on SQLite, by rowid: rows are in the order of their commits."""

from __future__ import annotations

import sqlite3

from ackbone.store.anchors import Moved
from ackbone.store.seals import Anchor, Chain, Tip
from ackbone.store.unit import Tx

from . import seals
from .store import SqliteStore, SqliteTx


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
        newest = seals.last_anchor(tx.conn)
        if (None if newest is None else newest[1]) != self._moved.previous:
            return None  # another process signed meanwhile
        found = dict(self._moved.tips)
        for tips, _ in seals.tips(tx.conn, self._seen):
            found.update(tips)
        return Moved(self._moved.previous, found)

    def signed(self, anchor: Anchor) -> None:
        """The next look begins at the row of the anchor."""


def _look(conn: sqlite3.Connection) -> tuple[int, int, Moved]:
    """The row of the last anchor, the last row seen, and the chains that moved between them."""
    newest = seals.last_anchor(conn)
    at, previous = newest if newest is not None else (0, None)
    moved: dict[Chain, Tip] = {}
    seen = at
    # The last anchor's own row moved its chain; alone it is no reason for another anchor.
    for tips, last in seals.tips(conn, max(0, at - 1)):
        moved.update(tips)
        seen = last
    return at, seen, Moved(previous, moved)
