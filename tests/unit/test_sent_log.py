"""What a folder remembers of replies that arrived."""

from __future__ import annotations

from pathlib import Path

from holdfast.delivery.sent_log import SentLog


def test_another_process_sees_what_was_added(tmp_path: Path) -> None:
    writer, reader = SentLog(tmp_path / ".sent"), SentLog(tmp_path / ".sent")
    assert "a" not in reader
    writer.add(["a", "b"])
    assert "a" in reader
    writer.add(["c"])
    assert "c" in reader
    assert "d" not in reader


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / ".sent"
    log, reader = SentLog(path, kept=10), SentLog(path, kept=10)
    assert "r00" not in reader
    for n in range(21):
        log.add([f"r{n:02}"])
    assert path.read_text().split() == [f"r{n:02}" for n in range(11, 21)]
    assert "r20" in log
    assert "r10" not in log
    assert "r20" in reader, "it looks into the new file"


def test_half_a_line_is_no_id(tmp_path: Path) -> None:
    path = tmp_path / ".sent"
    path.write_text("a\nb")
    log = SentLog(path)
    assert "a" in log
    assert "b" not in log
    log.shorten()
    log.add(["c"])
    assert path.read_text() == "a\nc\n"


def test_nothing_but_half_a_line_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".sent"
    path.write_text("b")
    log = SentLog(path)
    log.shorten()
    log.add(["c"])
    assert "c" in SentLog(path)
    assert "bc" not in SentLog(path)


def test_a_repeat_is_marked_and_known_by_its_id_alone(tmp_path: Path) -> None:
    log = SentLog(tmp_path / ".sent")
    log.add(["a", "b"], again={"b", "another"})
    assert (tmp_path / ".sent").read_text() == "a\nb\tagain\n"
    later = SentLog(tmp_path / ".sent")
    assert "a" in later
    assert "b" in later
    later.shorten()
    assert (tmp_path / ".sent").read_text() == "a\nb\tagain\n"
