"""`holdfast ledger verify`: is every event there, unchanged, as the anchors signed it?

The table is read once, in the order in which it was written; what is kept in memory is the end of
each chain, so that millions of events cost no more than a few. An event behind the last anchor is
chained but not yet signed: a cut or a recomputed chain there cannot be seen, and the report says
how many such events there are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from holdfast.core import events
from holdfast.core.errors import NotFound, StoreUnavailable
from holdfast.store.chain import GENESIS, link

from . import seals
from .anchors import AnchorFile
from .seals import ANCHOR_TASK, TENANT, Anchor, Chain, Checkpoint

Progress = Callable[[int, int], None]
"""Called with the number of events looked at, and of all there are."""

MAX_FINDINGS = 1000
_PAGE = 2000
_COLUMNS = (
    "rowid, tenant_id, worker_id, seq, hash, subscription, task_id, event_type, data, created_at"
)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, and where."""

    kind: str
    """changed, missing, repeated, unsigned, anchor, anchor_file or checkpoint"""
    text: str
    tenant_id: str = ""
    worker_id: int = 0
    seq: int = 0

    def __str__(self) -> str:
        if not self.worker_id:
            return self.text
        return f"tenant {self.tenant_id}, worker {self.worker_id}, event {self.seq}: {self.text}"


