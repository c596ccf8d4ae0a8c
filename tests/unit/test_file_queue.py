"""The folder of replies: what its files say, where they are, and what people may do to them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ackbone.core.errors import Ambiguous, InvalidMessage, NotFound, StoreError, StoreFull
from ackbone.delivery.backoff import (
    BACKOFF_MS,
    JITTER,
    compute_backoff_ms,
)
from ackbone.delivery.files import atomic_files
from ackbone.delivery.files.delivery_queue import DeliveryQueue
from ackbone.delivery.files.queued_delivery import QueuedDelivery, due_at, is_ready_for_retry
from ackbone.delivery.recovery_report import recovery_report, recovery_scan


@pytest.fixture
def queue(tmp_path: Path) -> DeliveryQueue:
    return DeliveryQueue(tmp_path / "delivery-queue")


def old(path: Path) -> None:
    """Nobody has touched it for a while."""
    os.utime(path, (time.time() - 60, time.time() - 60))


def drop_in(queue: DeliveryQueue, name: str, content: bytes) -> Path:
    path = queue.queue_dir / name
    path.write_bytes(content)
    old(path)
    return path


def test_the_file_is_the_nine_fields_in_order_readable_and_unescaped(queue: DeliveryQueue) -> None:
    delivery = queue.enqueue("telegram", "42", 'Grüße, 你好 "x"')
    text = (queue.queue_dir / f"{delivery.id}.json").read_text("utf-8")
    assert text == (
        "{\n"
        f'  "id": "{delivery.id}",\n'
        '  "channel": "telegram",\n'
        '  "recipient": "42",\n'
        '  "content": "Grüße, 你好 \\"x\\"",\n'
        f'  "created_at": {delivery.created_at},\n'
        '  "retry_count": 0,\n'
        '  "last_attempt_at": 0.0,\n'
        '  "last_error": "",\n'
        '  "max_retries": 5\n'
        "}"
    )
    assert QueuedDelivery.from_dict(json.loads(text)) == delivery
    assert (queue.queue_dir / f"{delivery.id}.json").stat().st_mode & 0o777 == 0o600


def test_a_file_with_only_the_required_fields_has_the_usual_rest() -> None:
    found = QueuedDelivery.from_dict(
        {"id": "a", "channel": "c", "recipient": "r", "content": "x", "created_at": 5}
    )
    assert found == QueuedDelivery("a", "c", "r", "x", 5)
    assert (found.retry_count, found.max_retries, found.last_error) == (0, 5, "")


def test_what_somebody_else_wrote_into_a_file_is_kept(queue: DeliveryQueue) -> None:
    delivery = queue.enqueue("telegram", "42", "hello", priority=0)
    path = queue.queue_dir / f"{delivery.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "note": {"by": "Ann"}}))
    (loaded,) = queue.load_pending()
    assert (loaded.priority, loaded.extra) == (0, {"note": {"by": "Ann"}})
    queue.fail(loaded, "refused")
    written = json.loads(path.read_text())
    assert list(written)[:9] == list(delivery.to_dict())[:9]
    assert (written["priority"], written["note"], written["retry_count"]) == (0, {"by": "Ann"}, 1)


@pytest.mark.parametrize(
    ("retries", "wait_ms"),
    [(-1, 5000), (0, 5000), (1, 5000), (2, 25000), (3, 120000), (4, 600000), (99, 600000)],
)
def test_waits_by_the_table(retries: int, wait_ms: int) -> None:
    assert compute_backoff_ms(retries) == wait_ms
    assert BACKOFF_MS == [5000, 25000, 120000, 600000]


def test_ready_when_it_never_failed_or_has_waited_its_time() -> None:
    fresh = QueuedDelivery("a", "c", "r", "x", 0.0)
    assert is_ready_for_retry(fresh)
    failed = QueuedDelivery(
        "a", "c", "r", "x", 0.0, retry_count=2, last_attempt_at=time.time() - 24
    )
    assert not is_ready_for_retry(failed)
    failed.last_attempt_at -= 2
    assert is_ready_for_retry(failed)


def test_jitter_only_adds_to_a_wait_and_differs_between_deliveries() -> None:
    moments = [due_at(QueuedDelivery(str(n), "c", "r", "x", 0.0, 1, 100.0)) for n in range(200)]
    assert all(105 <= moment <= 105 + 5 * JITTER for moment in moments)
    assert len(set(moments)) > 190
    put_off = QueuedDelivery("a", "c", "r", "x", 0.0, 1, 100.0, not_before=500.0)
    assert due_at(put_off) == 500.0


def test_a_delivery_goes_its_way(queue: DeliveryQueue) -> None:
    first, second = queue.enqueue("telegram", "1", "a"), queue.enqueue("telegram", "1", "b")
    assert [d.id for d in queue.load_pending()] == [first.id, second.id]
    queue.ack(first.id)
    queue.ack(first.id)  # a repeat does no harm
    for attempt in range(1, 6):
        queue.fail(second, f"attempt {attempt}")
        assert [d.retry_count for d in queue.load_pending()] == [attempt]
    queue.fail(second, "attempt 6")
    assert queue.load_pending() == []
    (given_up,) = queue.load_failed()
    assert (given_up.id, given_up.retry_count, given_up.last_error) == (second.id, 6, "attempt 6")


def named(queue: DeliveryQueue, name: str, content: str = "hello") -> QueuedDelivery:
    return QueuedDelivery(name, "telegram", "1", content, queue.now())


def test_a_delivery_with_an_id_of_the_caller_is_put_once(queue: DeliveryQueue) -> None:
    assert not queue.holds("a")
    queue.put(named(queue, "a"))
    queue.put(named(queue, "a", "another text"))
    assert queue.holds("a")
    (waiting,) = queue.load_pending()
    assert (waiting.id, waiting.content) == ("a", "hello")
    queue.fail_for_good(waiting, "no")
    queue.put(named(queue, "a", "another text"))
    assert queue.holds("a")
    assert queue.load_pending() == []
    queue.ack(queue.retry("a").id)
    assert not queue.holds("a")


@pytest.mark.parametrize("bad", ["", "../x", ".hidden", "a\nb", "x" * 201, "ü" * 101])
def test_an_id_that_cannot_be_a_files_name_is_refused(queue: DeliveryQueue, bad: str) -> None:
    with pytest.raises(InvalidMessage, match="cannot be a file's name"):
        queue.put(named(queue, bad))
    assert list(queue.queue_dir.glob("*.*")) == []


def test_a_repeated_put_syncs_what_the_first_did_not(
    queue: DeliveryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process was killed between the move of the file and the sync of the folder."""
    path = queue.queue_dir / "a.json"
    path.write_bytes(named(queue, "a").to_bytes())
    synced: list[Path] = []
    monkeypatch.setattr(atomic_files, "sync", lambda *folders: synced.extend(folders))
    queue.put(named(queue, "a"))
    assert queue.queue_dir in synced


