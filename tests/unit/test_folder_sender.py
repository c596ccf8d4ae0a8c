"""A folder that is sent from inside an event loop, and one that an app hands its replies to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import App, Context, DeliveryQueue, FileDeliveries, FolderChannel, FolderSender
from holdfast.core import events
from holdfast.core.delivery import DIRECT, Limit, New, Outbound
from holdfast.core.errors import FinalError, SendUnknown, StoreError, StoreFull, TemporaryError
from holdfast.core.events import Event
from holdfast.core.store import Worker
from holdfast.delivery import whole_files
from holdfast.delivery.attempts import Policy
from holdfast.delivery.filed import Filed
from holdfast.observe.observers import Observers
from holdfast.testing import Signal

FAST = Policy(wait_scale=0.0, timeout_s=5.0)


class Chat:
    """Takes what it is told to take, and says what it was sent."""

    def __init__(self, *errors: Exception, name: str = "chat") -> None:
        self.name = name
        self.errors = list(errors)
        self.got: Signal[Outbound] = Signal("got")
        self.closed = False

    async def send(self, reply: Outbound) -> str | None:
        self.got.emit(reply)
        if self.errors:
            raise self.errors.pop(0)
        return None

    async def close(self) -> None:
        self.closed = True


class Heard:
    """What is told of a folder."""

    def __init__(self, deliveries: FileDeliveries) -> None:
        self.events: Signal[Event] = Signal("events")
        observers = Observers()
        observers.add(self.events.emit)
        deliveries.on_events(observers.hear)

    async def of(self, kind: str, delivery_id: str) -> Event:
        def is_it(event: Event) -> bool:
            return event.type == kind and event.data["delivery_id"] == delivery_id

        return await self.events.wait_for(is_it, what=f"{kind} of {delivery_id}")


def new(name: str, **fields: Any) -> New:
    given = {"channel": "chat", "recipient": "ann", "content": f"text of {name}", **fields}
    return New(id=name, **given)


async def test_what_is_put_in_is_sent_and_told_of(tmp_path: Path) -> None:
    deliveries, chat = FileDeliveries(tmp_path), Chat()
    heard = Heard(deliveries)
    async with FolderSender(deliveries, [chat]):
        await deliveries.put([new("a"), new("b"), new("c", recipient="bob")])
        for name in "abc":
            await heard.of(events.DELIVERY_SENT, name)
    to_ann = [reply.id for reply in chat.got.seen if reply.recipient == "ann"]
    assert to_ann == ["a", "b"]
    assert chat.closed
    assert not list(tmp_path.glob("*.json"))


async def test_others_drop_files_in(tmp_path: Path) -> None:
    chat = Chat()
    async with FolderSender(FileDeliveries(tmp_path), [chat]):
        made = await asyncio.to_thread(DeliveryQueue(tmp_path).enqueue, "chat", "ann", "hello")
        assert (await chat.got.wait()).id == made.id


async def test_calls_are_made_side_by_side(tmp_path: Path) -> None:
    """All of them are under way before the first is answered."""
    deliveries, chat = FileDeliveries(tmp_path), Chat()
    together = asyncio.Barrier(20)

    async def send(reply: Outbound) -> str | None:
        await asyncio.wait_for(together.wait(), 20)
        chat.got.emit(reply)
        return None

    chat.send = send  # type: ignore[method-assign]
    async with FolderSender(deliveries, [chat]):
        await deliveries.put([new(f"r{n}", recipient=f"chat {n}") for n in range(20)])
        await chat.got.wait(20)


async def test_attempts_end_as_the_channel_says(tmp_path: Path) -> None:
    deliveries = FileDeliveries(tmp_path)
    chat = Chat(TemporaryError("away"), SendUnknown("no answer"), FinalError("no such chat"))
    heard = Heard(deliveries)
    async with FolderSender(deliveries, [chat], policy=FAST):
        await deliveries.put([new("a")])
        failed = await heard.of(events.DELIVERY_FAILED, "a")
    assert failed.data["error"] == "no such chat"
    assert [(reply.retry_count, reply.in_doubt) for reply in chat.got.seen] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    kept = json.loads((tmp_path / "failed" / "a.json").read_text())
    assert (kept["content"], kept["last_error"]) == ("text of a", "no such chat")


async def test_what_must_not_be_repeated_is_held(tmp_path: Path) -> None:
    deliveries, chat = FileDeliveries(tmp_path), Chat(SendUnknown("no answer"))
    heard = Heard(deliveries)
    policy = msgspec.structs.replace(FAST, hold_unknown=True)
    async with FolderSender(deliveries, [chat], policy=policy):
        await deliveries.put([new("a"), new("b")])
        await heard.of(events.DELIVERY_UNKNOWN, "a")
        await heard.of(events.DELIVERY_SENT, "b")
    held = json.loads((tmp_path / "failed" / "a.json").read_text())
    assert held["status"] == "unknown"
    del held["sending_since"]  # a person decides
    (tmp_path / "a.json").write_text(json.dumps(held))
    (tmp_path / "failed" / "a.json").unlink()
    async with FolderSender(FileDeliveries(tmp_path), [chat], policy=policy):
        assert (await chat.got.wait(3)).id == "a"


class Wordy(Chat):
    """Sends word by word, at most two a minute."""

    def parts(self, reply: Outbound) -> Sequence[Outbound]:
        return [msgspec.structs.replace(reply, content=word) for word in reply.content.split()]

    def limits(self, reply: Outbound) -> Sequence[Limit]:
        return [Limit("wordy", 2, 60.0, whole_channel=True)]


async def test_parts_that_arrived_are_not_sent_again_after_a_restart(tmp_path: Path) -> None:
    """And the limit of the channel holds for both processes."""
    chat = Wordy()
    deliveries = FileDeliveries(tmp_path)
    heard = Heard(deliveries)

    def is_second(event: Event) -> bool:
        return event.type == events.DELIVERY_PART and event.data["part"] == 2

    async with FolderSender(deliveries, [chat]):
        await deliveries.put([new("a")])
        await heard.events.wait_for(is_second)
    assert [reply.content for reply in chat.got.seen] == ["text", "of"]
    kept = json.loads((tmp_path / "a.json").read_text())
    assert kept["receipts"] == ["", ""]
    (tmp_path / ".windows").unlink()
    async with FolderSender(FileDeliveries(tmp_path), [chat]):
        assert (await chat.got.wait(3)).content == "a"


class Joining(Chat):
    merges = True

    def merged(self, replies: Sequence[Outbound]) -> Outbound | None:
        text = " + ".join(reply.content for reply in replies)
        return msgspec.structs.replace(replies[0], content=text)


async def test_what_waits_goes_by_one_call(tmp_path: Path) -> None:
    deliveries, chat = FileDeliveries(tmp_path), Joining()
    heard = Heard(deliveries)
    await deliveries.put([new("a"), new("b"), new("c")])
    async with FolderSender(deliveries, [chat]):
        await heard.of(events.DELIVERY_SENT, "c")
    assert [reply.content for reply in chat.got.seen] == ["text of a + text of b + text of c"]


async def test_what_was_to_go_by_one_call_goes_though_the_disk_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind are marked in their files, and their sender was told that they are not."""
    deliveries, chat = FileDeliveries(tmp_path), Joining()
    heard = Heard(deliveries)
    await deliveries.put([new("a"), new("b")])
    begin, sync = Filed.begin, whole_files.sync
    begun: list[str] = []

    def begins(filed: Filed, now_us: int) -> None:
        begin(filed, now_us)
        begun.append(filed.delivery.id)

    def fails_once(*folders: Path) -> None:
        if begun == ["a", "b"]:
            begun.append("")
            raise StoreError("the disk failed")
        sync(*folders)

    monkeypatch.setattr(Filed, "begin", begins)
    monkeypatch.setattr(whole_files, "sync", fails_once)
    async with FolderSender(deliveries, [chat], policy=FAST):
        await heard.of(events.DELIVERY_SENT, "a")
        await heard.of(events.DELIVERY_SENT, "b")
    assert [(reply.id, reply.in_doubt) for reply in chat.got.seen] == [("a", False), ("b", True)]


