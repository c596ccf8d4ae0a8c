"""What `ackbone ledger verify` found, and the parts of it that need no table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ackbone.store import seals
from ackbone.store.anchor_file import AnchorFile
from ackbone.store.chain import link
from ackbone.store.seals import Anchor, Chain

Progress = Callable[[int, int], None]
"""Called with the number of events looked at, and of all there are."""

MAX_FINDINGS = 1000


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

    def find(self, kind: str, chain: Chain, seq: int, text: str) -> None:
        """Something is wrong with an event."""
        self.add(Finding(kind=kind, tenant_id=chain[0], worker_id=chain[1], seq=seq, text=text))

    def add(self, finding: Finding) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)
        else:
            self.more_findings += 1


class FileSide:
    """The anchor file, read beside the table: both are in the order of the anchors' numbers."""

    def __init__(self, file: AnchorFile, key: bytes, report: LedgerReport) -> None:
        self._path = file.path
        self._key = key
        self._report = report
        self._exists = file.path.exists()
        # Made before the table is looked at. What workers append from here on is of anchors that
        # they commit meanwhile: that look does not see them, and they were not cut.
        self._lines = self._read(file, file.size()) if self._exists else iter(())
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

    def _read(self, file: AnchorFile, size: int) -> Iterator[Anchor]:
        number = 0
        for at, line in enumerate(file.read(size), 1):
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


class AnchorTrail:
    """The anchors in their order: each readable, signed with the key, behind the one before."""

    def __init__(self, key: bytes, file: FileSide, report: LedgerReport) -> None:
        self._key = key
        self._file = file
        self._report = report
        self.last: Anchor | None = None

    def meet(self, chain: Chain, seq: int, data: Any) -> Anchor | None:
        """The anchor in this event; None: it is none, and that is a finding."""
        try:
            anchor = seals.read_anchor(data)
        except (msgspec.MsgspecError, TypeError):
            self._report.find("anchor", chain, seq, "this is no anchor that ackbone wrote")
            return None
        if not anchor.is_sealed_by(self._key):
            other = anchor.key_id != seals.key_id(self._key)
            why = f"with another key (its id is {anchor.key_id})" if other else "by nobody"
            self._report.find("unsigned", chain, seq, f"anchor {anchor.n} was signed {why}")
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
    """Is this the hash of the record behind that one?"""
    try:
        return link(previous, record) == digest
    except (TypeError, ValueError):  # a column of another type than was written
        return False


def _spans(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first} to {last}"
