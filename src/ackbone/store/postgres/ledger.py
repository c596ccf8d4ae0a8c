"""The ledger on PostgreSQL: one hash chain per (tenant, worker), as on SQLite.

A worker id has one writer, this process, so a chain needs no row to lock: its head is in memory,
and transactions append one after the other, from the first new hash to the answer of the commit.
Heads move only then. After a connection broke, the newest events may be gone if they were not
synced, or a commit whose answer was lost may be there: such a chain is read again, from the last
event that is known to be on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ackbone.core import events
from ackbone.pgserver import arrays
from ackbone.pgserver.arrays import moment
from ackbone.store.ledger import GENESIS, Chain, Chains, chained

from .database import Database, Tx

Entry = events.Entry

INSERT = (
    "INSERT INTO event_log (created_at, worker_id, seq, tenant_id, subscription, task_id,"
    f" event_type, data, id, hash) SELECT {moment('$1::bigint')}, $2::bigint, u.* FROM"
    " unnest($3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::json[],"
    " $9::uuid[], $10::bytea[]) u"
)
READ_HEAD = (
    "SELECT seq, hash FROM event_log WHERE tenant_id = $1 AND worker_id = $2::bigint"
    f" AND created_at >= {moment('$3::bigint')} AND seq > $4::bigint ORDER BY seq DESC LIMIT 1"
)
_HOLDS = (
    "SELECT 1 FROM event_log WHERE tenant_id = $1 AND subscription = $2 AND task_id = $3"
    " AND event_type = $4 AND data::text = $5 AND worker_id = $6::bigint"
    f" AND created_at >= {moment('$7::bigint')} LIMIT 1"
)
_encode = msgspec.json.Encoder().encode


class _Head(msgspec.Struct):
    """The last event of a chain, and the last one that is known to be on disk."""

    seq: int
    digest: bytes
    sure_seq: int
    sure_digest: bytes
    sure_us: int
    doubtful: bool = False


class Ledger(Chains):
    """Appends to the chains of this process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._begun: dict[Chain, _Head] = {}
        self._given_out: dict[int, int] = {}
        """When these worker ids were given out."""
        self._lock = asyncio.Lock()
        self._last_us = 0
        database.on_connect(self._doubt)

    def begin(self, worker_id: int, now_us: int) -> None:
        """A worker id that was given out just now has no chains."""
        self._given_out[worker_id] = now_us
        # The events of this worker come later, even if the clock was set back.
        self._last_us = max(self._last_us, now_us)

    def _doubt(self) -> None:
        for head in self._begun.values():
            head.doubtful = head.doubtful or head.seq != head.sure_seq

    async def holds(self, tx: Tx, worker_id: int, entry: Entry, since_us: int) -> bool:
        """Return True if this event was committed by our transaction whose answer was lost."""
        await self._database.end_lost()
        *named, data = entry
        text = _encode(data).decode()
        return bool(await tx.rows(_HOLDS, *named, text, str(worker_id), str(since_us)))

    async def commit(
        self,
        tx: Tx,
        worker_id: int,
        entries: Sequence[Entry],
        finish: Callable[[], Awaitable[None]],
        *,
        durable: bool,
    ) -> None:
        """Write the events, in order, and commit the transaction that they belong to."""
        if not entries:
            await finish()
            return
        # Before the lock of the chains: a transaction that holds the lock might wait for rows of
        # this one, and this one for the lock. No database would detect that deadlock.
        await tx.hold_all_locks()
        async with self._lock:
            now_us = self._last_us = max(self._last_us, await tx.moment())
            ends = await self._write(tx, worker_id, entries, now_us)
            try:
                await finish()
            except BaseException:
                # Rolled back, or unknown: reading the chain again will tell.
                for chain in ends:
                    self._begun[chain].doubtful = True
                raise
            self._committed(ends, now_us, durable)

    async def _write(
        self, tx: Tx, worker_id: int, entries: Sequence[Entry], now_us: int
    ) -> dict[Chain, tuple[int, bytes]]:
        """Send the rows; return the new ends of the chains, which count after the commit."""
        tenants = dict.fromkeys(entry[0] for entry in entries)
        ends = {tenant: await self._head(tx, (tenant, worker_id)) for tenant in tenants}
        seqs, *texts, ids, hashes = chained(entries, worker_id, now_us, ends)
        await tx.send(
            INSERT,
            str(now_us),
            str(worker_id),
            arrays.numbers(seqs),
            *map(arrays.texts, texts),
            arrays.ids(ids),
            arrays.blobs(hashes),
        )
        return {(tenant, worker_id): end for tenant, end in ends.items()}

    def _committed(self, ends: dict[Chain, tuple[int, bytes]], now_us: int, durable: bool) -> None:
        for chain, (seq, digest) in ends.items():
            head = self._begun[chain]
            head.seq, head.digest = seq, digest
        if durable:  # everything that was committed before is on disk, too
            for head in self._begun.values():
                if not head.doubtful:
                    head.sure_seq, head.sure_digest, head.sure_us = head.seq, head.digest, now_us

    async def _head(self, tx: Tx, chain: Chain) -> tuple[int, bytes]:
        head = self._begun.get(chain)
        if head is None:
            begun_us = self._given_out.get(chain[1])
            head = _Head(0, GENESIS, 0, GENESIS, begun_us or 0, doubtful=begun_us is None)
            self._begun[chain] = head
        if head.doubtful:
            await self._database.end_lost()
            found = await tx.rows(
                READ_HEAD, chain[0], str(chain[1]), str(head.sure_us), str(head.sure_seq)
            )
            head.seq, head.digest = found[0] if found else (head.sure_seq, head.sure_digest)
            head.doubtful = False
        return head.seq, head.digest