async def test_a_second_sender_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    chat = Chat()
    async with FolderSender(FileDeliveries(tmp_path), [chat]) as first:
        with pytest.raises(StoreError, match="another process delivers"):
            await FolderSender(FileDeliveries(tmp_path), [Chat()]).start()
        await first.deliveries.put([new("a")])
        await chat.got.wait()
    await first.stop()


async def test_a_full_disk_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deliveries, chat = FileDeliveries(tmp_path), Chat()
    await deliveries.put([new("a")])
    met: Signal[str] = Signal("met")
    write = whole_files.write

    def full(path: Path, body: bytes, *, new: bool = False) -> bool:
        met.emit(path.name)
        raise StoreFull(f"no room left for {path}")

    monkeypatch.setattr(whole_files, "write", full)
    async with FolderSender(deliveries, [chat]):
        await met.wait()
        assert not chat.got.seen
        monkeypatch.setattr(whole_files, "write", write)
        await chat.got.wait()


async def test_its_end_is_told_if_nobody_asked_for_it(tmp_path: Path) -> None:
    sender = FolderSender(FileDeliveries(tmp_path), [Chat()])

    async def broken(worker: Worker) -> None:
        raise ZeroDivisionError

    sender.carrier.step = broken  # type: ignore[method-assign]
    await sender.start()
    with pytest.raises(ZeroDivisionError):
        await sender.wait()
    with pytest.raises(ZeroDivisionError):
        await sender.stop()
    async with FolderSender(FileDeliveries(tmp_path), [Chat()]):
        """The folder is free again."""


