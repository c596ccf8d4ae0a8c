"""The Discord channel against a real server: the bot's messages and webhooks."""

from __future__ import annotations

import json
import traceback
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from ackbone.core.errors import FinalError, RateLimited, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Channel, Limited, Merges, Outbound, Splits
from ackbone.delivery.channels.discord_channel import DiscordChannel
from tests.servers.receiver import Receiver, receiving

TOKEN = "bot.very-secret"


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        receiver.says(200, '{"id": "1100", "channel_id": "42", "content": "hello"}')
        yield receiver


@pytest.fixture
async def channel(receiver: Receiver) -> AsyncIterator[DiscordChannel]:
    base = f"http://127.0.0.1:{receiver.port}/api"
    async with DiscordChannel(
        TOKEN,
        webhooks={"alerts": f"{base}/webhooks/7/hook-secret?wait=false"},
        base_url=f"{base}/v10",
        hooks_urls=[base],
        timeout_s=5.0,
    ) as channel:
        yield channel


def reply(content: str = "hello", recipient: str = "42", **other: Any) -> Outbound:
    fields: dict[str, Any] = {
        "id": "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
        "tenant_id": "default",
        "channel": "discord",
        "recipient": recipient,
        "content": content,
    }
    return Outbound(**{**fields, **other})


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(body) for _, body in receiver.got]


def test_it_is_what_the_carrier_asks_for() -> None:
    channel: Channel = DiscordChannel(TOKEN)
    assert isinstance(channel, Splits)
    assert isinstance(channel, Limited)
    assert isinstance(channel, Merges)
    assert not channel.merges, "unless it is asked to"


# -- the bot --------------------------------------------------------------------------------------


async def test_a_message_of_the_bot(receiver: Receiver, channel: DiscordChannel) -> None:
    assert await channel.send(reply("@everyone hello")) == "1100"
    ((headers, body),) = receiver.got
    assert receiver.paths == ["/api/v10/channels/42/messages"]
    assert headers["Authorization"] == f"Bot {TOKEN}"
    found = json.loads(body)
    nonce = found.pop("nonce")
    assert found == {
        "content": "@everyone hello",
        "allowed_mentions": {"parse": []},
        "enforce_nonce": True,
    }
    assert 0 < len(nonce) <= 25


async def test_a_repeat_has_the_same_nonce_and_a_mark_for_when_discord_forgot_it(
    receiver: Receiver, channel: DiscordChannel
) -> None:
    whole = reply("x " * 1500)
    for receipts, doubt in (((), False), (("1",), False), (("1",), True)):
        now = msgspec.structs.replace(whole, receipts=receipts, in_doubt=doubt)
        await channel.send(channel.parts(now)[len(receipts)])
    first, second, again = bodies(receiver)
    assert again == {**second, "content": f"(may be a repeat) {second['content']}".strip()}
    assert first["nonce"] != second["nonce"]
    assert all(len(body["content"]) <= 2000 for body in (first, second, again))


async def test_options(receiver: Receiver, channel: DiscordChannel) -> None:
    options = {
        "thread": "77",
        "embeds": [{"title": "t"}],
        "components": [{"type": 1}],
        "reply_to": "5",
        "silent": True,
        "allowed_mentions": {"parse": ["users"]},
    }
    parts = channel.parts(reply("x " * 1500, options=options))
    for part in parts:
        await channel.send(part)
    first, second = bodies(receiver)
    assert receiver.paths == ["/api/v10/channels/77/messages"] * 2
    assert first["message_reference"] == {"message_id": "5", "fail_if_not_exists": False}
    assert "message_reference" not in second
    assert "embeds" not in first
    assert (second["embeds"], second["components"]) == ([{"title": "t"}], [{"type": 1}])
    assert (first["flags"], first["allowed_mentions"]) == (4096, {"parse": ["users"]})


