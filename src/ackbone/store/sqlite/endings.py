"""How messages ended: their final events, and the failed attempts that their letters tell of."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from ackbone.core.endings import Ending, Identity
from ackbone.store.ending import FINAL_EVENTS, ending

from .store import SqliteStore

_FINAL = (
    "SELECT event_type, data, (SELECT history FROM dead_letters d WHERE d.tenant_id = e.tenant_id"
    " AND d.message_id = e.task_id AND d.subscription = e.subscription"
    " ORDER BY failed_at DESC LIMIT 1) FROM event_log e WHERE tenant_id = ? AND task_id = ?"
    f" AND subscription = ? AND event_type IN ({', '.join(['?'] * len(FINAL_EVENTS))})"
)


class SqliteEndings:
    """`Endings` of a store that is open."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def __call__(
        self, subscription: str, identities: Sequence[Identity]
    ) -> Mapping[Identity, Ending]:
        return await self._store.file.read(lambda conn: _endings(conn, subscription, identities))


def _endings(
    conn: sqlite3.Connection, subscription: str, identities: Sequence[Identity]
) -> dict[Identity, Ending]:
    found: dict[Identity, Ending] = {}
    for identity in identities:
        row = conn.execute(_FINAL, (*identity, subscription, *FINAL_EVENTS)).fetchone()
        if row is not None:
            found[identity] = ending(*row)
    return found