# -- a folder as a channel ------------------------------------------------------------------------


def outbound(**fields: Any) -> Outbound:
    given = {
        "id": "r1",
        "tenant_id": "acme",
        "channel": "handover",
        "recipient": "4711",
        "content": "hello",
        **fields,
    }
    return Outbound(**given)


async def test_a_reply_is_handed_on_once(tmp_path: Path) -> None:
    channel = FolderChannel(tmp_path, name="handover", channel="telegram")
    reply = outbound(conversation="k", task_id="t1", options={"silent": True})
    assert await channel.arrived(reply) is None
    await channel.send(reply)
    found = json.loads((tmp_path / "r1.json").read_text())
    assert (found["id"], found["channel"], found["recipient"]) == ("r1", "telegram", "4711")
    assert (found["tenant_id"], found["conversation"], found["task_id"]) == ("acme", "k", "t1")
    assert found["options"] == {"silent": True}
    await channel.send(msgspec.structs.replace(reply, content="another", in_doubt=True))
    assert json.loads((tmp_path / "r1.json").read_text()) == found
    assert await channel.arrived(reply) is True
    await channel.close()


async def test_what_was_sent_is_not_handed_on_again(tmp_path: Path) -> None:
    channel, chat = FolderChannel(tmp_path, channel="chat"), Chat()
    deliveries = FileDeliveries(tmp_path)
    heard = Heard(deliveries)
    async with FolderSender(deliveries, [chat]):
        await channel.send(outbound())
        await heard.of(events.DELIVERY_SENT, "r1")
        await channel.send(outbound(in_doubt=True))
        assert await channel.arrived(outbound()) is True
    assert chat.got.count == 1
    assert not list(tmp_path.glob("*.json"))


async def test_a_doubt_is_handed_on(tmp_path: Path) -> None:
    channel, chat = FolderChannel(tmp_path, channel="chat"), Chat()
    await channel.send(outbound(in_doubt=True))
    async with FolderSender(FileDeliveries(tmp_path), [chat]):
        assert (await chat.got.wait()).in_doubt


async def test_its_priority_and_its_end_are_handed_on(tmp_path: Path) -> None:
    """It is not sent once it is over, however long nobody sent from the folder."""
    channel, chat = FolderChannel(tmp_path, channel="chat"), Chat()
    in_an_hour_us = int((time.time() + 3600) * 1e6)
    await channel.send(outbound(id="late", recipient="ann", expires_us=1))
    await channel.send(outbound(id="urgent", priority=DIRECT + 1, expires_us=in_an_hour_us))
    deliveries = FileDeliveries(tmp_path)
    heard = Heard(deliveries)
    async with FolderSender(deliveries, [chat]):
        await heard.of(events.DELIVERY_FAILED, "late")
        sent = await chat.got.wait()
    assert (sent.id, sent.priority, sent.expires_us) == ("urgent", DIRECT + 1, in_an_hour_us)
    assert chat.got.count == 1


async def test_an_id_that_no_file_can_have_has_failed(tmp_path: Path) -> None:
    with pytest.raises(FinalError, match="cannot be a file's name"):
        await FolderChannel(tmp_path).send(outbound(id="../../etc/passwd"))


async def test_replies_of_an_app_go_by_a_folder(home: Path, tmp_path: Path) -> None:
    """The app's end is the folder; another program sends from there, in the app's order."""
    queue_dir = tmp_path / "replies"
    app = App()
    app.channel(FolderChannel(queue_dir, name="handover", channel="chat"))

    @app.on("order")
    async def order(ctx: Context) -> None:
        for n in range(3):
            await ctx.send_to("handover", "ann", f"part {n}")

    sent: Signal[Event] = Signal("sent")
    app.observe(lambda event: sent.emit(event) if event.type == events.DELIVERY_SENT else None)
    async with app:
        await app.send("order", {})
    working = asyncio.create_task(app.work())
    await sent.wait(3)
    working.cancel()
    await asyncio.wait([working])
    assert len(list(queue_dir.glob("*.json"))) == 3
    chat = Chat()
    async with FolderSender(FileDeliveries(queue_dir), [chat]):
        await chat.got.wait(3)
    assert [reply.content for reply in chat.got.seen] == ["part 0", "part 1", "part 2"]