async def test_a_code_block_that_is_cut_stays_one(channel: DiscordChannel) -> None:
    code = "\n".join(f"value_{n} = {n}" for n in range(300))
    parts = channel.parts(reply(f"```python\n{code}\n```"))
    assert len(parts) > 2
    for part in parts:
        assert part.content.startswith("```python\n")
        assert part.content.endswith("```")


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, {"message": "Cannot send an empty message", "code": 50006}, FinalError),
        (403, {"message": "Missing Access", "code": 50001}, FinalError),
        (404, {"message": "Unknown Channel", "code": 10003}, FinalError),
        (401, {"message": "401: Unauthorized", "code": 0}, TemporaryError),
        (500, {"message": "500: Internal Server Error", "code": 0}, TemporaryError),
        (502, {"message": "502: Bad Gateway", "code": 0}, TemporaryError),
        (429, {"message": "You are being rate limited.", "retry_after": 0.65, "global": False},
         RateLimited),
    ],
)  # fmt: skip
async def test_refusals(
    receiver: Receiver,
    channel: DiscordChannel,
    status: int,
    body: dict[str, Any],
    error: type[Exception],
) -> None:
    receiver.says(status, json.dumps(body), Retry_After="1")
    with pytest.raises(error, match=str(body["message"])) as caught:
        await channel.send(reply())
    assert type(caught.value) is error
    if isinstance(caught.value, RateLimited):
        assert caught.value.retry_after_s == 0.65
        assert not caught.value.whole_channel
    if status == 401:
        assert "the bot's token is refused" in str(caught.value)


async def test_a_limit_of_the_whole_bot(receiver: Receiver, channel: DiscordChannel) -> None:
    receiver.says(429, '{"message": "slow", "retry_after": 2, "global": true}')
    with pytest.raises(RateLimited, match="for all of the bot") as caught:
        await channel.send(reply())
    assert caught.value.retry_after_s == 2.0
    assert caught.value.whole_channel


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (200, SendUnknown),
        (403, TemporaryError),
        (502, SendUnknown),
        (503, TemporaryError),
        (504, SendUnknown),
        (429, RateLimited),
    ],
)
async def test_answers_that_are_not_of_discord(
    receiver: Receiver, channel: DiscordChannel, status: int, error: type[Exception]
) -> None:
    receiver.says(status, "error code: 1015", Retry_After="9")
    with pytest.raises(error, match="not in Discord's own form") as caught:
        await channel.send(reply())
    assert type(caught.value) is error
    if isinstance(caught.value, RateLimited):
        assert caught.value.retry_after_s == 9.0


async def test_no_answer_and_no_secret(receiver: Receiver, channel: DiscordChannel) -> None:
    receiver.breaks()
    for recipient in ("42", "alerts"):
        with pytest.raises(SendUnknown) as caught:
            await channel.send(reply(recipient=recipient))
        shown = "".join(traceback.format_exception(caught.value)) + repr(vars(channel))
        assert "very-secret" not in shown
        assert "hook-secret" not in shown


@pytest.mark.parametrize("recipient", ["general", "../users/@me", "4 2"])
async def test_a_channel_is_a_number(
    receiver: Receiver, channel: DiscordChannel, recipient: str
) -> None:
    with pytest.raises(FinalError, match="a channel is a number"):
        await channel.send(reply(recipient=recipient))
    assert receiver.got == []


# -- webhooks -------------------------------------------------------------------------------------


async def test_a_webhook_by_name_and_by_url(receiver: Receiver, channel: DiscordChannel) -> None:
    url = f"http://127.0.0.1:{receiver.port}/api/webhooks/7/hook-secret"
    options = {"thread": "9", "username": "Agent", "avatar_url": "https://example.com/a.png"}
    assert await channel.send(reply(recipient="alerts", options=options)) == "1100"
    assert await channel.send(reply(recipient=url, in_doubt=True)) == "1100"
    assert receiver.paths == [
        "/api/webhooks/7/hook-secret?wait=true&thread_id=9",
        "/api/webhooks/7/hook-secret?wait=true",
    ]
    first, second = bodies(receiver)
    assert (first["username"], first["avatar_url"]) == ("Agent", "https://example.com/a.png")
    assert second["content"] == "(may be a repeat) hello"
    assert "nonce" not in first
    assert "Authorization" not in receiver.got[0][0]


