"""The port of replies over a folder: what stands in its files, and what people do to them."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.core import events
from holdfast.core.delivery import (
    Again,
    Failed,
    Held,
    Limit,
    Limits,
    New,
    Outbound,
    Result,
    Sent,
    Settled,
    unlimited,
)
from holdfast.core.errors import (
    FinalError,
    InvalidMessage,
    RateLimited,
    SendUnknown,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TemporaryError,
)
from holdfast.core.events import Entry
from holdfast.core.store import Worker
from holdfast.delivery import whole_files
from holdfast.delivery.file_deliveries import FileDeliveries
from holdfast.delivery.file_queue import DeliveryQueue
from holdfast.delivery.recovery import recovery_report
from holdfast.delivery.runner import DeliveryRunner
from holdfast.testing import FakeClock, Signal

NINE = [
    "id",
    "channel",
    "recipient",
    "content",
    "created_at",
    "retry_count",
    "last_attempt_at",
    "last_error",
    "max_retries",
]


class Folder:
    """A folder that is open, and the worker that sends from it."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        self.path = path
        self.clock = clock
        self.deliveries = FileDeliveries(path, clock=clock)
        self.limits: dict[str, Limits] = {"chat": unlimited}
        self.worker = Worker(worker_id=0)
        self.told: list[Entry] = []
        self.deliveries.on_events(self.told.extend)

    async def open(self) -> None:
        await self.deliveries.open()
        self.worker = await self.deliveries.register("w")

    async def restart(self) -> None:
        await self.deliveries.close()
        await self.open()

    async def put(self, *ids: str, **fields: Any) -> None:
        fields = {"channel": "chat", "recipient": "ann", **fields}
        await self.deliveries.put(
            [New(id=each, content=f"text of {each}", **fields) for each in ids]
        )

    async def take(self) -> list[Outbound]:
        taken = await self.deliveries.take(self.limits, limit=100, worker=self.worker)
        return list(taken.replies)

    async def settle(self, reply: Outbound, result: Result | None = None) -> None:
        batch = [Settled(reply=reply, result=result or Sent())]
        await self.deliveries.settle(self.limits, batch, worker=self.worker)

    def file(self, name: str, folder: str = ".") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / folder / f"{name}.json").read_text())
        return found

    def drop(self, name: str, **fields: Any) -> None:
        """As somebody with an editor does."""
        body = {
            "id": name,
            "channel": "chat",
            "recipient": "ann",
            "content": f"text of {name}",
            "created_at": self.clock.now_us() / 1e6,
            **fields,
        }
        (self.path / f"{name}.json").write_text(json.dumps(body))

    def look(self) -> None:
        """Time enough to look at every file."""
        self.clock.advance(2)


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    async with opened(tmp_path / "delivery-queue") as found:
        yield found


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Folder]:
    found = Folder(path, FakeClock())
    await found.open()
    yield found
    await found.deliveries.close()


def ids(replies: Sequence[Outbound]) -> list[str]:
    return [reply.id for reply in replies]


# -- files ----------------------------------------------------------------------------------------


async def test_a_plain_reply_is_the_nine_fields(folder: Folder) -> None:
    await folder.put("a")
    found = folder.file("a")
    assert list(found) == NINE
    assert (found["retry_count"], found["last_attempt_at"], found["last_error"]) == (0, 0.0, "")


async def test_what_else_is_known_stands_behind_the_nine(folder: Folder) -> None:
    more = {"tenant_id": "acme", "conversation": "k", "options": {"silent": True}, "priority": 0}
    await folder.put("a", expires_s=60.0, **more)
    found = folder.file("a")
    assert list(found)[:9] == NINE
    assert {name: found[name] for name in more} == more
    assert found["expires_at"] == pytest.approx(folder.clock.now_us() / 1e6 + 60)
    (reply,) = await folder.take()
    assert (reply.tenant_id, reply.conversation, reply.options) == ("acme", "k", {"silent": True})


async def test_a_reply_goes_from_file_to_nothing(folder: Folder) -> None:
    await folder.put("a")
    (reply,) = await folder.take()
    assert folder.file("a")["sending_since"] > 0
    await folder.settle(reply)
    assert sorted(each.name for each in folder.path.iterdir() if each.suffix == ".json") == []
    assert not list((folder.path / "failed").iterdir())


