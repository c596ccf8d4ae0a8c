"""Verification of a ledger: its report, and the parts that are the same in every dialect.

A dialect reads the events of each chain in order and gives them to `LedgerVerifier.event`. SQLite
reads the table in the order of its rows, PostgreSQL chain by chain, because commits of several
workers have no common order there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from .anchors import AnchorFile
from .ledger import Anchor, Chain, Checkpoint, End, key_id, link, read_anchor

Progress = Callable[[int, int], None]
"""Called with the number of events read so far and the number of all events."""

MAX_FINDINGS = 1000
"""Findings that a report lists. Further ones are only counted."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of the ledger, and its place."""

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
    """The result. If it is `ok`, nothing up to the last anchor was changed, added or removed."""

    events: int = 0
    chains: int = 0
    anchors: int = 0
    last_anchor: int = 0
    last_anchor_at_us: int | None = None
    not_yet_anchored: int = 0
    """Events after the last anchor: chained, but not signed."""
    pruned_before: int | None = None
    """Number of the anchor before which events were pruned, from a signed checkpoint."""
    findings: list[Finding] = []
    more_findings: int = 0
    """Number of findings that are not listed."""
    notes: list[str] = []

    @property
    def ok(self) -> bool:
        return not self.findings

    def find(self, kind: str, chain: Chain, seq: int, text: str) -> None:
        """Add a finding about one event."""
        self.add(Finding(kind=kind, tenant_id=chain[0], worker_id=chain[1], seq=seq, text=text))

    def add(self, finding: Finding) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)
        else:
            self.more_findings += 1


PAGE = 2000
"""Events that are read at once."""