class LedgerReport(msgspec.Struct, kw_only=True):
    """What was found. `ok`: up to the last anchor nothing was changed, added or taken away."""

    events: int = 0
    chains: int = 0
    anchors: int = 0
    last_anchor: int = 0
    last_anchor_at_us: int | None = None
    not_yet_anchored: int = 0
    """Events behind the last anchor: chained, not signed."""
    pruned_before: int | None = None
    """Events before this anchor were pruned, as a signed checkpoint says."""
    findings: list[Finding] = []
    more_findings: int = 0
    """Findings beyond those listed."""
    notes: list[str] = []

    @property
    def ok(self) -> bool:
        return not self.findings

    def add(self, finding: Finding) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)
        else:
            self.more_findings += 1


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
        self._anchor: Anchor | None = None
        self._report = LedgerReport(findings=[], notes=[])
        self._file = _FileSide(file, key, self._report)

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
        self._file.finish(self._anchor)
        report.chains = len(self._heads)
        if skipped:
            report.notes.append(
                f"{skipped} events before the checkpoint are still there; they are to be deleted "
                "(or are the ends of living chains) and were not checked"
            )
        if self._anchor is None:
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
            self._find("changed", chain, known + 1, "its number or its hash is no such thing")
            return
        if seq <= known:
            self._find(
                "repeated", chain, seq, f"stands behind event {known}: added, doubled or moved"
            )
            return
        whole = seq == known + 1
        if not whole:
            gone = f"event {known + 1} is" if seq == known + 2 else f"{known + 1} to {seq - 1} are"
            self._find("missing", chain, seq, f"{gone} missing before it")
        elif not _matches(
            previous,
            digest,
            (seq, tenant_id, sub, task_id, kind, data, created_at, worker_id),
        ):
            self._find(
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
            number = seals.read_anchor(data).n
        except (msgspec.MsgspecError, TypeError):
            return
        if self._report.pruned_before is not None and number >= self._report.pruned_before:
            self._find("anchor", (tenant_id, worker_id), seq, f"anchor {number} was moved")

    # -- anchors ----------------------------------------------------------------------------------

    def _anchored(self, chain: Chain, seq: int, data: Any) -> None:
        report = self._report
        try:
            anchor = seals.read_anchor(data)
        except (msgspec.MsgspecError, TypeError):
            self._find("anchor", chain, seq, "this is no anchor that holdfast wrote")
            return
        if not anchor.is_sealed_by(self._key):
            other = anchor.key_id != seals.key_id(self._key)
            why = f"with another key (its id is {anchor.key_id})" if other else "by nobody"
            self._find("unsigned", chain, seq, f"anchor {anchor.n} was signed {why}")
            return
        before = self._anchor
        if before is not None and (anchor.n != before.n + 1 or anchor.previous != before.mac):
            self._find("anchor", chain, seq, f"anchor {anchor.n} does not follow anchor {before.n}")
        elif before is None and report.pruned_before is None and anchor.previous:
            self._find("anchor", chain, seq, f"the anchors before anchor {anchor.n} are missing")
        for tenant_id, worker_id, signed, digest in anchor.chains:
            self._compare(anchor, (tenant_id, worker_id), signed, digest)
            self._moved.pop((tenant_id, worker_id), None)
        for unknown, last in self._moved.items():
            self._find("unsigned", unknown, last, f"anchor {anchor.n} does not know of its chain")
        self._moved.clear()
        self._file.meet(anchor)
        self._anchor = anchor
        report.anchors += 1
        report.last_anchor, report.last_anchor_at_us = anchor.n, anchor.at
        report.not_yet_anchored = 0

    def _compare(self, anchor: Anchor, chain: Chain, signed: int, digest: str) -> None:
        seq, held = self._heads.get(chain, (0, GENESIS))
        if (seq, held.hex()) == (signed, digest):
            return
        if seq < signed:
            gone = "event" if signed == seq + 1 else f"{seq + 1} to"
            text = f"{gone} {signed} missing: anchor {anchor.n} signed them"
            self._find("missing", chain, signed, text)
        elif seq > signed:
            text = f"anchor {anchor.n} signed the chain up to {signed}: what follows was put in"
            self._find("repeated", chain, seq, text)
        else:
            self._find("changed", chain, seq, f"anchor {anchor.n} signed another event here")
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

    def _find(self, kind: str, chain: Chain, seq: int, text: str) -> None:
        self._report.add(
            Finding(kind=kind, tenant_id=chain[0], worker_id=chain[1], seq=seq, text=text)
        )


class _FileSide:
    """The anchor file, read beside the table: both are in the order of the anchors' numbers."""

    def __init__(self, file: AnchorFile, key: bytes, report: LedgerReport) -> None:
        self._path = file.path
        self._key = key
        self._report = report
        self._exists = file.path.exists()
        self._lines = self._read(file) if self._exists else iter(())
        self._next: Anchor | None = None
        self._started = False
        self._from = 0
        self._unfiled: list[int] = []

    def start_at(self, number: int) -> None:
        """Anchors before this one were pruned from the table."""
        self._from = number

    def meet(self, anchor: Anchor) -> None:
        """An anchor of the table: the file must have it next."""
        while (line := self._peek()) is not None and line.n < anchor.n:
            self._not_in_table(line)
            self._next = None
        if line is None or line.n > anchor.n:
            self._unfiled.append(anchor.n)
            return
        if self._unfiled:
            self._find(f"anchors {_spans(self._unfiled)} are missing from it")
            self._unfiled = []
        if line.mac != anchor.mac:
            self._find(f"its anchor {anchor.n} is not the one in the ledger")
        self._next = None

    def finish(self, last: Anchor | None) -> None:
        """The rest of the file is not in the table; the rest of the table is not in the file."""
        while (line := self._peek()) is not None:
            self._not_in_table(line)
            self._next = None
        if not self._unfiled:
            return
        if not self._exists:
            self._find(f"it does not exist, but the ledger has {len(self._unfiled)} anchors")
        elif last is not None and self._unfiled == [last.n]:
            # Committed, and the process ended before it wrote the line: the next step writes it.
            self._report.notes.append(f"anchor {last.n} is not yet in the anchor file")
        else:
            self._find(f"anchors {_spans(self._unfiled)} are missing from it")

    def _not_in_table(self, line: Anchor) -> None:
        if line.n < self._from:
            return
        signed = line.is_sealed_by(self._key)
        what = "is not in the ledger: it was cut back" if signed else "is not signed with this key"
        self._find(f"its anchor {line.n} {what}")

    def _peek(self) -> Anchor | None:
        if self._next is None:
            self._next = next(self._lines, None)
        return self._next

    def _read(self, file: AnchorFile) -> Iterator[Anchor]:
        number = 0
        for at, line in enumerate(file.read(), 1):
            if not line.endswith(b"\n"):
                self._report.notes.append("the last line of the anchor file was torn by a crash")
                return
            try:
                anchor = seals.read_anchor(line)
            except msgspec.MsgspecError:
                self._find(f"line {at} is no anchor")
                continue
            if anchor.n <= number:
                self._find(f"line {at}: anchor {anchor.n} stands behind anchor {number}")
                continue
            number = anchor.n
            yield anchor

    def _find(self, text: str) -> None:
        self._report.add(Finding(kind="anchor_file", text=f"anchor file {self._path}: {text}"))


def _matches(previous: bytes, digest: bytes, record: Any) -> bool:
    try:
        return link(previous, record) == digest
    except (TypeError, ValueError):  # a column of another type than was written
        return False


def _spans(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first} to {last}"
