"""A folder that an app hands its replies to, and from which a runner sends them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ackbone import App, Context, DeliveryQueue, DeliveryRunner, FolderChannel
from ackbone.core import events
from ackbone.core.errors import FinalError, StoreFull
from ackbone.core.events import Event
from ackbone.core.outbound.delivery import DIRECT, Outbound, Reconciles
from ackbone.delivery.files import atomic_files
from ackbone.testing import Signal


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


class Sending:
    """A runner of the folder, and what it sent."""

    def __init__(self, folder: Path) -> None:
        self.sent: Signal[tuple[str, str, bool]] = Signal("sent")
        self.runner = DeliveryRunner(DeliveryQueue(folder), self._send)

    def _send(
        self, channel: str, recipient: str, content: str, *, delivery_id: str, in_doubt: bool
    ) -> None:
        self.sent.emit((delivery_id, content, in_doubt))

    async def __aenter__(self) -> Sending:
        self.runner.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.runner.stop)


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


async def test_a_plain_reply_is_the_nine_fields(tmp_path: Path) -> None:
    await FolderChannel(tmp_path).send(outbound(tenant_id="default"))
    found = json.loads((tmp_path / "r1.json").read_text())
    assert list(found) == [
        "id", "channel", "recipient", "content", "created_at",
        "retry_count", "last_attempt_at", "last_error", "max_retries",
    ]  # fmt: skip
    assert found["channel"] == "folder"


async def test_what_the_folder_gave_up_is_not_handed_on_again(tmp_path: Path) -> None:
    channel, queue = FolderChannel(tmp_path), DeliveryQueue(tmp_path)
    await channel.send(outbound())
    queue.fail_for_good(queue.load_pending()[0], "no such chat")
    await channel.send(outbound(in_doubt=True))
    assert await channel.arrived(outbound()) is True
    assert queue.load_pending() == []


async def test_a_doubt_is_handed_on(tmp_path: Path) -> None:
    """A runner removes what it sent: nobody knows whether this one was here before."""
    channel = FolderChannel(tmp_path, channel="chat")
    assert isinstance(channel, Reconciles)
    async with Sending(tmp_path) as sending:
        await channel.send(outbound())
        assert await sending.sent.wait() == ("r1", "hello", False)
    assert await channel.arrived(outbound()) is None
    async with Sending(tmp_path) as sending:
        await channel.send(outbound(in_doubt=True))
        assert await sending.sent.wait() == ("r1", "hello", True)


async def test_its_priority_and_its_end_are_handed_on(tmp_path: Path) -> None:
    """It is not sent once it is over, however long nobody sent from the folder."""
    channel = FolderChannel(tmp_path, channel="chat")
    in_an_hour_us = int((time.time() + 3600) * 1e6)
    await channel.send(outbound(id="late", recipient="ann", expires_us=1))
    await channel.send(outbound(id="usual", expires_us=in_an_hour_us))
    await channel.send(outbound(id="urgent", priority=DIRECT + 1))
    async with Sending(tmp_path) as sending:
        await sending.sent.wait(2)
    assert [name for name, *_ in sending.sent.seen] == ["urgent", "usual"]
    (late,) = DeliveryQueue(tmp_path).load_failed()
    assert (late.id, late.last_error) == ("late", "it expired before it could be sent")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"id": "../../etc/passwd"}, "cannot be a file's name"),
        ({"content": "cut \ud83d"}, "not valid Unicode"),
    ],
)
async def test_what_no_file_can_hold_has_failed(
    tmp_path: Path, fields: dict[str, str], why: str
) -> None:
    with pytest.raises(FinalError, match=why):
        await FolderChannel(tmp_path).send(outbound(**fields))
    assert not list(tmp_path.glob("*.*"))


async def test_a_full_disk_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = FolderChannel(tmp_path)

    def full(*folders: Path) -> None:
        raise StoreFull("no room left")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "sync", full)
        with pytest.raises(StoreFull):
            await channel.send(outbound())
    assert await channel.arrived(outbound()) is None
    await channel.send(outbound())
    assert await channel.arrived(outbound()) is True


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
    async with Sending(queue_dir) as sending:
        await sending.sent.wait(3)
    assert [content for _, content, _ in sending.sent.seen] == ["part 0", "part 1", "part 2"]
