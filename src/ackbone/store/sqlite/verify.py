"""`ackbone ledger verify`: is every event there, unchanged, as the anchors signed it?

The table is read once, in the order in which it was written; what is kept in memory is the end of
each chain, so that millions of events cost no more than a few. An event behind the last anchor is
chained but not yet signed: a cut or a recomputed chain there cannot be seen, and the report says
how many such events there are.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from ackbone.core import events
from ackbone.core.errors import NotFound, StoreUnavailable
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
    TENANT,
    Anchor,
    Chain,
    Checkpoint,
    read_anchor,
)

from . import seals

_PAGE = 2000
_COLUMNS = (
    "rowid, tenant_id, worker_id, seq, hash, subscription, task_id, event_type, data, created_at"
)


def verify_ledger(
    path: Path, key: bytes, anchor_file: Path, progress: Progress | None = None
) -> LedgerReport:
    """Read the whole ledger and compare it with its chains, its anchors and the anchor file.

    Works beside running workers: it sees the table as it was at the start. Until it is done the
    write-ahead log cannot shrink.
    """
    if not path.exists():
        raise NotFound(f"there is no database {path}")
    conn = sqlite3.connect(
        f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None, timeout=30
    )
    try:
        conn.execute("BEGIN")
        return _Verifier(conn, key, AnchorFile(anchor_file)).run(progress)
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{path} cannot be read: {error}") from error
    finally:
        conn.close()


class _Verifier:
    def __init__(self, conn: sqlite3.Connection, key: bytes, file: AnchorFile) -> None:
        self._conn = conn
        self._key = key
        self._heads: dict[Chain, tuple[int, bytes]] = {}
        self._moved: dict[Chain, int] = {}
        """Chains that moved since the last anchor, and how far."""
        self._report = LedgerReport(findings=[], notes=[])
        self._file = FileSide(file, key, self._report)
        self._trail = AnchorTrail(key, self._file, self._report)

    def run(self, progress: Progress | None) -> LedgerReport:
        report = self._report
        floor = self._read_checkpoint()
        (total,) = self._conn.execute("SELECT count(*) FROM event_log").fetchone()
        cursor = self._conn.execute(f"SELECT {_COLUMNS} FROM event_log ORDER BY rowid")
        skipped = 0
        while page := cursor.fetchmany(_PAGE):
            for row in page:
                if row[0] < floor:
                    skipped += 1
                    self._pruned_row(row)
                else:
                    self._row(row)
            report.events += len(page)
            if progress is not None:
                progress(report.events, total)
        self._file.finish(self._trail.last)
        report.chains = len(self._heads)
        if skipped:
            report.notes.append(
                f"{skipped} events before the checkpoint are still there; they are to be deleted "
                "(or are the ends of living chains) and were not checked"
            )
        if self._trail.last is None:
            report.notes.append("there is no anchor yet: nothing is signed")
        if report.not_yet_anchored:
            report.notes.append(
                f"{report.not_yet_anchored} events are not yet anchored: they are chained, but a "
                "cut or a recomputed chain behind the last anchor cannot be seen"
            )
        return report

    # -- one event --------------------------------------------------------------------------------

    def _row(self, row: tuple[Any, ...]) -> None:
        _, tenant_id, worker_id, seq, digest, sub, task_id, kind, data, created_at = row
        chain = (tenant_id, worker_id)
        known, previous = self._heads.get(chain, (0, GENESIS))
        if not isinstance(seq, int) or not isinstance(digest, bytes):
            self._report.find(
                "changed", chain, known + 1, "its number or its hash is no such thing"
            )
            return
        if seq <= known:
            self._report.find(
                "repeated", chain, seq, f"stands behind event {known}: added, doubled or moved"
            )
            return
        whole = seq == known + 1
        if not whole:
            gone = f"event {known + 1} is" if seq == known + 2 else f"{known + 1} to {seq - 1} are"
            self._report.find("missing", chain, seq, f"{gone} missing before it")
        elif not matches(
            previous,
            digest,
            (seq, tenant_id, sub, task_id, kind, data, created_at, worker_id),
        ):
            self._report.find(
                "changed", chain, seq, "its content or the event before it is not what was written"
            )
        self._report.not_yet_anchored += 1
        if tenant_id == TENANT and kind == events.ANCHOR:
            self._anchored(chain, seq, data)  # it tells of what stands before it
        self._heads[chain] = (seq, digest)
        self._moved[chain] = seq

    def _pruned_row(self, row: tuple[Any, ...]) -> None:
        """Before the checkpoint anything may be missing, but no anchor of later may stand there."""
        _, tenant_id, worker_id, seq, _, _, task_id, _, data, _ = row
        if tenant_id != TENANT or task_id != ANCHOR_TASK:
            return
        try:
            number = read_anchor(data).n
        except (msgspec.MsgspecError, TypeError):
            return
        if self._report.pruned_before is not None and number >= self._report.pruned_before:
            self._report.find("anchor", (tenant_id, worker_id), seq, f"anchor {number} was moved")

    # -- anchors ----------------------------------------------------------------------------------

    def _anchored(self, chain: Chain, seq: int, data: Any) -> None:
        anchor = self._trail.meet(chain, seq, data)
        if anchor is None:
            return
        for tenant_id, worker_id, signed, digest in anchor.chains:
            self._compare(anchor, (tenant_id, worker_id), signed, digest)
            self._moved.pop((tenant_id, worker_id), None)
        for unknown, last in self._moved.items():
            self._report.find(
                "unsigned", unknown, last, f"anchor {anchor.n} does not know of its chain"
            )
        self._moved.clear()
        self._report.not_yet_anchored = 0

    def _compare(self, anchor: Anchor, chain: Chain, signed: int, digest: str) -> None:
        seq, held = self._heads.get(chain, (0, GENESIS))
        if (seq, held.hex()) == (signed, digest):
            return
        if seq < signed:
            gone = "event" if signed == seq + 1 else f"{seq + 1} to"
            text = f"{gone} {signed} missing: anchor {anchor.n} signed them"
            self._report.find("missing", chain, signed, text)
        elif seq > signed:
            text = f"anchor {anchor.n} signed the chain up to {signed}: what follows was put in"
            self._report.find("repeated", chain, seq, text)
        else:
            self._report.find("changed", chain, seq, f"anchor {anchor.n} signed another event here")
        # One finding is enough: the next anchors are compared with what is there.

    # -- what was pruned --------------------------------------------------------------------------

    def _read_checkpoint(self) -> int:
        """Start where the newest signed checkpoint says; returns the first row to check."""
        try:
            found = seals.last_checkpoint(self._conn)
        except Exception as error:
            self._report.add(Finding(kind="checkpoint", text=str(error)))
            return 0
        if found is None:
            return 0
        rowid, checkpoint = found
        start = self._start_of(rowid, checkpoint)
        if start is None:
            return 0
        for tenant_id, worker_id, seq, digest in checkpoint.chains:
            self._heads[(tenant_id, worker_id)] = (seq, bytes.fromhex(digest))
        self._report.pruned_before = checkpoint.anchor
        self._file.start_at(checkpoint.anchor)
        return start

    def _start_of(self, rowid: int, checkpoint: Checkpoint) -> int | None:
        if not checkpoint.is_sealed_by(self._key):
            text = f"the checkpoint of {checkpoint.at} is not signed with this key"
            self._report.add(Finding(kind="checkpoint", text=text))
            return None
        start = seals.anchor_row(self._conn, checkpoint.anchor)
        if start is None or start > rowid:
            text = (
                f"anchor {checkpoint.anchor}, up to which events were pruned, is not in its place"
            )
            self._report.add(Finding(kind="checkpoint", text=text))
            return None
        return start
