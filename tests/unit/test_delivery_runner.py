"""The runner of a folder: what it sends, in which order, and what it says."""

from __future__ import annotations

import asyncio
import json
import logging
import queue as queues
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ackbone.core.errors import (
    FinalError,
    RateLimited,
    SendUnknown,
    StoreError,
    StoreFull,
    TemporaryError,
)
from ackbone.core.outbound.delivery import SCHEDULED, Outbound
from ackbone.delivery.files import delivery_runner as runner_module
from ackbone.delivery.files.channel_sender import Channels
from ackbone.delivery.files.delivery_queue import DeliveryQueue
from ackbone.delivery.files.delivery_runner import DeliveryRunner, SendFn
from ackbone.delivery.files.queued_delivery import QueuedDelivery, due_at
from ackbone.delivery.recovery_report import recovery_report

LIMIT_S = 20.0
FAST = 0.001
"""Waits of 5 ms, 25 ms, 120 ms, 600 ms."""


class Channel:
    """Takes texts, or raises what it was told to raise first."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.sent: list[tuple[str, str, str]] = []
        self.attempts: queues.Queue[str] = queues.Queue()
        self.got: queues.Queue[str] = queues.Queue()

    def __call__(self, channel: str, recipient: str, content: str) -> None:
        self.attempts.put(content)
        if self.errors:
            raise self.errors.pop(0)
        self.sent.append((channel, recipient, content))
        self.got.put(content)

    def wait_for(self, count: int) -> list[str]:
        return [self.got.get(timeout=LIMIT_S) for _ in range(count)]


@pytest.fixture
def queue(tmp_path: Path) -> DeliveryQueue:
    return DeliveryQueue(tmp_path / "delivery-queue")


@pytest.fixture
def run(queue: DeliveryQueue) -> Iterator[Callable[..., DeliveryRunner]]:
    started: list[DeliveryRunner] = []

    def start(send_fn: SendFn, *, wait_scale: float = FAST) -> DeliveryRunner:
        runner = DeliveryRunner(queue, send_fn, wait_scale=wait_scale)
        runner.start()
        started.append(runner)
        return runner

    yield start
    for runner in started:
        runner.stop()


def emptied(queue: DeliveryQueue) -> None:
    """Waits until nothing waits any more."""
    deadline = time.monotonic() + LIMIT_S
    while queue.load_pending():
        assert time.monotonic() < deadline, queue.load_pending()
        time.sleep(0.005)


def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Waits until the runner said so: it speaks after it has written."""
    deadline = time.monotonic() + LIMIT_S
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.005)