async def test_what_failed_is_kept_with_its_reason(folder: Folder) -> None:
    await folder.put("a")
    (reply,) = await folder.take()
    await folder.settle(reply, Failed(error="no such chat"))
    found = folder.file("a", "failed")
    assert (found["content"], found["last_error"]) == ("text of a", "no such chat")
    assert not {"status", "sending_since"} & set(found)
    assert not (folder.path / "a.json").exists()


async def test_what_is_unknown_is_kept_with_a_mark_and_goes_again_in_doubt(folder: Folder) -> None:
    await folder.put("a", "b")
    (reply,) = await folder.take()
    await folder.settle(reply, Held(error="no answer"))
    assert folder.file("a", "failed")["status"] == "unknown"
    folder.deliveries.queue.retry("a")
    folder.look()
    (again,) = await folder.take()
    assert (again.id, again.in_doubt, again.call) == ("a", True, 2)
    assert "status" not in folder.file("a")
    assert folder.file("a")["resent"] == 1


async def test_what_expired_goes_when_a_person_moves_it_back(folder: Folder) -> None:
    await folder.put("a", expires_s=1.0)
    folder.clock.advance(2)
    assert not await folder.take()
    assert folder.file("a", "failed")["last_error"] == "it expired before it could be sent"
    (folder.path / "failed" / "a.json").rename(folder.path / "a.json")
    folder.look()
    assert ids(await folder.take()) == ["a"]


async def test_an_id_that_is_no_name_is_refused(folder: Folder) -> None:
    for name in ("", "a/b", "../a", ".a", "x" * 201, "a\nb"):
        with pytest.raises(InvalidMessage):
            await folder.put(name)
    await folder.put("ü" * 100)
    assert ids(await folder.take()) == ["ü" * 100]


async def test_own_fields_are_kept(folder: Folder) -> None:
    folder.drop("a", note="from the shop")
    (reply,) = await folder.take()
    await folder.settle(reply, Again(error="away", wait_s=5.0))
    found = folder.file("a")
    assert (found["note"], found["retry_count"], found["last_error"]) == (
        "from the shop",
        1,
        "away",
    )


# -- people ---------------------------------------------------------------------------------------


async def test_a_file_of_nine_fields_is_sent(folder: Folder) -> None:
    folder.drop("a", retry_count=0, last_attempt_at=0.0, last_error="", max_retries=5)
    (reply,) = await folder.take()
    assert (reply.id, reply.content, reply.tenant_id) == ("a", "text of a", "default")
    await folder.settle(reply)
    assert not (folder.path / "a.json").exists()


async def test_what_enqueue_adds_is_sent(folder: Folder) -> None:
    made = DeliveryQueue(folder.path).enqueue("chat", "ann", "hello")
    assert ids(await folder.take()) == [made.id]


async def test_an_edit_is_honoured_up_to_the_attempt(folder: Folder) -> None:
    await folder.put("a")
    assert await folder.deliveries.due_in_s(folder.limits) == 0
    found = folder.file("a")
    (folder.path / "a.json").write_text(json.dumps({**found, "content": "mended"}))
    (reply,) = await folder.take()
    assert reply.content == "mended"


async def test_a_place_that_was_changed_counts(folder: Folder) -> None:
    """The limits of the new one are asked, and its conversation is another one."""
    await folder.put("a", "b")
    found = folder.file("a")
    (folder.path / "a.json").write_text(json.dumps({**found, "recipient": "bob"}))
    assert {reply.id: reply.recipient for reply in await folder.take()} == {"a": "bob", "b": "ann"}


async def test_a_retry_count_set_back_makes_it_due(folder: Folder) -> None:
    await folder.put("a")
    (reply,) = await folder.take()
    await folder.settle(reply, Again(error="away", wait_s=600.0))
    assert not await folder.take()
    (folder.path / "a.json").write_text(json.dumps({**folder.file("a"), "retry_count": 0}))
    folder.look()
    assert ids(await folder.take()) == ["a"]


async def test_a_file_that_is_taken_out_is_not_sent(folder: Folder) -> None:
    await folder.put("a", "b")
    (folder.path / "a.json").unlink()
    assert ids(await folder.take()) == ["b"]