class LedgerVerifier:
    """One verification: the report, and the anchors of the table and of the file beside it."""

    def __init__(self, key: bytes, file: AnchorFile) -> None:
        self._key = key
        self._report = LedgerReport(findings=[], notes=[])
        self._file = AnchorFileReader(file, key, self._report)
        self._anchors = AnchorTrail(key, self._file, self._report)
        self._left_over = 0
        """Events from before the checkpoint that are still in the table."""

    def event(self, end: End, row: tuple[Any, ...]) -> End:
        """Compare an event with the one before it in its chain; returns the new end of the chain.

        The columns of the row are tenant_id, worker_id, seq, hash, subscription, task_id,
        event_type, data and created_at in microseconds.
        """
        tenant_id, worker_id, seq, digest, subscription, task_id, kind, data, at_us = row
        chain = (tenant_id, worker_id)
        known, previous = end
        if not isinstance(seq, int) or not isinstance(digest, bytes):
            text = "its sequence number or hash is malformed"
            self._report.find("changed", chain, known + 1, text)
            return end
        if seq <= known:
            text = f"it follows event {known}: it was added, doubled or moved"
            self._report.find("repeated", chain, seq, text)
            return end
        if seq != known + 1:
            gone = f"event {known + 1} is" if seq == known + 2 else f"{known + 1} to {seq - 1} are"
            self._report.find("missing", chain, seq, f"{gone} missing before it")
        elif not matches(
            previous, digest, (seq, tenant_id, subscription, task_id, kind, data, at_us, worker_id)
        ):
            text = "its content or the event before it is not what was written"
            self._report.find("changed", chain, seq, text)
        return seq, digest

    # -- what was pruned --------------------------------------------------------------------------

    def is_signed(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.is_sealed_by(self._key):
            return True
        self.bad_checkpoint(f"the checkpoint of {checkpoint.at} is not signed with this key")
        return False

    def begin_at(self, checkpoint: Checkpoint) -> dict[Chain, End]:
        """Accept a checkpoint; returns the ends of the chains there."""
        self._report.pruned_before = checkpoint.anchor
        self._file.start_at(checkpoint.anchor)
        return {
            (tenant_id, worker_id): (seq, bytes.fromhex(digest))
            for tenant_id, worker_id, seq, digest in checkpoint.chains
        }

    def bad_checkpoint(self, text: str) -> None:
        self._report.add(Finding(kind="checkpoint", text=text))

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> LedgerReport:
        """All events were read: compare the rest of the anchor file, and write the notes."""
        report, last = self._report, self._anchors.last
        self._file.finish(last)
        if self._left_over:
            report.notes.append(
                f"{self._left_over} events before the checkpoint are still there; they are to be "
                "deleted (or are the ends of living chains) and were not checked"
            )
        if last is None and report.pruned_before is not None:
            self.bad_checkpoint(
                f"anchor {report.pruned_before}, up to which events were pruned, is missing"
            )
        elif last is None:
            report.notes.append("there is no anchor yet: nothing is signed")
        if report.not_yet_anchored:
            report.notes.append(
                f"{report.not_yet_anchored} events are not yet anchored: they are chained, but a "
                "cut or a recomputed chain after the last anchor cannot be detected"
            )
        return report


class AnchorFileReader:
    """The anchor file, read beside the table: both are in the order of the anchor numbers."""

    def __init__(self, file: AnchorFile, key: bytes, report: LedgerReport) -> None:
        self._path = file.path
        self._key = key
        self._report = report
        self._exists = file.path.exists()
        # The size is read before the table. Lines that workers append later are of anchors that
        # they commit meanwhile: this look at the table does not see those, so they were not cut.
        self._lines = self._read(file, file.size()) if self._exists else iter(())
        self._next: Anchor | None = None
        self._started = False
        self._from = 0
        self._unfiled: list[int] = []

    def start_at(self, number: int) -> None:
        """Ignore the anchors before this one: they were pruned from the table."""
        self._from = number

    def meet(self, anchor: Anchor) -> None:
        """Compare an anchor of the table with the next one of the file."""
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
        """Report what is left: anchors of the file that the table lacks, and the reverse."""
        while (line := self._peek()) is not None:
            self._not_in_table(line)
            self._next = None
        if not self._unfiled:
            return
        if not self._exists:
            self._find(f"it does not exist, but the ledger has {len(self._unfiled)} anchors")
        elif last is not None and self._unfiled == [last.n]:
            # The process ended between the commit and the line in the file. The next step of the
            # anchor relay writes the line.
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

    def _read(self, file: AnchorFile, size: int) -> Iterator[Anchor]:
        number = 0
        for at, line in enumerate(file.read(size), 1):
            if not line.endswith(b"\n"):
                self._report.notes.append("the last line of the anchor file was torn by a crash")
                return
            try:
                anchor = read_anchor(line)
            except msgspec.MsgspecError:
                self._find(f"line {at} is not an anchor")
                continue
            if anchor.n <= number:
                self._find(f"line {at}: anchor {anchor.n} follows anchor {number}")
                continue
            number = anchor.n
            yield anchor

    def _find(self, text: str) -> None:
        self._report.add(Finding(kind="anchor_file", text=f"anchor file {self._path}: {text}"))


class AnchorTrail:
    """The anchors of the table in order: each must be readable, signed, and follow the last."""

    def __init__(self, key: bytes, file: AnchorFileReader, report: LedgerReport) -> None:
        self._key = key
        self._file = file
        self._report = report
        self.last: Anchor | None = None

    def meet(self, chain: Chain, seq: int, data: Any) -> Anchor | None:
        """Return the anchor in this event, or None (and a finding) if it is not a valid one."""
        try:
            anchor = read_anchor(data)
        except (msgspec.MsgspecError, TypeError):
            self._report.find("anchor", chain, seq, "this is not an anchor that ackbone wrote")
            return None
        if not anchor.is_sealed_by(self._key):
            other = anchor.key_id != key_id(self._key)
            why = f"was signed with another key (its id is {anchor.key_id})"
            text = why if other else "has no valid signature"
            self._report.find("unsigned", chain, seq, f"anchor {anchor.n} {text}")
            return None
        before, begin = self.last, self._report.pruned_before
        if before is not None and (anchor.n != before.n + 1 or anchor.previous != before.mac):
            self._report.find(
                "anchor", chain, seq, f"anchor {anchor.n} does not follow anchor {before.n}"
            )
        elif before is None and begin is None and anchor.previous:
            self._report.find(
                "anchor", chain, seq, f"the anchors before anchor {anchor.n} are missing"
            )
        elif before is None and begin is not None and anchor.n != begin:
            text = f"anchor {begin}, up to which events were pruned, is not before it"
            self._report.find("checkpoint", chain, seq, text)
        self.last = anchor
        self._report.anchors += 1
        self._report.last_anchor, self._report.last_anchor_at_us = anchor.n, anchor.at
        self._file.meet(anchor)
        return anchor


def matches(previous: bytes, digest: bytes, record: Any) -> bool:
    """Return True if this is the hash of the record that follows the hash `previous`."""
    try:
        return link(previous, record) == digest
    except (TypeError, ValueError):  # a column of another type than was written
        return False


def _spans(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first} to {last}"
