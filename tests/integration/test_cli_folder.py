"""`holdfast deliveries --folder`: the same commands on a folder of files."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from holdfast import FileDeliveries, FinalError, FolderSender
from holdfast.cli.root import cli
from holdfast.cli.session import Exit
from holdfast.core.delivery import New, Outbound, unlimited
from holdfast.core.errors import SendUnknown, TemporaryError
from holdfast.core.events import Event
from holdfast.delivery.attempts import Policy
from holdfast.observe.observers import Observers
from holdfast.testing import Signal

FAILED, UNKNOWN = "bbbb1111-failed", "cccc1111-unknown"
PENDING, QUEUED = "dddd1111-pending", "dddd2222-queued"


class Moody:
    """A channel that does what a reply's text says."""

    name = "moody"

    def __init__(self) -> None:
        self.got: Signal[Outbound] = Signal("got")

    async def send(self, reply: Outbound) -> str | None:
        self.got.emit(reply)
        if reply.content == "bad":
            raise FinalError("no such chat")
        if reply.content == "lost":
            raise SendUnknown("no answer")
        if reply.content == "away":
            raise TemporaryError("connection refused")
        return None

    async def close(self) -> None:
        pass


class Sending:
    """A sender of the folder, and what is told of it."""

    def __init__(self, folder: Path) -> None:
        self.channel = Moody()
        self.deliveries = FileDeliveries(folder)
        self.events: Signal[Event] = Signal("events")
        observers = Observers()
        observers.add(self.events.emit)
        self.deliveries.on_events(observers.hear)

    async def hear(self, kind: str, delivery_id: str) -> Event:
        def is_it(event: Event) -> bool:
            return event.type == kind and event.data.get("delivery_id") == delivery_id

        return await self.events.wait_for(is_it, what=f"{kind} of {delivery_id}")


def sending(folder: Path, use: Callable[[Sending], Awaitable[None]]) -> None:
    """A sender for as long as `use` takes."""

    async def run() -> None:
        here = Sending(folder)
        policy = Policy(hold_unknown=True)
        async with (
            asyncio.timeout(60),
            FolderSender(here.deliveries, [here.channel], policy=policy),
        ):
            await use(here)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _nothing_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No database and no configuration: a folder needs neither."""
    (home / "cwd").mkdir()
    monkeypatch.chdir(home / "cwd")
    monkeypatch.delenv("HOLDFAST_CONFIG", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One reply in each state that a folder keeps, and one that was sent."""
    path = tmp_path / "delivery-queue"

    async def make(here: Sending) -> None:
        for name, text in (
            ("aaaa1111-sent", "good"), (FAILED, "bad"), (UNKNOWN, "lost"), (PENDING, "away"),
        ):  # fmt: skip
            tenant = "acme" if name == FAILED else "default"
            new = New(
                id=name, channel="moody", recipient=f"to-{name}", content=text, tenant_id=tenant
            )
            await here.deliveries.put([new])
        behind = New(id=QUEUED, channel="moody", recipient=f"to-{PENDING}", content="behind it")
        await here.deliveries.put([behind])
        await here.hear("delivery.sent", "aaaa1111-sent")
        await here.hear("delivery.failed", FAILED)
        await here.hear("delivery.unknown", UNKNOWN)
        await here.hear("delivery.waiting", PENDING)

    sending(path, make)
    return path


def call(folder: Path, *arguments: str, code: int = 0) -> Result:
    command = ["deliveries", *arguments, "--folder", str(folder)]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert result.exit_code == code, (arguments, result.stdout, result.stderr)
    return result


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def one(folder: Path, name: str) -> dict[str, Any]:
    (found,) = lines(call(folder, "show", name, "--json"))
    return found


def acts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "acts.log").read_text().splitlines()]


def test_a_folder_that_is_none_is_said_so_and_nothing_is_made_in_it(tmp_path: Path) -> None:
    assert "there is no folder" in call(tmp_path / "no", "list", code=Exit.NOT_FOUND).stderr
    assert "is no folder of replies" in call(tmp_path, "pause", "x", code=Exit.NOT_FOUND).stderr
    assert not list(tmp_path.glob("**/failed"))


