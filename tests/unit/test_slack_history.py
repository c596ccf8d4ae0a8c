"""A reply that may have arrived: Slack is asked for it, and what is there is not sent again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ackbone.core import events
from ackbone.core.errors import RateLimited, TemporaryError
from ackbone.core.outbound.delivery import Outbound, Reconciles, unlimited
from ackbone.delivery.attempts import Policy
from ackbone.delivery.carrier import Carried
from ackbone.delivery.channels.slack_channel import PAGES, SlackChannel
from tests.servers.slack import Slack, slack
from tests.unit.test_carrier import Desk

NAME = "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11"


@pytest.fixture
async def server() -> AsyncIterator[Slack]:
    async with slack() as server:
        yield server


def made(server: Slack, **options: Any) -> SlackChannel:
    given = {"reconcile": True, "timeout_s": 5.0, **options}
    return SlackChannel("xoxb-secret", base_url=server.base_url, **given)


@pytest.fixture
async def channel(server: Slack) -> AsyncIterator[SlackChannel]:
    async with made(server) as channel:
        yield channel


def reply(content: str = "hello", **other: Any) -> Outbound:
    fields: dict[str, Any] = {
        "id": NAME, "tenant_id": "default", "channel": "slack", "recipient": "C1",
        "content": content, "made_us": int(time.time() * 1e6),
    }  # fmt: skip
    return Outbound(**{**fields, **other})


def test_it_is_asked_only_if_somebody_wants_that() -> None:
    asked, usual = SlackChannel("x", reconcile=True), SlackChannel("x", merge=True)
    assert isinstance(asked, Reconciles)
    assert Carried(asked).reconciles is not None
    assert Carried(usual).reconciles is None
    assert Carried(usual).merges is not None
    with pytest.raises(ValueError, match="exclude each other"):
        SlackChannel("x", merge=True, reconcile=True)


async def test_what_is_in_the_history_has_arrived(server: Slack, channel: SlackChannel) -> None:
    assert await channel.arrived(reply()) is False
    await channel.send(reply())
    server.says("hello", metadata={"event_type": "other", "event_payload": {"key": "x"}})
    assert await channel.arrived(reply()) is True
    assert await channel.arrived(reply(id="another")) is False, "the text is no proof"
    assert "metadata" not in (await _sent_by(made(server, reconcile=False), server))


async def _sent_by(channel: SlackChannel, server: Slack) -> dict[str, Any]:
    async with channel:
        await channel.send(reply())
    return server.messages[-1]


async def test_each_part_is_known_by_itself(server: Slack, channel: SlackChannel) -> None:
    whole = reply("x" * 6000)
    await channel.send(channel.parts(whole)[0])
    assert await channel.arrived(channel.parts(whole)[0]) is True
    later = msgspec.structs.replace(whole, receipts=("1",), in_doubt=True)
    assert await channel.arrived(channel.parts(later)[1]) is False


async def test_answers_in_a_thread_are_found_there(server: Slack, channel: SlackChannel) -> None:
    parent = server.says("a question")
    answer = reply(options={"thread_ts": parent["ts"]})
    assert await channel.arrived(answer) is False
    await channel.send(answer)
    assert await channel.arrived(answer) is True
    assert await channel.arrived(reply()) is False, "the channel's own history has no answers"


async def test_a_long_history_is_read_page_by_page(server: Slack, channel: SlackChannel) -> None:
    server.most = 3
    old = server.says("long before")
    old["ts"] = f"{time.time() - 86_400:.6f}"
    await channel.send(reply())
    for n in range(8):
        server.says(f"other {n}")
    assert await channel.arrived(reply()) is True
    assert [asked.get("cursor") for asked in server.asked] == [None, "3", "6"]
    server.asked.clear()
    assert await channel.arrived(reply(id="another")) is False
    assert len(server.asked) == 3, "nothing that is older than the reply"
    server.most = 1
    for n in range(PAGES):
        server.says(f"more {n}")
    assert await channel.arrived(reply(id="another")) is None, "that is too much to be sure"


async def test_who_is_told_nothing_cannot_tell(
    server: Slack, channel: SlackChannel, caplog: pytest.LogCaptureFixture
) -> None:
    assert await channel.arrived(reply(recipient="U1")) is None
    assert await channel.arrived(reply(made_us=0)) is None
    hooked = made(server, webhooks={"alerts": f"{server.base_url}/hook"})
    async with hooked:
        assert await hooked.arrived(reply(recipient="alerts")) is None
    server.scopes.discard("channels:history")
    assert await channel.arrived(reply()) is None
    assert "missing_scope); its bot needs channels:history" in caplog.text


async def test_questions_that_get_no_answer_are_asked_later(
    server: Slack, channel: SlackChannel
) -> None:
    server.limited = 1
    with pytest.raises(RateLimited) as limited:
        await channel.arrived(reply())
    assert limited.value.retry_after_s == 1.0
    async with SlackChannel("x", base_url="http://127.0.0.1:1", reconcile=True) as away:
        with pytest.raises(TemporaryError):
            await away.arrived(reply())


@pytest.fixture
async def desk(home: Path) -> AsyncIterator[Desk]:
    desk = Desk(home)
    await desk.open()
    yield desk
    await desk.close()


NEW = {"id": NAME, "channel": "slack", "recipient": "C1"}


@pytest.mark.parametrize("hold", [False, True])
async def test_a_lost_answer_makes_no_second_message(
    server: Slack, channel: SlackChannel, desk: Desk, hold: bool
) -> None:
    server.lost_answers = 1
    desk.carry(channel, policy=Policy(wait_scale=0.001, hold_unknown=hold))
    await desk.put("hello", **NEW)
    await desk.ends(NAME)
    assert [message["text"] for message in server.messages] == ["hello"]
    assert events.DELIVERY_RESENT not in desk.settled.seen
    assert events.DELIVERY_UNKNOWN not in desk.settled.seen


async def test_what_never_came_is_sent_although_it_was_to_be_held(
    server: Slack, channel: SlackChannel, desk: Desk
) -> None:
    server.dropped = 1
    desk.carry(channel, policy=Policy(wait_scale=0.001, hold_unknown=True))
    await desk.put("hello", **NEW)
    await desk.ends(NAME)
    assert [message["text"] for message in server.messages] == ["(may be a repeat) hello"]


async def test_a_sender_that_died_in_mid_send_is_no_reason_to_send_it_twice(
    server: Slack, channel: SlackChannel, desk: Desk
) -> None:
    dead = await desk.store.register("dead")
    await desk.put("hello", **NEW)
    taken = await desk.deliveries.take({"slack": unlimited}, limit=1, worker=dead)
    await channel.send(taken.replies[0])
    await desk.store.leave(dead)
    before = desk.settled.count
    desk.carry(channel, policy=Policy())
    await desk.ends(NAME)
    assert [message["text"] for message in server.messages] == ["hello"]
    assert desk.settled.seen[before:] == [events.DELIVERY_RECLAIMED, events.DELIVERY_SENT]