async def test_a_file_that_is_taken_out_in_mid_send_does_not_come_back(folder: Folder) -> None:
    for result in (Again(error="away", wait_s=0.0), Failed(error="never"), Sent()):
        await folder.put("a", "b")
        reply, *_ = await folder.take()
        (folder.path / f"{reply.id}.json").unlink()
        await folder.settle(reply, result)
        assert not (folder.path / f"{reply.id}.json").exists()
        assert not (folder.path / "failed" / f"{reply.id}.json").exists()
        (other,) = await folder.take()
        await folder.settle(other, Failed(error="to be put again"))
        (folder.path / "failed" / f"{other.id}.json").unlink()


async def test_a_conversation_goes_on_when_its_first_is_removed(folder: Folder) -> None:
    await folder.put("a", "b")
    (reply,) = await folder.take()
    await folder.settle(reply, Again(error="away", wait_s=600.0))
    (folder.path / "a.json").unlink()
    folder.look()
    assert ids(await folder.take()) == ["b"]


async def test_what_is_no_delivery_is_set_aside_and_others_go(folder: Folder) -> None:
    folder.drop("a", options="loud")
    folder.drop("b", recipient="bob")
    assert ids(await folder.take()) == ["b"], "somebody may be writing the other"
    os.utime(folder.path / "a.json", (1, 1))
    folder.look()
    assert not await folder.take()
    assert folder.deliveries.queue.broken() == ["a.json"]


@pytest.mark.parametrize(
    "odd",
    [
        {"content": "cut \ud83d"},
        {"created_at": float("inf")},
        {"expires_at": float("inf")},
        {"wait_s": float("nan"), "retry_count": 1},
    ],
    ids=["half an emoji", "no time", "no end", "no wait"],
)
async def test_what_could_not_be_reckoned_with_or_written_stops_nobody(
    folder: Folder, odd: dict[str, Any]
) -> None:
    folder.drop("a", **odd)
    folder.drop("b", recipient="bob")
    os.utime(folder.path / "a.json", (1, 1))
    assert ids(await folder.take()) == ["b"]
    assert folder.deliveries.queue.broken() == ["a.json"]