async def test_a_webhook_whose_url_names_a_thread(
    receiver: Receiver, channel: DiscordChannel
) -> None:
    url = f"http://127.0.0.1:{receiver.port}/api/webhooks/7/hook-secret?thread_id=8&wait=false"
    await channel.send(reply(recipient=url))
    await channel.send(reply(recipient=url, options={"thread": "9"}))
    assert receiver.paths == [
        "/api/webhooks/7/hook-secret?wait=true&thread_id=8",
        "/api/webhooks/7/hook-secret?wait=true&thread_id=9",
    ]


async def test_a_webhook_that_is_gone_is_final(receiver: Receiver, channel: DiscordChannel) -> None:
    for status, body in (
        (404, '{"message": "Unknown Webhook", "code": 10015}'),
        (401, '{"message": "Invalid Webhook Token", "code": 50027}'),
    ):
        receiver.says(status, body)
        with pytest.raises(FinalError, match="Webhook"):
            await channel.send(reply(recipient="alerts"))


@pytest.mark.parametrize("url", ["http://127.0.0.1/x", "https://discord.com.evil.test/api/x"])
async def test_a_url_of_another_place_is_refused(url: str) -> None:
    async with DiscordChannel(TOKEN) as channel:
        with pytest.raises(FinalError, match=r"does not begin with https://discord.com/api/"):
            await channel.send(reply(recipient=url))


def test_limits() -> None:
    channel = DiscordChannel(TOKEN, webhooks={"alerts": "https://discord.com/api/webhooks/7/s"})
    bot, place = channel.limits(reply())
    assert (bot.key, bot.count, bot.per_s, bot.whole_channel) == ("discord:bot", 50, 1.0, True)
    assert (place.key, place.count, place.per_s) == ("discord:channel:42", 5, 5.0)
    (hook,) = channel.limits(reply(recipient="alerts"))
    assert hook.key.startswith("discord:webhook:")
    assert (hook.count, hook.per_s, hook.whole_channel) == (5, 5.0, False)


async def test_options_that_mean_nothing_are_final(channel: DiscordChannel) -> None:
    (part,) = channel.parts(reply(options={"embeds": "x"}))
    with pytest.raises(FinalError, match="options for Discord"):
        await channel.send(part)


# -- several in one message -----------------------------------------------------------------------


async def test_texts_that_wait_become_one_message(
    receiver: Receiver, channel: DiscordChannel
) -> None:
    merged = channel.merged([reply("one"), reply("two", id="other")])
    assert merged is not None
    await channel.send(merged)
    (body,) = bodies(receiver)
    assert body["content"] == "one\n\ntwo"


def test_what_is_one_message_only_alone() -> None:
    channel = DiscordChannel(TOKEN, merge=True)
    assert channel.merges
    assert channel.merged([reply("x" * 1500), reply("y")]) is not None
    for other in (
        reply("y" * 500),
        reply(options={"silent": True}),
        reply("```py\nnot closed"),
        reply(">>> to the end"),
    ):
        assert channel.merged([reply("x" * 1500), other]) is None


async def test_a_repeat_of_what_went_with_others_is_marked(receiver: Receiver) -> None:
    """Discord has seen it under the key of the first of them, if at all."""
    base = f"http://127.0.0.1:{receiver.port}/api/v10"
    async with DiscordChannel(TOKEN, base_url=base, merge=True) as channel:
        await channel.send(reply(in_doubt=True))
    (body,) = bodies(receiver)
    assert body["content"] == "(may be a repeat) hello"
