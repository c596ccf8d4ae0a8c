"""The report of `ackbone ledger verify`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ackbone.store.seals import Chain

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
