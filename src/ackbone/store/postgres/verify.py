"""`ackbone ledger verify` on PostgreSQL.

Commits of several workers have no one order here, so the table is read chain by chain. Every event
must follow the one before it; where an anchor signed a chain, the hash must be the signed one; and
what is older than the last anchor by more than a transaction can last must be signed. A chain that
the newest checkpoint lists begins behind the event that is named there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from ackbone.core.clock import to_us
from ackbone.core.errors import StoreCorrupt, StoreUnavailable
from ackbone.store.anchor_file import AnchorFile
from ackbone.store.chain import GENESIS
from ackbone.store.ledger_report import (
    AnchorTrail,
    FileSide,
    Finding,
    LedgerReport,
    Progress,
    matches,
)
from ackbone.store.seals import (
    ANCHOR_TASK,
    PRUNED_TASK,
    TENANT,
    Anchor,
    Chain,
    read_checkpoint,
    readable,
)

from .address import Address
from .failures import translate
from .seals import LATE_US

_PAGE = 2000
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
# Before the first look: a month must not be dropped between what is seen and what is read.
_HOLD = "LOCK TABLE event_log IN ACCESS SHARE MODE"


def verify_ledger(
    url: str, key: bytes, anchor_file: Path, progress: Progress | None = None
) -> LedgerReport:
    """Read the whole ledger and compare it with its chains, its anchors and the anchor file.

    Works beside running workers: it sees the table as it was at the start.
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


