"""The ends of the ledger's chains on PostgreSQL, by time."""

from __future__ import annotations

from ackbone.store.anchors import Moved, last_anchor
from ackbone.store.seals import TENANT, Anchor, Chain
from ackbone.store.unit import Tx

from .seals import tips_since
from .store import PostgresStore

_LOCK = "SELECT pg_advisory_xact_lock(7310579635104526)"
"""Two processes that anchor at once take turns: when the role changes hands, they may overlap."""


class PostgresChainEnds:
    """`ChainEnds` of a PostgreSQL database. A look by time finds some ends again: those that were
    signed at the same place before are left out."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._signed: dict[Chain, int] = {}
        """Where this process signed chains last."""

    async def look(self) -> bool:
        return True

    async def moved(self, tx: Tx) -> Moved | None:
        await tx.rows(_LOCK)
        # Readers beside the transaction: the look may take long.
        previous = await last_anchor(self._store.read, self._store.sql.maintenance.seals)
        found = await tips_since(self._store, 0 if previous is None else previous.at)
        listed = {} if previous is None else {(t, w): seq for t, w, seq, _ in previous.chains}
        new = {
            chain: tip
            for chain, tip in found.items()
            if tip.seq > max(self._signed.get(chain, 0), listed.get(chain, 0))
        }
        if all(tenant == TENANT for tenant, _ in new):
            return None  # the last anchor's own row is no reason for another one
        return Moved(previous, new)

    def signed(self, anchor: Anchor) -> None:
        self._signed.update({head[:2]: head[2] for head in anchor.chains})