def test_a_clock_that_is_set_back_changes_no_order(
    queue: DeliveryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = queue.enqueue("telegram", "1", "a")
    monkeypatch.setattr(time, "time", lambda: first.created_at - 60)
    second = queue.enqueue("telegram", "1", "b")
    assert [d.id for d in queue.load_pending()] == [first.id, second.id]


def test_retrying_gives_all_attempts_back_and_keeps_the_reason(queue: DeliveryQueue) -> None:
    delivery = queue.enqueue("telegram", "1", "a")
    queue.fail_for_good(delivery, "chat not found")
    again = queue.retry(delivery.id[:8])
    assert (again.retry_count, again.last_attempt_at, again.last_error) == (
        0,
        0.0,
        "chat not found",
    )
    assert [d.id for d in queue.load_pending()] == [delivery.id]
    assert queue.load_failed() == []


def test_editing_and_discarding(queue: DeliveryQueue) -> None:
    waits, failed = queue.enqueue("telegram", "1", "a"), queue.enqueue("telegram", "1", "b")
    queue.fail_for_good(failed, "too long")
    queue.edit(waits.id, "a, mended")
    queue.edit(failed.id, "b, mended")
    assert [d.content for d in queue.load_pending()] == ["a, mended"]
    assert [d.content for d in queue.load_failed()] == ["b, mended"]
    queue.discard(waits.id)
    queue.discard(failed.id)
    assert queue.load_pending() == queue.load_failed() == []


def test_short_names(queue: DeliveryQueue) -> None:
    for n in range(2):
        name = f"abc{n}"
        drop_in(
            queue,
            f"{name}.json",
            json.dumps(QueuedDelivery(name, "c", "r", "x", n).to_dict()).encode(),
        )
    with pytest.raises(Ambiguous) as caught:
        queue.discard("abc")
    assert caught.value.matches == ["abc0", "abc1"]
    with pytest.raises(NotFound, match="no waiting or failed delivery 'zzz'"):
        queue.discard("zzz")
    with pytest.raises(NotFound):
        queue.discard("")
    with pytest.raises(NotFound, match="no failed delivery 'abc0'"):
        queue.retry("abc0")
    with pytest.raises(NotFound):
        queue.ack("../../etc/passwd")


def test_what_cannot_be_read_back_is_not_taken(queue: DeliveryQueue) -> None:
    for bad in ("\ud800", 7, None):
        with pytest.raises(InvalidMessage):
            queue.enqueue("telegram", "1", bad)  # type: ignore[arg-type]
    assert list(queue.queue_dir.glob("*.*")) == []


def test_a_full_disk_takes_nothing(queue: DeliveryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="nothing was written"):
        queue.enqueue("telegram", "1", "a")
    assert list(queue.queue_dir.glob("*.*")) == []


def test_what_was_refused_is_not_sent_later(
    queue: DeliveryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails after the file is in its place, and the caller is told no."""
    real, calls = os.fsync, []

    def fails_at_the_folder(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fails_at_the_folder)
    with pytest.raises(StoreError, match="cannot be written: Input/output error"):
        queue.enqueue("telegram", "1", "a")
    assert queue.load_pending() == []


def test_a_folder_that_cannot_be_written_is_said_in_our_words(
    queue: DeliveryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = queue.enqueue("telegram", "1", "a")

    def read_only(*args: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", read_only)
    monkeypatch.setattr(os, "replace", read_only)
    for act in (queue.ack, queue.discard):
        with pytest.raises(StoreError, match="cannot be written: Read-only file system"):
            act(delivery.id)
    with pytest.raises(StoreError, match="Read-only file system"):
        queue.fail_for_good(delivery, "no")
    monkeypatch.undo()
    assert [d.id for d in queue.load_pending()] == [delivery.id]


def test_a_broken_file_among_the_failed_is_set_aside_too(queue: DeliveryQueue) -> None:
    path = queue.failed_dir / "x.json"
    path.write_bytes(b"{")
    old(path)
    assert queue.load_failed() == []
    assert queue.broken() == ["x.json"]


GOOD: dict[str, Any] = QueuedDelivery("x", "c", "r", "text", 1.0).to_dict()


def but(**other: Any) -> bytes:
    """A good file but for this; None: without it."""
    return json.dumps({k: v for k, v in {**GOOD, **other}.items() if v is not None}).encode()


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "Expecting value"),
    "torn": (but()[:-20], "delimiter|Unterminated|Expecting"),
    "bytes": (b"\xff\xfe\x00\x01", "codec|decode|Expecting"),
    "a list": (b"[]", "a delivery is a JSON object"),
    "no content": (but(content=None), "it has no content"),
    "text for a number": (but(retry_count="2"), "retry_count is a number, not '2'"),
    "number for a text": (but(content=7), "content is a text, not 7"),
    "true for a number": (but(max_retries=True), "max_retries is a number"),
    "another id": (but(id="../../y"), "its id is '../../y'"),
    "deep": (b"[" * 200_000, "recursion"),
    "half an emoji": (but(content="cut \ud83d"), "surrogates not allowed"),
    "half an emoji in a field of its own": (but(mine=["\ud83d"]), "surrogates not allowed"),
    "no number": (but(created_at=float("nan")), "created_at is a number within reason, not nan"),
    "no end": (but(last_attempt_at=float("inf")), "last_attempt_at is a number within reason"),
    "no float": (but(not_before=10**400), "not_before is a number within reason, not 1000"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_delivery_is_set_aside_whole_and_reported(
    queue: DeliveryQueue, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    content, why = BROKEN[kind]
    good = queue.enqueue("telegram", "1", "a")
    drop_in(queue, "x.json", content)
    assert [d.id for d in queue.load_pending()] == [good.id]
    assert (queue.broken_dir / "x.json").read_bytes() == content
    assert "x.json cannot be read as a delivery" in caplog.text
    (line,) = [r.getMessage() for r in caplog.records if "as a delivery" in r.getMessage()]
    assert re.search(why, line)
    assert "Broken:  1 file (set aside in broken/ directory)" in recovery_report(queue)


def test_a_broken_file_from_the_future_is_set_aside_too(queue: DeliveryQueue) -> None:
    """A clock was set back, or it was copied here with its time."""
    path = drop_in(queue, "x.json", b"{")
    os.utime(path, (time.time() + 3600, time.time() + 3600))
    assert queue.load_pending() == []
    assert queue.broken() == ["x.json"]


def test_a_process_without_room_to_read_sets_nothing_aside(
    queue: DeliveryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = queue.enqueue("telegram", "1", "a")
    old(queue.queue_dir / f"{delivery.id}.json")

    def too_many(*args: Any) -> None:
        raise OSError(24, "Too many open files")

    for owner, name in ((Path, "read_bytes"), (os, "scandir")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, too_many)
            with pytest.raises(StoreError, match="cannot be read: Too many open files"):
                queue.load_pending()
    assert [d.id for d in queue.load_pending()] == [delivery.id]


def test_two_broken_files_of_one_name_are_both_kept(queue: DeliveryQueue) -> None:
    for content in (b"first", b"second"):
        drop_in(queue, "x.json", content)
        queue.load_pending()
    assert sorted(p.read_bytes() for p in queue.broken_dir.iterdir()) == [b"first", b"second"]
    assert len(queue.broken()) == 2


def test_a_file_that_an_editor_is_writing_is_left_alone(queue: DeliveryQueue) -> None:
    path = queue.queue_dir / "x.json"
    path.write_text('{"id": "x", "chan')
    assert queue.load_pending() == []
    assert path.exists()
    path.write_text(json.dumps(GOOD))
    assert [d.id for d in queue.load_pending()] == ["x"]


def test_folders_and_foreign_files_are_nobodys_business(queue: DeliveryQueue) -> None:
    (queue.queue_dir / "notes.txt").write_text("mine")
    (queue.queue_dir / "dir.json").mkdir()
    (queue.queue_dir / ".x.json.swp").write_text("an editor's")
    assert queue.load_pending() == []
    assert {p.name for p in queue.queue_dir.iterdir()} == {
        "notes.txt",
        "dir.json",
        ".x.json.swp",
        "failed",
    }


@pytest.mark.parametrize(
    ("before", "edited", "given_up"),
    [
        ({"retry_count": 5, "max_retries": 5}, {"retry_count": 0, "max_retries": 50}, False),
        ({"retry_count": 5, "max_retries": 5}, {"retry_count": 5, "max_retries": 6}, False),
        ({"retry_count": 0, "max_retries": 5}, {"retry_count": 5, "max_retries": 5}, True),
        ({"retry_count": 0, "max_retries": 5}, {"retry_count": 0, "max_retries": 0}, True),
    ],
)
def test_a_failure_is_counted_by_the_file_that_was_edited_meanwhile(
    queue: DeliveryQueue, before: dict[str, int], edited: dict[str, int], given_up: bool
) -> None:
    put = queue.enqueue("telegram", "1", "a")
    path = queue.queue_dir / f"{put.id}.json"
    path.write_text(json.dumps({**put.to_dict(), **before}))
    sending = queue.begin(put.id)
    assert sending is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), **edited}))
    queue.fail(sending, "away")
    (found,) = queue.load_failed() if given_up else queue.load_pending()
    assert found.retry_count == sending.retry_count == edited["retry_count"] + 1
    assert found.max_retries == sending.max_retries == edited["max_retries"]


def test_an_edit_is_seen_and_a_removed_file_does_not_come_back(queue: DeliveryQueue) -> None:
    delivery = queue.enqueue("telegram", "1", "a")
    (known,) = queue.load_pending()
    path = queue.queue_dir / f"{delivery.id}.json"
    path.write_text(json.dumps({**known.to_dict(), "content": "edited", "retry_count": 3}))
    assert [(d.content, d.retry_count) for d in queue.load_pending()] == [("edited", 3)]
    queue.fail(known, "no")  # by one who read it before the edit
    assert [(d.content, d.retry_count) for d in queue.load_pending()] == [("edited", 4)]
    path.unlink()
    queue.fail(known, "no")
    assert queue.load_pending() == queue.load_failed() == []
    assert queue.begin(delivery.id) is None


def test_unfinished_files_of_the_dead_are_removed_those_of_the_living_are_not(
    queue: DeliveryQueue,
) -> None:
    (queue.queue_dir / "dead.tmp").write_text("{")
    (queue.failed_dir / "dead.tmp").write_text("{")
    with open(queue.queue_dir / "alive.tmp", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        DeliveryQueue(queue.queue_dir)
        assert [p.name for p in queue.queue_dir.rglob("*.tmp")] == ["alive.tmp"]


def test_one_runner_to_a_folder(queue: DeliveryQueue) -> None:
    first, second = queue.only_runner(), queue.only_runner()
    with first, pytest.raises(StoreError, match="another process delivers"), second:
        pass
    with queue.only_runner():
        pass


def test_what_a_start_finds(queue: DeliveryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recovery_scan(queue) == {"pending": 0, "failed": 0, "oldest_pending": None}
    assert recovery_report(queue) == (
        "Delivery Queue Recovery:\n  Pending: 0 items\n  Failed:  0 items"
    )
    start = 1_700_000_000.0
    monkeypatch.setattr(time, "time", lambda: start)
    items = [queue.enqueue("telegram", "1", "a") for _ in range(4)]
    for item in items[1:]:
        item.created_at += 10
        queue._write_atomic(item)
    queue.fail(items[0], "no")
    queue.fail(items[0], "no")
    queue.fail_for_good(items[3], "no")
    monkeypatch.setattr(time, "time", lambda: start + 45)
    assert recovery_scan(queue) == {
        "pending": 3,
        "failed": 1,
        "oldest_pending": {
            "id": items[0].id,
            "channel": "telegram",
            "age_seconds": 45,
            "retry_count": 2,
        },
    }
    assert recovery_report(queue) == (
        "Delivery Queue Recovery:\n"
        "  Pending: 3 items (oldest: 45s ago, 2 retries)\n"
        "  Failed:  1 item (in failed/ directory)\n"
        "  Resuming delivery..."
    )
    for item in items[1:3]:
        queue.ack(item.id)
    queue.retry(items[3].id)
    queue.ack(items[3].id)
    monkeypatch.setattr(time, "time", lambda: start + 30)
    alone = queue.load_pending()[0]
    alone.retry_count = 1
    queue._write_atomic(alone)
    assert recovery_report(queue) == (
        "Delivery Queue Recovery:\n"
        "  Pending: 1 item (oldest: 30s ago, 1 retry)\n"
        "  Failed:  0 items\n"
        "  Resuming delivery..."
    )


def test_the_usual_folder_is_below_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACKBONE_HOME", str(tmp_path / "home"))
    assert DeliveryQueue().queue_dir == tmp_path / "home" / "workspace" / "delivery-queue"
    monkeypatch.delenv("ACKBONE_HOME")
    assert DeliveryQueue().queue_dir == Path(".ackbone/workspace/delivery-queue")
    assert DeliveryQueue(tmp_path / "own").queue_dir == tmp_path / "own"