def test_replies_are_listed_and_shown(folder: Path) -> None:
    def ids(*options: str) -> list[str]:
        return [each["id"] for each in lines(call(folder, "list", "--json", *options))]

    assert sorted(ids()) == [FAILED, UNKNOWN, PENDING, QUEUED]
    assert ids("--status", "failed") == [FAILED]
    assert ids("--tenant", "acme") == [FAILED]
    assert ids("--since", "2100-01-01T00:00") == []
    shown = call(folder, "list").stdout
    assert re.search(r"dddd1111 +moody +to-dddd1111-pending +pending +1/5 .* in \d+ s +conn", shown)
    assert re.search(r"dddd2222 +moody +to-dddd1111-pending +queued", shown)
    unknown = call(folder, "show", "cccc").stdout
    assert "doubt     it may have arrived" in unknown
    assert "    lost" in unknown
    call(folder, "show", "dddd", code=Exit.CONFLICT)
    (folder / "broken").mkdir()
    (folder / "broken" / "note.json").write_text("{")
    assert "1 in " in call(folder, "list").stderr


def test_what_was_sent_is_gone(folder: Path) -> None:
    call(folder, "show", "aaaa1111", code=Exit.NOT_FOUND)


def test_a_reply_is_edited_and_sent_again(folder: Path) -> None:
    edited = call(folder, "edit", "bbbb1111", "--content", "good now")
    assert f"deliveries retry {FAILED} --folder {folder}" in edited.stderr
    assert one(folder, "bbbb1111")["status"] == "failed"
    assert call(folder, "retry", "bbbb1111").stdout == f"{FAILED} due again\n"
    assert one(folder, "bbbb1111")["status"] == "pending"

    async def sent(here: Sending) -> None:
        await here.hear("delivery.sent", FAILED)
        assert "good now" in [reply.content for reply in here.channel.got.seen]

    sending(folder, sent)
    told = [(act["type"], act["delivery_id"]) for act in acts(folder)]
    assert told == [("delivery.edited", FAILED), ("delivery.retried", FAILED)]
    assert all("@" in act["by"] for act in acts(folder))


def test_what_is_unknown_goes_once_more_by_a_persons_word(folder: Path) -> None:
    assert call(folder, "retry", "--all", "--yes").stderr == "", "an unknown one is left"
    assert one(folder, "cccc1111")["status"] == "unknown"
    call(folder, "edit", "cccc1111", "--content", "good now")
    call(folder, "retry", "--status", "unknown", "--yes")
    found = one(folder, "cccc1111")
    assert (found["status"], found["in_doubt"]) == ("pending", True)

    async def sent(here: Sending) -> None:
        await here.hear("delivery.sent", UNKNOWN)
        repeats = [reply.in_doubt for reply in here.channel.got.seen if reply.id == UNKNOWN]
        assert repeats == [True]

    sending(folder, sent)


def test_replies_are_discarded(folder: Path) -> None:
    assert "1 reply would be discarded" in call(folder, "discard", "--all", "--dry-run").stderr
    call(folder, "discard", PENDING, "--reason", "they called")
    assert one(folder, PENDING)["status"] == "discarded"
    assert (folder / "discarded" / f"{PENDING}.json").exists()
    assert one(folder, QUEUED)["status"] == "pending", "what stood behind it goes on"
    assert acts(folder)[-1]["reason"] == "they called"
    call(folder, "discard", PENDING, code=Exit.CONFLICT)
    call(folder, "edit", PENDING, "--content", "x", code=Exit.CONFLICT)

    async def sent(here: Sending) -> None:
        again = New(id=PENDING, channel="moody", recipient="x", content="good")
        await here.deliveries.put([again])
        await here.hear("delivery.sent", QUEUED)
        assert PENDING not in [reply.id for reply in here.channel.got.seen]

    sending(folder, sent)


def test_a_paused_channel_is_kept_by_a_sender(folder: Path) -> None:
    assert call(folder, "pause", "moody").stdout == "moody is paused\n"
    assert call(folder, "pause", "moody").stdout == "moody is paused (it was before)\n"
    assert f"resume moody --folder {folder}" in call(folder, "list").stderr
    assert "channel   moody (paused)" in call(folder, "show", "bbbb1111").stdout
    assert "no reply has named a channel 'mody'" in call(folder, "pause", "mody").stderr
    call(folder, "retry", "--status", "pending", "--yes")
    call(folder, "edit", PENDING, "--content", "good now")

    async def held_back(here: Sending) -> None:
        assert await here.deliveries.due_in_s({here.channel.name: unlimited}) is None
        await asyncio.to_thread(call, folder, "resume", "moody")
        await here.hear("delivery.sent", PENDING)
        resumed = [event.data for event in here.events.seen if event.type == "delivery.resumed"]
        assert [data["channel"] for data in resumed] == ["moody"], "who listens hears of it"

    sending(folder, held_back)


def test_people_act_beside_a_sender(folder: Path) -> None:
    async def act(here: Sending) -> None:
        await asyncio.to_thread(call, folder, "edit", FAILED, "--content", "good", "--retry")
        await here.hear("delivery.sent", FAILED)

    sending(folder, act)