async def test_a_log_of_acts_that_cannot_be_read_now_is_read_later(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await folder.put("a")
    desk = FileDeliveries(folder.path).desk(by="ann")
    await desk.pause_channel("chat")
    is_open = Path.open
    met: list[Path] = []

    def too_many(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "acts.log" and not met:
            met.append(path)
            raise OSError(24, "Too many open files")
        return is_open(path, *args, **options)

    monkeypatch.setattr(Path, "open", too_many)
    async with asyncio.timeout(30):
        assert not await folder.take()
        assert not await folder.take()
    assert met
    assert [kind for *_, kind, _ in folder.told] == [events.DELIVERY_PAUSED]


# -- restarts -------------------------------------------------------------------------------------


async def test_a_sender_that_died_left_a_doubt(folder: Folder) -> None:
    await folder.put("a", "b")
    await folder.put("c", recipient="bob")
    assert ids(await folder.take()) == ["a", "c"]
    await folder.restart()
    assert not await folder.take(), "nobody knows of it yet"
    assert await folder.deliveries.recover(worker=folder.worker) == 2
    again = await folder.take()
    assert [(reply.id, reply.in_doubt, reply.call) for reply in again] == [
        ("a", True, 2),
        ("c", True, 2),
    ]
    told = [kind for *_, kind, _ in folder.told]
    assert told == [events.DELIVERY_CREATED] * 2 + [events.DELIVERY_RECLAIMED] * 2
    await folder.settle(again[0], Sent())
    assert [kind for *_, kind, _ in folder.told[4:]] == [
        events.DELIVERY_RESENT,
        events.DELIVERY_SENT,
    ]


async def test_waits_and_doubts_survive_a_restart(folder: Folder) -> None:
    await folder.put("a")
    (reply,) = await folder.take()
    await folder.settle(reply, Again(error="no answer", wait_s=30.0, in_doubt=True))
    await folder.restart()
    assert await folder.deliveries.recover(worker=folder.worker) == 0, "it was settled"
    folder.clock.advance(29)
    assert not await folder.take()
    folder.clock.advance(1)
    (again,) = await folder.take()
    assert (again.in_doubt, again.retry_count, again.call) == (True, 1, 2)


async def test_limits_survive_a_restart(folder: Folder) -> None:
    folder.limits = {"chat": lambda reply: [Limit("bot", 2, 60.0, whole_channel=True)]}
    for name in "abc":
        await folder.put(name, recipient=name)
    for reply in await folder.take():
        await folder.settle(reply)
    await folder.restart()
    assert not await folder.take()
    folder.clock.advance(60)
    assert ids(await folder.take()) == ["c"]
    (folder.path / ".windows").write_text("rubbish")
    await folder.restart()


async def test_what_arrived_is_remembered(folder: Folder) -> None:
    await folder.put("a")
    (reply,) = await folder.take()
    await folder.settle(reply)
    await folder.restart()
    await folder.put("a")
    assert not await folder.take()
    feeder = FileDeliveries(folder.path, clock=folder.clock)
    await feeder.put([New(id="a", channel="chat", recipient="ann", content="again")])
    assert not (folder.path / "a.json").exists()


async def test_killed_between_the_two_steps_of_an_end_it_is_not_sent_again(folder: Folder) -> None:
    await folder.put("a", "b")
    (reply,) = await folder.take()
    with (folder.path / ".sent").open("a") as log:
        log.write("a\nhalf of an i")
    await folder.restart()
    assert await folder.deliveries.recover(worker=folder.worker) == 0
    assert ids(await folder.take()) == ["b"]
    assert (folder.path / ".sent").read_text() == "a\n"
    assert reply.id == "a"


async def test_the_runner_goes_on_where_this_stopped(folder: Folder) -> None:
    """And this where the runner stopped: the files are the same."""
    await folder.put("a")
    (reply,) = await folder.take()
    await folder.settle(reply, Again(error="no answer", wait_s=0.0, in_doubt=True))
    await folder.put("b", conversation="k", tenant_id="acme")
    await folder.deliveries.close()
    sent: Signal[str] = Signal("sent")
    queue = DeliveryQueue(folder.path)
    assert "1 item may have arrived" in recovery_report(queue)
    runner = DeliveryRunner(queue, lambda channel, to, text: sent.emit(text), wait_scale=0.0)
    runner.start()
    await sent.wait(2)
    runner.stop()
    assert sent.seen == ["text of a", "text of b"]
    waiting = queue.enqueue("chat", "ann", "later")
    begun = queue.begin(waiting.id)
    assert begun is not None
    await folder.open()
    assert await folder.deliveries.recover(worker=folder.worker) == 1
    (again,) = await folder.take()
    assert (again.id, again.in_doubt) == (waiting.id, True)


@pytest.mark.parametrize(
    "error",
    [RateLimited("slow", retry_after_s=1), TemporaryError("away"), FinalError("no")],
    ids=["put off", "failed", "refused"],
)
async def test_a_doubt_of_the_runner_stays_whatever_came_after_it(
    folder: Folder, error: Exception
) -> None:
    await folder.deliveries.close()
    queue = DeliveryQueue(folder.path)
    waiting = queue.enqueue("chat", "ann", "hello")
    errors: list[Exception] = [SendUnknown("silence"), error]
    tried: Signal[str] = Signal("tried")

    def send(channel: str, to: str, text: str) -> None:
        tried.emit(text)
        raise errors.pop(0)

    runner = DeliveryRunner(queue, send, wait_scale=0.0)
    runner.start()
    await tried.wait(2)
    runner.stop()
    folder.clock.jump_wall(time.time() + 3600 - folder.clock.now_us() / 1e6)
    await folder.open()
    if isinstance(error, FinalError):
        await folder.deliveries.desk(by="ann").retry_deliveries([waiting.id])
    assert await folder.deliveries.recover(worker=folder.worker) == 0, "nobody died"
    (again,) = await folder.take()
    assert (again.id, again.in_doubt) == (waiting.id, True)


async def test_one_process_sends(folder: Folder) -> None:
    other = FileDeliveries(folder.path)
    with pytest.raises(StoreError, match="another process delivers from"):
        await other.open()
    with pytest.raises(StoreUnavailable):
        await other.register("w")
    await other.put([New(id="a", channel="chat", recipient="ann", content="hello")])
    assert ids(await folder.take()) == ["a"]


async def test_a_clock_that_is_set_back_holds_nothing_up(folder: Folder) -> None:
    folder.limits = {"chat": lambda reply: [Limit("bot", 1, 60.0, whole_channel=True)]}
    await folder.put("a", "b")
    (reply,) = await folder.take()
    await folder.settle(reply, Again(error="away", wait_s=600.0))
    folder.clock.jump_wall(-86400)
    assert not await folder.take(), "its limit holds"
    folder.clock.advance(60)
    assert ids(await folder.take()) == ["a"]


async def test_a_clock_that_is_set_forward_opens_no_limit(folder: Folder) -> None:
    folder.limits = {"chat": lambda reply: [Limit("bot", 1, 60.0, whole_channel=True)]}
    await folder.put("a", "b")
    (reply,) = await folder.take()
    await folder.settle(reply)
    folder.clock.jump_wall(86400)
    assert not await folder.take()
    folder.clock.advance(60)
    assert ids(await folder.take()) == ["b"]


# -- the disk -------------------------------------------------------------------------------------


async def test_a_batch_shares_the_sync_of_the_folder(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync = whole_files.sync

    def counted(*folders: Path) -> None:
        synced.extend(folders)
        sync(*folders)

    monkeypatch.setattr(whole_files, "sync", counted)
    for n in range(20):
        await folder.put(f"r{n}", recipient=f"chat {n}")
    assert len(synced) == 20
    synced.clear()
    replies = await folder.take()
    assert (len(replies), synced) == (20, [folder.path])
    synced.clear()
    batch = [Settled(reply=reply, result=Sent()) for reply in replies]
    await folder.deliveries.settle(folder.limits, batch, worker=folder.worker)
    assert synced == [folder.path]


async def test_who_comes_while_it_writes_shares_the_next_sync(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync = whole_files.sync
    go = threading.Event()

    def counted(*folders: Path) -> None:
        assert go.wait(20)
        synced.extend(folders)
        sync(*folders)

    monkeypatch.setattr(whole_files, "sync", counted)
    puts = [asyncio.create_task(folder.put(f"r{n:02}")) for n in range(30)]
    await asyncio.sleep(0)  # every one of them has asked
    go.set()
    await asyncio.gather(*puts)
    assert len(synced) <= 2
    assert len(list(folder.path.glob("*.json"))) == 30


async def test_a_folder_that_is_away_is_said_so_and_waited_for(folder: Folder) -> None:
    await folder.put("a")
    folder.path.rename(folder.path.with_name("away"))
    folder.look()
    with pytest.raises(StoreError, match="cannot be read"):
        await folder.take()
    folder.path.with_name("away").rename(folder.path)
    assert ids(await folder.take()) == ["a"]


def _full_after(monkeypatch: pytest.MonkeyPatch, room: int) -> Callable[[], None]:
    """The disk has room for so many files; returns what makes room again."""
    write = whole_files.write
    left = room

    def limited(path: Path, body: bytes, *, new: bool = False) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            raise StoreFull(f"no room left for {path}")
        return write(path, body, new=new)

    monkeypatch.setattr(whole_files, "write", limited)
    return lambda: monkeypatch.setattr(whole_files, "write", write)


async def test_a_full_disk_takes_all_or_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = _full_after(monkeypatch, 1)
    with pytest.raises(StoreFull):
        await folder.put("a", "b")
    empty()
    assert not await folder.take()
    await folder.put("a", "b")
    assert ids(await folder.take()) == ["a"]


async def test_what_was_taken_before_the_disk_was_full_goes(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.limits = {"chat": lambda reply: [Limit("bot", 3, 60.0)]}
    for name in "abc":
        await folder.put(name, recipient=name)
    empty = _full_after(monkeypatch, 2)
    taken = await folder.take()
    assert ids(taken) == ["a", "b"]
    with pytest.raises(StoreFull):
        await folder.take()
    empty()
    assert ids(await folder.take()) == ["c"], "its call was not counted"
    for reply in taken:
        await folder.settle(reply)


async def test_an_end_that_cannot_be_written_is_written_later(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await folder.put("a", "b")
    (reply,) = await folder.take()
    empty = _full_after(monkeypatch, 0)
    with pytest.raises(StoreFull):
        await folder.settle(reply, Failed(error="never"))
    empty()
    assert [kind for *_, kind, _ in folder.told] == [events.DELIVERY_CREATED]
    await folder.settle(reply, Failed(error="never"))
    assert [kind for *_, kind, _ in folder.told[1:]] == [events.DELIVERY_FAILED]
    assert ids(await folder.take()) == ["b"]