def test_sends_at_once_without_waiting_for_its_next_look(
    queue: DeliveryQueue,
    run: Callable[..., DeliveryRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "LOOK_S", 3600.0)
    channel = Channel()
    run(channel)
    for n in range(3):
        queue.enqueue("telegram", "42", f"text {n}")
        assert channel.wait_for(1) == [f"text {n}"]
    emptied(queue)
    assert channel.sent[0] == ("telegram", "42", "text 0")


def test_the_thread_has_its_name_and_ends(queue: DeliveryQueue) -> None:
    runner = DeliveryRunner(queue, Channel())
    runner.start()
    thread = runner._thread
    assert thread is not None
    assert (thread.name, thread.daemon) == ("delivery-runner", True)
    with pytest.raises(RuntimeError):
        runner.start()
    runner.stop()
    assert not thread.is_alive()
    runner.stop()  # twice does no harm
    runner.start()  # and it may begin again
    runner.stop()


def test_says_what_the_book_says(
    queue: DeliveryQueue,
    run: Callable[..., DeliveryRunner],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ackbone.delivery")
    channel = Channel(*[ConnectionError("simulated failure")] * 3)
    first = queue.enqueue("terminal", "me", "This one is tried again three times.")
    run(channel)
    logged(caplog, f"sent: {first.short_id}")
    second = queue.enqueue("terminal", "me", "hello")
    logged(caplog, f"sent: {second.short_id}")
    a, b = first.id[:8], second.id[:8]
    assert [r.getMessage() for r in caplog.records] == [
        f"[delivery] enqueued: {a} -> terminal",
        f"[delivery] FAILED: {a} (simulated failure), retry 1, backoff 5s",
        f"[delivery] FAILED: {a} (simulated failure), retry 2, backoff 25s",
        f"[delivery] FAILED: {a} (simulated failure), retry 3, backoff 120s",
        f"[delivery] sent: {a} (ack, after 3 retries)",
        f"[delivery] enqueued: {b} -> terminal",
        f"[delivery] sent: {b} (ack)",
    ]


def test_gives_up_after_the_last_attempt(
    queue: DeliveryQueue,
    run: Callable[..., DeliveryRunner],
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = Channel(*[OSError("away")] * 6)
    delivery = queue.enqueue("telegram", "1", "a")
    run(channel)
    emptied(queue)
    (failed,) = queue.load_failed()
    assert (failed.id, failed.retry_count, failed.last_error) == (delivery.id, 6, "away")
    assert channel.attempts.qsize() == 6
    logged(caplog, f"FAILED: {delivery.short_id} (away), given up after 6 attempts")


def test_a_refusal_for_good_is_not_repeated(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    channel = Channel(FinalError("chat not found"))
    queue.enqueue("telegram", "1", "a")
    queue.enqueue("telegram", "1", "b")
    run(channel)
    assert channel.wait_for(1) == ["b"]
    emptied(queue)
    (failed,) = queue.load_failed()
    assert (failed.content, failed.retry_count, failed.last_error) == ("a", 0, "chat not found")


def test_a_limit_of_the_channel_costs_no_attempt(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    limited = [RateLimited("slow down", retry_after_s=0.01) for _ in range(8)]
    channel = Channel(*limited)
    delivery = queue.enqueue("telegram", "1", "a")
    seen: list[int] = []

    def send(channel_name: str, recipient: str, content: str) -> None:
        found = queue.read(delivery.id)
        seen.append(-1 if found is None else found.retry_count)
        channel(channel_name, recipient, content)

    run(send)
    assert channel.wait_for(1) == ["a"]
    emptied(queue)
    assert seen == [0] * 9
    assert queue.load_failed() == []


def test_a_conversation_keeps_its_order_while_others_go_on(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    gate = threading.Event()
    told: list[tuple[str, str]] = []
    refused: list[int] = []

    def send(channel: str, recipient: str, content: str) -> None:
        if recipient == "1" and content == "1" and len(refused) < 3:
            refused.append(1)
            raise ConnectionError("away")
        told.append((recipient, content))
        if len(told) == 30:
            gate.set()

    for n in range(10):
        for recipient in ("1", "2", "3"):
            queue.enqueue("telegram", recipient, str(n))
    run(send)
    assert gate.wait(LIMIT_S)
    emptied(queue)
    for recipient in ("1", "2", "3"):
        assert [c for r, c in told if r == recipient] == [str(n) for n in range(10)]
    # The others did not wait for the one that was stuck.
    assert told.index(("3", "9")) < told.index(("1", "1"))


def test_answers_go_before_what_a_timer_made(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    channel = Channel()
    for n in range(3):
        queue.enqueue("telegram", f"news {n}", "news", priority=SCHEDULED)
    queue.enqueue("telegram", "person", "answer")
    run(channel)
    assert channel.wait_for(4) == ["answer", "news", "news", "news"]


def test_an_async_send_function_works_too(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    channel = Channel()
    cancelled = [True]

    async def send(channel_name: str, recipient: str, content: str) -> None:
        await asyncio.sleep(0)
        if cancelled:
            cancelled.pop()
            raise asyncio.CancelledError
        channel(channel_name, recipient, content)

    queue.enqueue("telegram", "1", "a")
    run(send)
    assert channel.wait_for(1) == ["a"]
    emptied(queue)


def test_the_file_is_read_again_before_each_attempt(
    queue: DeliveryQueue,
    run: Callable[..., DeliveryRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.02)
    channel = Channel()
    tried = threading.Event()

    def send(channel_name: str, recipient: str, content: str) -> None:
        if content == "wrong":
            tried.set()
            raise ConnectionError("away")
        channel(channel_name, recipient, content)

    delivery = queue.enqueue("telegram", "1", "wrong")
    run(send, wait_scale=0.01)
    assert tried.wait(LIMIT_S)
    path = queue.queue_dir / f"{delivery.id}.json"
    beside = path.with_suffix(".new")
    while True:  # as an editor does it
        beside.write_text(json.dumps({**delivery.to_dict(), "content": "right"}))
        beside.replace(path)
        try:
            assert channel.got.get(timeout=0.2) == "right"
            break
        except queues.Empty:
            continue  # the attempt that was under way wrote its own
    dropped = QueuedDelivery("dropped-in", "telegram", "2", "by hand", time.time())
    beside.write_text(json.dumps(dropped.to_dict()))
    beside.replace(queue.queue_dir / "dropped-in.json")
    assert channel.wait_for(1) == ["by hand"]
    emptied(queue)


def test_what_a_crash_hid_is_sent_again_and_marked(
    queue: DeliveryQueue,
    run: Callable[..., DeliveryRunner],
    caplog: pytest.LogCaptureFixture,
) -> None:
    delivery = queue.enqueue("telegram", "1", "a")
    queue.begin(delivery.id)  # and then its process died
    marks: list[int] = []
    channel = Channel()

    def send(channel_name: str, recipient: str, content: str) -> None:
        found = queue.read(delivery.id)
        marks.append(0 if found is None else found.resent)
        channel(channel_name, recipient, content)

    run(send)
    assert channel.wait_for(1) == ["a"]
    emptied(queue)
    assert marks == [1]
    assert f"again: {delivery.short_id} (nobody knows whether it arrived before)" in caplog.text


def test_a_clock_that_was_set_back_holds_nothing_up(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    delivery = queue.enqueue("telegram", "1", "a")
    queue.fail(delivery, "away")
    delivery.last_attempt_at = time.time() + 86_400
    queue._write_atomic(delivery)
    channel = Channel()
    run(channel, wait_scale=1.0)
    assert channel.wait_for(1) == ["a"]


def test_a_clock_that_was_set_back_holds_up_nobody_who_was_told_to_wait(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time() + 86_400
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        delivery = queue.enqueue("telegram", "1", "a")
        queue.begin(delivery.id)
        queue.put_off(delivery, now + 30, "slow down")
    channel = Channel()
    run(channel, wait_scale=1.0)
    assert channel.wait_for(1) == ["a"]


def test_being_told_to_wait_after_a_failure_is_no_further_wait_of_the_table(
    queue: DeliveryQueue,
) -> None:
    delivery = queue.enqueue("telegram", "1", "a")
    queue.fail(delivery, "away")
    queue.begin(delivery.id)
    queue.put_off(delivery, time.time() + 1, "slow down")
    found = queue.read(delivery.id)
    assert found is not None
    assert due_at(found) == found.not_before


def test_a_disk_that_fills_up_is_waited_out(
    queue: DeliveryQueue,
    run: Callable[..., DeliveryRunner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.01)
    channel = Channel()
    whole = queue.begin
    refused: queues.Queue[str] = queues.Queue()

    def full(delivery_id: str) -> QueuedDelivery | None:
        refused.put(delivery_id)
        raise StoreFull("no room left")

    monkeypatch.setattr(queue, "begin", full)
    queue.enqueue("telegram", "1", "a")
    runner = run(channel)
    refused.get(timeout=LIMIT_S)
    monkeypatch.setattr(queue, "begin", whole)
    assert channel.wait_for(1) == ["a"]
    assert runner.failure is None
    assert "no room left" in caplog.text


def test_a_moment_without_room_to_look_is_waited_out(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.01)
    refused: queues.Queue[object] = queues.Queue()

    def too_many(path: object) -> None:
        refused.put(path)
        raise OSError(24, "Too many open files")

    channel = Channel()
    with monkeypatch.context() as patch:
        patch.setattr("os.scandir", too_many)
        runner = run(channel)
        refused.get(timeout=LIMIT_S)
    queue.enqueue("telegram", "1", "a")
    assert channel.wait_for(1) == ["a"]
    assert runner.failure is None


def test_a_file_that_could_not_be_written_again_stops_nobody(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    path = queue.queue_dir / "x.json"
    body = {**QueuedDelivery("x", "c", "r", "text", 1.0).to_dict(), "content": "cut \ud83d"}
    path.write_text(json.dumps(body))
    channel = Channel()
    runner = run(channel)
    queue.enqueue("telegram", "1", "a")
    assert channel.wait_for(1) == ["a"]
    assert runner.failure is None


def test_whoever_takes_it_is_told_of_a_doubt(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    """It stays until an answer comes, however the next attempts end."""
    errors: list[Exception] = [TemporaryError("away"), SendUnknown("silence"), OSError("reset")]
    told: queues.Queue[tuple[str, bool]] = queues.Queue()

    def send(
        channel: str, recipient: str, content: str, *, delivery_id: str, in_doubt: bool
    ) -> None:
        told.put((delivery_id, in_doubt))
        if errors:
            raise errors.pop(0)

    delivery = queue.enqueue("telegram", "1", "a")
    run(send)
    found = [told.get(timeout=LIMIT_S) for _ in range(4)]
    assert found == [(delivery.id, doubt) for doubt in (False, False, True, True)]


def test_a_second_runner_is_refused(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    run(Channel())
    with pytest.raises(StoreError, match="another process delivers"):
        DeliveryRunner(DeliveryQueue(queue.queue_dir), Channel()).start()


def test_stop_waits_for_the_attempt_under_way_and_begins_no_other(queue: DeliveryQueue) -> None:
    inside, go_on = threading.Event(), threading.Event()
    told: list[str] = []

    def send(channel: str, recipient: str, content: str) -> None:
        inside.set()
        assert go_on.wait(LIMIT_S)
        told.append(content)

    for n in range(3):
        queue.enqueue("telegram", str(n), str(n))
    runner = DeliveryRunner(queue, send)
    runner.start()
    assert inside.wait(LIMIT_S)
    threading.Timer(0.05, go_on.set).start()
    runner.stop()
    assert told == ["0"]
    assert [d.content for d in queue.load_pending()] == ["1", "2"]


def test_stop_waits_five_seconds_at_most(
    queue: DeliveryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner_module.STOP_S == 5.0
    monkeypatch.setattr(runner_module, "STOP_S", 0.05)
    inside, go_on = threading.Event(), threading.Event()

    def hangs(channel: str, recipient: str, content: str) -> None:
        inside.set()
        assert go_on.wait(LIMIT_S)

    queue.enqueue("telegram", "1", "hello")
    runner = DeliveryRunner(queue, hangs)
    runner.start()
    thread = runner._thread
    assert thread is not None
    assert inside.wait(LIMIT_S)
    stopping = threading.Thread(target=runner.stop, daemon=True)
    stopping.start()
    stopping.join(LIMIT_S / 2)
    stopped, still_sends = not stopping.is_alive(), thread.is_alive()
    go_on.set()
    thread.join(LIMIT_S)
    assert stopped, "stop waits for a channel that does not answer"
    assert still_sends


def test_what_a_dead_runner_was_sending_does_not_wait_once_more(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    """Its wait was over when the attempt began, and the crash costs no retry."""
    cut = queue.enqueue("telegram", "1", "cut off")
    queue.fail(cut, "away")
    cut.last_attempt_at -= 60
    queue._write_atomic(cut)
    queue.begin(cut.id)  # and then its process died
    again: queues.Queue[QueuedDelivery | None] = queues.Queue()
    begun = time.monotonic()
    run(lambda channel, recipient, content: again.put(queue.read(cut.id)), wait_scale=1.0)
    found = again.get(timeout=LIMIT_S)
    assert time.monotonic() - begun < 4, "shorter than the shortest wait of the table"
    assert found is not None
    assert (found.retry_count, found.resent) == (1, 1)
    emptied(queue)


def test_what_expired_is_not_sent_and_goes_if_a_person_retries_it(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    over = QueuedDelivery("over", "telegram", "1", "over", queue.now(), expires_at=1.0)
    waits = QueuedDelivery(
        "waits", "telegram", "1", "in time", queue.now(), expires_at=time.time() + 3600
    )
    for each in (over, waits):
        queue.put(each)
    channel = Channel()
    run(channel)
    assert channel.wait_for(1) == ["in time"]
    emptied(queue)
    (failed,) = queue.load_failed()
    assert (failed.id, failed.retry_count) == ("over", 0)
    assert failed.last_error == "it expired before it could be sent"
    queue.retry("over")
    assert channel.wait_for(1) == ["over"]


@pytest.mark.parametrize(
    "error",
    [RateLimited("slow", retry_after_s=1), TemporaryError("away"), FinalError("no")],
    ids=["put off", "failed", "refused"],
)
def test_a_doubt_stays_in_the_file_whatever_came_after_it(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner], error: Exception
) -> None:
    waiting = queue.enqueue("telegram", "1", "a")
    channel = Channel(SendUnknown("silence"), error)
    runner = run(channel)
    for _ in range(2):
        channel.attempts.get(timeout=LIMIT_S)
    runner.stop()
    if isinstance(error, FinalError):
        queue.retry(waiting.id)
    told: queues.Queue[bool] = queues.Queue()

    def send(channel: str, recipient: str, content: str, *, in_doubt: bool) -> None:
        told.put(in_doubt)

    assert "1 item may have arrived" in recovery_report(DeliveryQueue(queue.queue_dir))
    run(send)
    assert told.get(timeout=LIMIT_S)


@pytest.mark.parametrize("kind", [TemporaryError, SendUnknown])
def test_whoever_asks_for_more_time_with_its_failure_gets_it(
    queue: DeliveryQueue,
    run: Callable[..., DeliveryRunner],
    caplog: pytest.LogCaptureFixture,
    kind: type[TemporaryError | SendUnknown],
) -> None:
    """It costs an attempt all the same, and a wait of the table that is longer holds.

    `wait_scale` shortens the waits of the table alone.
    """
    channel = Channel(kind("HTTP 503", retry_after_s=0.4), kind("HTTP 503", retry_after_s=0.001))
    delivery = queue.enqueue("telegram", "1", "a")
    waits: list[float] = []

    def send(channel_name: str, recipient: str, content: str) -> None:
        found = queue.read(delivery.id)
        assert found is not None
        if found.last_attempt_at:
            waits.append(found.sending_since - found.last_attempt_at)
        channel(channel_name, recipient, content)

    run(send, wait_scale=0.002)
    assert channel.wait_for(1) == ["a"]
    emptied(queue)
    assert waits[0] >= 0.4 * 0.99
    assert waits[1] >= 25.0 * 0.002 * 0.99
    assert "(HTTP 503), retry 1, backoff 5s" in caplog.text
    assert "(HTTP 503), retry 2, backoff 25s" in caplog.text


def test_nobody_is_waited_for_longer_than_a_day(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    channel = Channel(
        RateLimited("later", retry_after_s=1e9), TemporaryError("later", retry_after_s=1e9)
    )
    queue.enqueue("telegram", "1", "a")
    queue.enqueue("telegram", "2", "b")
    before = time.time()
    runner = run(channel, wait_scale=1.0)
    for _ in range(2):
        channel.attempts.get(timeout=LIMIT_S)
    runner.stop()
    waiting = queue.load_pending()
    assert [each.retry_count for each in waiting] == [0, 1]
    for each in waiting:
        assert before + 86_390 < each.not_before < time.time() + 86_410


def test_an_answer_overtakes_what_a_timer_made_for_the_same_person(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    """While that waits for its next attempt, too: they are two conversations."""
    channel = Channel()
    queue.enqueue("telegram", "1", "timer 1", priority=SCHEDULED)
    queue.enqueue("telegram", "1", "timer 2", priority=SCHEDULED)
    queue.enqueue("telegram", "1", "answer 1")
    queue.enqueue("telegram", "1", "answer 2")
    run(channel, wait_scale=1.0)
    assert channel.wait_for(4) == ["answer 1", "answer 2", "timer 1", "timer 2"]
    channel.errors.append(TemporaryError("away"))
    queue.enqueue("telegram", "1", "timer 3", priority=SCHEDULED)
    while channel.attempts.get(timeout=LIMIT_S) != "timer 3":
        pass
    queue.enqueue("telegram", "1", "answer 3")
    assert channel.wait_for(1) == ["answer 3"]


# -- parts ----------------------------------------------------------------------------------------


class Words:
    """A channel that sends a reply word by word, and fails at the second one if it is told to."""

    name = "words"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sent: list[tuple[str, bool]] = []
        self.failed = threading.Event()

    def parts(self, reply: Outbound) -> list[Outbound]:
        words = reply.content.split()
        return [msgspec.structs.replace(reply, content=word) for word in words]

    async def send(self, reply: Outbound) -> str:
        if self.error is not None and reply.receipts:
            self.failed.set()
            raise self.error
        self.sent.append((reply.content, reply.in_doubt))
        return "a receipt"

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    "error", [TemporaryError("busy"), RateLimited("slowly", retry_after_s=0.001)]
)
def test_what_arrived_in_part_before_a_restart_is_marked(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner], error: Exception
) -> None:
    """Which parts arrived is known to a process that is gone: all are sent, and may be repeats."""
    queue.enqueue("words", "ann", "one two")
    words = Words(error)
    runner = run(Channels(words))
    assert words.failed.wait(LIMIT_S)
    runner.stop()
    assert words.sent == [("one", False)], "in one process none is sent twice"
    words = Words()
    run(Channels(words))
    emptied(queue)
    assert words.sent == [("one", True), ("two", True)]


def test_what_was_given_up_in_part_is_in_doubt(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    known = queue.enqueue("words", "ann", "one two")
    run(Channels(Words(FinalError("no such word"))))
    emptied(queue)
    given_up = json.loads((queue.failed_dir / f"{known.id}.json").read_text())
    assert given_up["sending_since"] > 0


def test_what_did_not_arrive_at_all_is_in_no_doubt(
    queue: DeliveryQueue, run: Callable[..., DeliveryRunner]
) -> None:
    class Down(Words):
        async def send(self, reply: Outbound) -> str:
            self.failed.set()
            raise TemporaryError("down")

    queue.enqueue("words", "ann", "one two")
    words: Words = Down()
    runner = run(Channels(words))
    assert words.failed.wait(LIMIT_S)
    runner.stop()
    words = Words()
    run(Channels(words))
    emptied(queue)
    assert words.sent == [("one", False), ("two", False)]
