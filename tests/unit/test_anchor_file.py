"""The anchor file beside the ledger, while workers go on."""

from pathlib import Path

from ackbone.store.anchors import AnchorFile
from ackbone.store.ledger import next_anchor
from ackbone.store.ledger_verifier import AnchorFileReader, LedgerReport

KEY = b"k" * 32


def test_an_anchor_that_is_made_during_a_verification_was_not_cut(tmp_path: Path) -> None:
    file = AnchorFile(tmp_path / "ledger.anchors")
    first = next_anchor(KEY, None, filed=0, at_us=1, chains=())
    second = next_anchor(KEY, first, filed=1, at_us=2, chains=())
    file.append([first])
    report = LedgerReport(findings=[], notes=[])
    side = AnchorFileReader(file, KEY, report)
    file.append([second])  # a worker, after the table was looked at
    side.meet(first)
    side.finish(first)
    assert report.findings == []

    later = AnchorFileReader(file, KEY, report)
    later.meet(first)
    later.finish(first)
    assert "its anchor 2 is not in the ledger: it was cut back" in report.findings[0].text
