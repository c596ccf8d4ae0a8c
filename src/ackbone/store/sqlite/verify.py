"""`ackbone ledger verify` on a SQLite file.

The table is read once, in the order in which it was written. Only the ends of the chains are kept
in memory, so that millions of events need no more of it than a few. An event after the last anchor
is chained but not yet signed: a cut or a recomputed chain there cannot be detected, and the report
says how many such events there are.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from ackbone.core import events
from ackbone.core.errors import NotFound, StoreUnavailable
from ackbone.store.anchors import AnchorFile
from ackbone.store.ledger import ANCHOR_TASK, NEW_CHAIN, TENANT, Anchor, Chain, End, read_anchor
from ackbone.store.ledger_verifier import PAGE, LedgerReport, LedgerVerifier, Progress

from . import seals

_ROWS = (
    "SELECT rowid, tenant_id, worker_id, seq, hash, subscription, task_id, event_type, data,"
    " created_at FROM event_log ORDER BY rowid"
)


def verify_ledger(
    path: Path, key: bytes, anchor_file: Path, progress: Progress | None = None
) -> LedgerReport:
    """Read the whole ledger and compare it with its chains, its anchors and the anchor file.

    Workers may run meanwhile: it sees the table as it was at the start. Until it ends, the
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


class _Verifier(LedgerVerifier):
    def __init__(self, conn: sqlite3.Connection, key: bytes, file: AnchorFile) -> None:
        super().__init__(key, file)
        self._conn = conn
        self._ends: dict[Chain, End] = {}
        self._moved: dict[Chain, int] = {}
        """Chains that moved since the last anchor, and the number of their last event."""

    def run(self, progress: Progress | None) -> LedgerReport:
        report = self._report
        first = self._read_checkpoint()
        (total,) = self._conn.execute("SELECT count(*) FROM event_log").fetchone()
        cursor = self._conn.execute(_ROWS)
        while page := cursor.fetchmany(PAGE):
            for row in page:
                if row[0] < first:
                    self._left_over += 1
                    self._pruned_row(row[1:])
                else:
                    self._row(row[1:])
            report.events += len(page)
            if progress is not None:
                progress(report.events, total)
        report.chains = len(self._ends)
        return self.finish()

    def _row(self, row: tuple[Any, ...]) -> None:
        chain = (row[0], row[1])
        before = self._ends.get(chain, NEW_CHAIN)
        end = self.event(before, row)
        if end is before:
            return
        self._report.not_yet_anchored += 1
        if row[0] == TENANT and row[6] == events.ANCHOR:
            self._anchored(chain, end[0], row[7])  # it signs the events before it, not itself
        self._ends[chain] = end
        self._moved[chain] = end[0]

    def _pruned_row(self, row: tuple[Any, ...]) -> None:
        """Before the checkpoint anything may be missing, but no later anchor may be there."""
        tenant_id, worker_id, seq, _, _, task_id, _, data, _ = row
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
        anchor = self._anchors.meet(chain, seq, data)
        if anchor is None:
            return
        for tenant_id, worker_id, signed, digest in anchor.chains:
            self._compare(anchor, (tenant_id, worker_id), signed, digest)
            self._moved.pop((tenant_id, worker_id), None)
        for unsigned, last in self._moved.items():
            text = f"anchor {anchor.n} should have signed its chain and does not name it"
            self._report.find("unsigned", unsigned, last, text)
        self._moved.clear()
        self._report.not_yet_anchored = 0

    def _compare(self, anchor: Anchor, chain: Chain, signed: int, digest: str) -> None:
        seq, held = self._ends.get(chain, NEW_CHAIN)
        if (seq, held.hex()) == (signed, digest):
            return
        if seq < signed:
            gone = "event" if signed == seq + 1 else f"{seq + 1} to"
            text = f"{gone} {signed} missing: anchor {anchor.n} signed them"
            self._report.find("missing", chain, signed, text)
        elif seq > signed:
            text = f"anchor {anchor.n} signed the chain up to {signed}: later events were inserted"
            self._report.find("repeated", chain, seq, text)
        else:
            self._report.find("changed", chain, seq, f"anchor {anchor.n} signed another event here")
        # One finding is enough: the next anchors are compared with the events that are there.

    # -- what was pruned --------------------------------------------------------------------------

    def _read_checkpoint(self) -> int:
        """Begin at the newest signed checkpoint; returns the first row to verify."""
        try:
            found = seals.last_checkpoint(self._conn)
        except Exception as error:
            self.bad_checkpoint(str(error))
            return 0
        if found is None or not self.is_signed(found[1]):
            return 0
        rowid, checkpoint = found
        start = seals.anchor_row(self._conn, checkpoint.anchor)
        if start is None or start > rowid:
            self.bad_checkpoint(
                f"anchor {checkpoint.anchor}, up to which events were pruned, is not in its place"
            )
            return 0
        self._ends = self.begin_at(checkpoint)
        return start
