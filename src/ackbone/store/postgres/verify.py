"""`ackbone ledger verify` on PostgreSQL.

Commits of several workers have no common order here, so the table is read chain by chain. Every
event must follow the one before it. Where an anchor signed a chain, the hash must be the signed
one. Events that are older than the last anchor by more than a transaction can last must be signed.
A chain that the newest checkpoint lists begins after the event that is named there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from ackbone.core.clock import to_us
from ackbone.core.errors import StoreCorrupt, StoreUnavailable
from ackbone.pgserver.address import Address
from ackbone.pgserver.failures import translate
from ackbone.store.anchors import AnchorFile
from ackbone.store.ledger import (
    ANCHOR_TASK,
    NEW_CHAIN,
    PRUNED_TASK,
    TENANT,
    Anchor,
    Chain,
    End,
    read_checkpoint,
    readable,
)
from ackbone.store.ledger_verifier import PAGE, LedgerReport, LedgerVerifier, Progress

from .seals import LATE_US

_ROWS = (
    "SELECT tenant_id, worker_id, seq, hash, subscription, task_id, event_type, data::text,"
    " created_at FROM event_log ORDER BY tenant_id, worker_id, seq"
)
_ANCHORS = (
    "SELECT worker_id, seq, data::text FROM event_log WHERE tenant_id = %s AND task_id = %s"
    " ORDER BY created_at, seq"
)
_CHECKPOINT = (
    "SELECT data::text FROM event_log WHERE tenant_id = %s AND task_id = %s"
    " ORDER BY created_at DESC, seq DESC LIMIT 1"
)
# Taken before the first statement: no partition may be dropped between the snapshot and the read.
_HOLD = "LOCK TABLE event_log IN ACCESS SHARE MODE"


def verify_ledger(
    url: str, key: bytes, anchor_file: Path, progress: Progress | None = None
) -> LedgerReport:
    """Read the whole ledger and compare it with its chains, its anchors and the anchor file.

    Workers may run meanwhile: it sees the table as it was at the start.
    """
    address = Address.from_url(url)
    try:
        with psycopg.connect(address) as conn:
            conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            conn.read_only = True
            conn.execute(_HOLD)
            return _Verifier(conn, key, AnchorFile(anchor_file)).run(progress)
    except psycopg.Error as error:
        raise translate(error, address) or StoreUnavailable(str(error)) from error


class _Verifier(LedgerVerifier):
    def __init__(self, conn: psycopg.Connection[Any], key: bytes, file: AnchorFile) -> None:
        super().__init__(key, file)
        self._conn = conn
        self._signed: dict[Chain, dict[int, tuple[str, int]]] = {}
        """Events that anchors signed: by chain and number, the hash and the anchor's number."""
        self._signed_to: dict[Chain, int] = {}
        self._pruned: dict[Chain, End] = {}
        """The last event of each chain that the checkpoint allows to be deleted."""

    def run(self, progress: Progress | None) -> LedgerReport:
        report = self._report
        self._read_checkpoint()
        self._read_anchors()
        ((total,),) = self._conn.execute("SELECT count(*) FROM event_log").fetchall()
        chain: Chain | None = None
        end = NEW_CHAIN
        for row in self._rows():
            if chain != row[:2]:
                chain = (row[0], row[1])
                end = self._pruned.get(chain, NEW_CHAIN)
                report.chains += chain not in self._pruned
            end = self._row(chain, row, end)
            report.events += 1
            if progress is not None and report.events % PAGE == 0:
                progress(report.events, total)
        if progress is not None:
            progress(report.events, total)
        report.chains += len(self._pruned)
        self._gone()
        return self.finish()

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        with self._conn.cursor(name="ledger") as cursor:
            cursor.itersize = PAGE
            for *row, created_at in cursor.execute(_ROWS):
                yield *row, to_us(created_at)

    def _row(self, chain: Chain, row: tuple[Any, ...], before: End) -> End:
        seq, digest, at_us = row[2], row[3], row[8]
        if seq <= self._pruned.get(chain, NEW_CHAIN)[0]:
            self._left_over += 1
            return before
        end = self.event(before, row)
        if end is not before:
            self._compare(chain, seq, digest, at_us)
        return end

    def _compare(self, chain: Chain, seq: int, digest: bytes, at_us: int) -> None:
        found = self._signed.get(chain, {}).pop(seq, None)
        if found is not None and found[0] != digest.hex():
            self._report.find("changed", chain, seq, f"anchor {found[1]} signed another event here")
        if seq > self._signed_to.get(chain, 0):
            self._report.not_yet_anchored += 1
            last = self._anchors.last
            if last is not None and at_us < last.at - LATE_US and chain[0] != TENANT:
                text = f"anchor {last.n} should have signed it and does not name it"
                self._report.find("unsigned", chain, seq, text)

    def _gone(self) -> None:
        for chain, signed in self._signed.items():
            for seq, (_, number) in sorted(signed.items()):
                self._report.find("missing", chain, seq, f"missing: anchor {number} signed it")

    # -- what was pruned --------------------------------------------------------------------------

    def _read_checkpoint(self) -> None:
        """Begin at the newest signed checkpoint."""
        try:
            for (data,) in self._conn.execute(_CHECKPOINT, (TENANT, PRUNED_TASK)):
                checkpoint = readable(read_checkpoint, data, PRUNED_TASK)
                break
            else:
                return
        except StoreCorrupt as error:
            self.bad_checkpoint(str(error))
            return
        if self.is_signed(checkpoint):
            self._pruned = self.begin_at(checkpoint)
            self._signed_to = {chain: seq for chain, (seq, _) in self._pruned.items()}

    # -- anchors ----------------------------------------------------------------------------------

    def _read_anchors(self) -> None:
        for worker_id, seq, data in self._conn.execute(_ANCHORS, (TENANT, ANCHOR_TASK)):
            chain = (TENANT, worker_id)
            if seq <= self._pruned.get(chain, NEW_CHAIN)[0]:
                continue
            anchor = self._anchors.meet(chain, seq, data)
            if anchor is not None:
                for tenant_id, number, signed, digest in anchor.chains:
                    self._sign((tenant_id, number), signed, digest, anchor)

    def _sign(self, chain: Chain, seq: int, digest: str, anchor: Anchor) -> None:
        begin, begins_with = self._pruned.get(chain, NEW_CHAIN)
        if seq > begin:
            self._signed.setdefault(chain, {})[seq] = (digest, anchor.n)
            self._signed_to[chain] = max(seq, self._signed_to.get(chain, 0))
        elif seq == begin and digest != begins_with.hex():
            text = f"anchor {anchor.n} signed another event than the checkpoint names"
            self._report.find("checkpoint", chain, seq, text)