class _Verifier:
    def __init__(self, conn: psycopg.Connection[Any], key: bytes, file: AnchorFile) -> None:
        self._conn = conn
        self._key = key
        self._report = LedgerReport(findings=[], notes=[])
        self._file = FileSide(file, key, self._report)
        self._trail = AnchorTrail(key, self._file, self._report)
        self._signed: dict[Chain, dict[int, tuple[str, int]]] = {}
        """What anchors signed: by chain and number, the hash and the anchor."""
        self._signed_to: dict[Chain, int] = {}
        self._pruned: dict[Chain, tuple[int, bytes]] = {}
        """Where chains begin: the last event that a checkpoint lets go."""
        self._left_over = 0

    def run(self, progress: Progress | None) -> LedgerReport:
        report = self._report
        self._read_checkpoint()
        self._read_anchors()
        ((total,),) = self._conn.execute("SELECT count(*) FROM event_log").fetchall()
        chain: Chain | None = None
        known, previous = 0, GENESIS
        for row in self._rows():
            if chain != row[:2]:
                chain = (row[0], row[1])
                known, previous = self._pruned.get(chain, (0, GENESIS))
                report.chains += chain not in self._pruned
            known, previous = self._row(chain, row, known, previous)
            report.events += 1
            if progress is not None and report.events % _PAGE == 0:
                progress(report.events, total)
        if progress is not None:
            progress(report.events, total)
        report.chains += len(self._pruned)
        self._gone()
        self._file.finish(self._trail.last)
        self._notes()
        return report

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        with self._conn.cursor(name="ledger") as cursor:
            cursor.itersize = _PAGE
            yield from cursor.execute(_ROWS)

    def _row(
        self, chain: Chain, row: tuple[Any, ...], known: int, previous: bytes
    ) -> tuple[int, bytes]:
        tenant_id, worker_id, seq, digest, sub, task_id, kind, data, created_at = row
        at_us = to_us(created_at)
        if seq <= self._pruned.get(chain, (0,))[0]:
            self._left_over += 1
            return known, previous
        if seq <= known:
            self._report.find(
                "repeated", chain, seq, f"stands beside event {known}: added or doubled"
            )
            return known, previous
        if seq != known + 1:
            gone = f"event {known + 1} is" if seq == known + 2 else f"{known + 1} to {seq - 1} are"
            self._report.find("missing", chain, seq, f"{gone} missing before it")
        elif not matches(
            previous, digest, (seq, tenant_id, sub, task_id, kind, data, at_us, worker_id)
        ):
            self._report.find(
                "changed", chain, seq, "its content or the event before it is not what was written"
            )
        self._compare(chain, seq, digest, at_us)
        return seq, digest

    def _compare(self, chain: Chain, seq: int, digest: bytes, at_us: int) -> None:
        found = self._signed.get(chain, {}).pop(seq, None)
        if found is not None and found[0] != digest.hex():
            self._report.find(
                "changed", chain, seq, f"it is not the event that anchor {found[1]} signed"
            )
        if seq > self._signed_to.get(chain, 0):
            self._report.not_yet_anchored += 1
            last = self._trail.last
            if last is not None and at_us < last.at - LATE_US and chain[0] != TENANT:
                self._report.find("unsigned", chain, seq, f"anchor {last.n} does not know of it")

    def _gone(self) -> None:
        for chain, signed in self._signed.items():
            for seq, (_, number) in sorted(signed.items()):
                self._report.find(
                    "missing", chain, seq, f"anchor {number} signed it, and it is not there"
                )

    # -- what was pruned --------------------------------------------------------------------------

    def _read_checkpoint(self) -> None:
        """Begin where the newest signed checkpoint says."""
        try:
            for (data,) in self._conn.execute(_CHECKPOINT, (TENANT, PRUNED_TASK)):
                checkpoint = readable(read_checkpoint, data, PRUNED_TASK)
                break
            else:
                return
        except StoreCorrupt as error:
            self._report.add(Finding(kind="checkpoint", text=str(error)))
            return
        if not checkpoint.is_sealed_by(self._key):
            text = f"the checkpoint of {checkpoint.at} is not signed with this key"
            self._report.add(Finding(kind="checkpoint", text=text))
            return
        for tenant_id, worker_id, seq, digest in checkpoint.chains:
            self._pruned[tenant_id, worker_id] = (seq, bytes.fromhex(digest))
            self._signed_to[tenant_id, worker_id] = seq
        self._report.pruned_before = checkpoint.anchor
        self._file.start_at(checkpoint.anchor)

    # -- anchors ----------------------------------------------------------------------------------

    def _read_anchors(self) -> None:
        for worker_id, seq, data in self._conn.execute(_ANCHORS, (TENANT, ANCHOR_TASK)):
            if seq > self._pruned.get((TENANT, worker_id), (0,))[0]:
                self._anchor((TENANT, worker_id), seq, data)

    def _anchor(self, chain: Chain, seq: int, data: str) -> None:
        anchor = self._trail.meet(chain, seq, data)
        if anchor is None:
            return
        for tenant_id, worker_id, signed, digest in anchor.chains:
            self._sign((tenant_id, worker_id), signed, digest, anchor)

    def _sign(self, chain: Chain, seq: int, digest: str, anchor: Anchor) -> None:
        begin, begins_with = self._pruned.get(chain, (0, GENESIS))
        if seq > begin:
            self._signed.setdefault(chain, {})[seq] = (digest, anchor.n)
            self._signed_to[chain] = max(seq, self._signed_to.get(chain, 0))
        elif seq == begin and digest != begins_with.hex():
            text = f"anchor {anchor.n} signed another event than the checkpoint names"
            self._report.find("checkpoint", chain, seq, text)

    def _notes(self) -> None:
        report = self._report
        if self._left_over:
            report.notes.append(
                f"{self._left_over} events before the checkpoint are still there; they are to be "
                "deleted (or are the ends of living chains) and were not checked"
            )
        if self._trail.last is None and report.pruned_before is not None:
            text = f"anchor {report.pruned_before}, up to which events were pruned, is not there"
            report.add(Finding(kind="checkpoint", text=text))
        elif self._trail.last is None:
            report.notes.append("there is no anchor yet: nothing is signed")
        if report.not_yet_anchored:
            report.notes.append(
                f"{report.not_yet_anchored} events are not yet anchored: they are chained, but a "
                "cut or a recomputed chain behind the last anchor cannot be seen"
            )
