"""The Slack channel against a real server: the bot's messages and incoming webhooks."""

from __future__ import annotations

import json
import traceback
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.core.errors import FinalError, RateLimited, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Channel, Limited, Merges, Outbound, Splits
from ackbone.delivery.channels.slack_channel import TEXT_LIMIT, SlackChannel
from tests.servers.receiver import Receiver, receiving

TOKEN = "xoxb-very-secret"
SECRET_PATH = "T1/B1/hook-secret"


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        receiver.says(200, '{"ok": true, "ts": "1700000000.000100", "channel": "C1"}')
        yield receiver


@pytest.fixture
async def channel(receiver: Receiver) -> AsyncIterator[SlackChannel]:
    base = f"http://127.0.0.1:{receiver.port}"
    async with SlackChannel(
        TOKEN,
        webhooks={"alerts": f"{base}/services/{SECRET_PATH}"},
        base_url=f"{base}/api",
        hooks_url=f"{base}/services",
        timeout_s=5.0,
    ) as channel:
        yield channel


def reply(content: str = "hello", recipient: str = "C1", **other: Any) -> Outbound:
    fields: dict[str, Any] = {
        "id": "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
        "tenant_id": "default",
        "channel": "slack",
        "recipient": recipient,
        "content": content,
    }
    return Outbound(**{**fields, **other})


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(body) for _, body in receiver.got]


def test_it_is_what_the_carrier_asks_for() -> None:
    channel: Channel = SlackChannel(TOKEN)
    assert isinstance(channel, Splits)
    assert isinstance(channel, Limited)
    assert isinstance(channel, Merges)
    assert not channel.merges, "unless it is asked to"


# -- the bot --------------------------------------------------------------------------------------


async def test_a_message_of_the_bot(receiver: Receiver, channel: SlackChannel) -> None:
    assert await channel.send(reply("a < b & c > d *x*")) == "1700000000.000100"
    ((headers, body),) = receiver.got
    assert receiver.paths == ["/api/chat.postMessage"]
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert json.loads(body) == {
        "channel": "C1",
        "client_msg_id": "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
        "text": "a &lt; b &amp; c &gt; d *x*",
        "mrkdwn": False,
    }


async def test_options(receiver: Receiver, channel: SlackChannel) -> None:
    options = {"format": "markdown", "thread_ts": "1.2", "attachments": [{"text": "more"}]}
    whole = reply("*x* <https://a.b|c> " * 300, options=options)
    parts = channel.parts(whole)
    for part in parts:
        await channel.send(part)
    first, second = bodies(receiver)
    assert first["text"] + second["text"] == whole.content
    assert (first["thread_ts"], second["thread_ts"], second["mrkdwn"]) == ("1.2", "1.2", True)
    assert "attachments" not in first
    assert second["attachments"] == [{"text": "more"}]


async def test_blocks_go_in_one_message(receiver: Receiver, channel: SlackChannel) -> None:
    blocks = [{"type": "divider"}]
    (part,) = channel.parts(reply("x" * 9000, options={"blocks": blocks}))
    await channel.send(part)
    assert bodies(receiver)[0]["blocks"] == blocks


@pytest.mark.parametrize("recipient", ["C1", "alerts"])
async def test_a_repeat_of_blocks_is_marked_where_people_see_it(
    receiver: Receiver, channel: SlackChannel, recipient: str
) -> None:
    if recipient == "alerts":
        receiver.says(200, "ok")
    blocks = [{"type": "divider"}]
    again = reply(recipient=recipient, options={"blocks": blocks}, in_doubt=True)
    for part in channel.parts(again):
        await channel.send(part)
    (body,) = bodies(receiver)
    mark = {"type": "plain_text", "text": "(may be a repeat)"}
    assert body["blocks"] == [{"type": "context", "elements": [mark]}, *blocks]
    full = [{"type": "divider"}] * 50
    await channel.send(reply(recipient=recipient, options={"blocks": full}, in_doubt=True))
    assert bodies(receiver)[1]["blocks"] == full, "Slack takes no more than these"


async def test_a_repeat_has_the_same_key_and_a_mark(
    receiver: Receiver, channel: SlackChannel
) -> None:
    whole = reply("x" * 6000)
    for receipts, doubt in (((), False), (("1",), False), (("1",), True)):
        now = msgspec.structs.replace(whole, receipts=receipts, in_doubt=doubt)
        await channel.send(channel.parts(now)[len(receipts)])
    first, second, again = bodies(receiver)
    assert second["client_msg_id"] == again["client_msg_id"] != first["client_msg_id"]
    assert again["text"] == f"(may be a repeat) {second['text']}"
    assert len(again["text"]) <= TEXT_LIMIT


@pytest.mark.parametrize(
    ("code", "error"),
    [
        *[(code, TemporaryError) for code in ("service_unavailable", "request_timeout")],
        *[(code, SendUnknown) for code in ("internal_error", "fatal_error")],
        *[(code, FinalError) for code in
          ("channel_not_found", "is_archived", "not_in_channel", "msg_too_long", "no_text")],
        *[(code, TemporaryError) for code in
          ("invalid_auth", "token_revoked", "account_inactive", "missing_scope")],
        ("ratelimited", RateLimited),
    ],
)  # fmt: skip
async def test_refusals(
    receiver: Receiver, channel: SlackChannel, code: str, error: type[Exception]
) -> None:
    receiver.says(200, json.dumps({"ok": False, "error": code}), Retry_After="7")
    with pytest.raises(error, match=f"Slack: {code}") as caught:
        await channel.send(reply())
    assert type(caught.value) is error
    if isinstance(caught.value, RateLimited):
        assert caught.value.retry_after_s == 7.0
    if code in ("invalid_auth", "missing_scope"):
        assert "check its token" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (200, SendUnknown),
        (302, TemporaryError),
        (404, TemporaryError),
        (503, TemporaryError),
        (502, SendUnknown),
        (504, SendUnknown),
    ],
)
async def test_answers_that_are_not_of_slack(
    receiver: Receiver, channel: SlackChannel, status: int, error: type[Exception]
) -> None:
    receiver.says(status, "<html>")
    with pytest.raises(error, match="not in Slack's own form"):
        await channel.send(reply())


async def test_too_many(receiver: Receiver, channel: SlackChannel) -> None:
    receiver.says(429, "", Retry_After="30")
    with pytest.raises(RateLimited) as caught:
        await channel.send(reply())
    assert caught.value.retry_after_s == 30.0


async def test_no_answer_and_no_secret(receiver: Receiver, channel: SlackChannel) -> None:
    receiver.breaks()
    for recipient in ("C1", "alerts"):
        with pytest.raises(SendUnknown) as caught:
            await channel.send(reply(recipient=recipient))
        shown = "".join(traceback.format_exception(caught.value)) + repr(vars(channel))
        assert "very-secret" not in shown
        assert "hook-secret" not in shown


async def test_without_a_token_there_are_only_webhooks(receiver: Receiver) -> None:
    async with SlackChannel() as channel:
        with pytest.raises(FinalError, match="'C1' is not the name of a webhook"):
            await channel.send(reply())


# -- webhooks -------------------------------------------------------------------------------------


async def test_a_webhook_by_name_and_by_url(receiver: Receiver, channel: SlackChannel) -> None:
    receiver.says(200, "ok")
    url = f"http://127.0.0.1:{receiver.port}/services/{SECRET_PATH}"
    assert await channel.send(reply(recipient="alerts")) is None
    assert await channel.send(reply(recipient=url, in_doubt=True)) is None
    assert receiver.paths == [f"/services/{SECRET_PATH}"] * 2
    assert [body["text"] for body in bodies(receiver)] == ["hello", "(may be a repeat) hello"]
    assert "client_msg_id" not in bodies(receiver)[0]
    assert "Authorization" not in receiver.got[0][0]


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (400, "invalid_payload", FinalError),
        (403, "action_prohibited", FinalError),
        (404, "channel_not_found", FinalError),
        (410, "channel_is_archived", FinalError),
        (429, "rate_limited", RateLimited),
        (500, "rollup_error", TemporaryError),
        (200, "<html>welcome to the hotel</html>", SendUnknown),
    ],
)
async def test_what_webhooks_say(
    receiver: Receiver, channel: SlackChannel, status: int, text: str, error: type[Exception]
) -> None:
    receiver.says(status, text, Retry_After="3")
    with pytest.raises(error, match=f"Slack: .*{text}") as caught:
        await channel.send(reply(recipient="alerts"))
    assert type(caught.value) is error


@pytest.mark.parametrize("url", ["http://169.254.169.254/x", "https://hooks.slack.com.evil.test/x"])
async def test_a_url_of_another_place_is_refused(url: str) -> None:
    async with SlackChannel(TOKEN) as channel:
        with pytest.raises(FinalError, match=r"does not begin with https://hooks.slack.com/"):
            await channel.send(reply(recipient=url))


# -- limits and parts -----------------------------------------------------------------------------


def test_limits() -> None:
    channel = SlackChannel(TOKEN, webhooks={"alerts": "https://hooks.slack.com/services/a/b/c"})
    (limit,) = channel.limits(reply())
    assert (limit.key, limit.count, limit.per_s) == ("slack:channel:C1", 1, 1.0)
    (named,) = channel.limits(reply(recipient="alerts"))
    (by_url,) = channel.limits(reply(recipient="https://hooks.slack.com/services/a/b/c"))
    assert named == by_url
    assert named.key.startswith("slack:webhook:")
    assert "services" not in named.key


@given(st.text(st.sampled_from("a <&>\n🎈"), min_size=1, max_size=30), st.integers(1, 400))
def test_parts_fit_when_they_are_escaped(text: str, times: int) -> None:
    text *= times
    parts = SlackChannel(TOKEN).parts(reply("x" + text))
    joined = "".join(part.content for part in parts)
    assert joined.replace("\n", "").replace(" ", "") == (
        ("x" + text).replace("\n", "").replace(" ", "")
    )
    for part in parts:
        escaped = part.content.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert len(escaped.encode("utf-16-le")) // 2 <= TEXT_LIMIT


async def test_options_that_mean_nothing_are_final(channel: SlackChannel) -> None:
    (part,) = channel.parts(reply(options={"blocks": "x"}))
    with pytest.raises(FinalError, match="options for Slack"):
        await channel.send(part)


# -- several in one message -----------------------------------------------------------------------


async def test_texts_that_wait_become_one_message(
    receiver: Receiver, channel: SlackChannel
) -> None:
    merged = channel.merged([reply("a < b"), reply("two", id="other")])
    assert merged is not None
    await channel.send(merged)
    (body,) = bodies(receiver)
    assert (body["text"], body["client_msg_id"]) == ("a &lt; b\n\ntwo", reply().id)


def test_what_is_one_message_only_alone() -> None:
    channel = SlackChannel(TOKEN, merge=True)
    assert channel.merges
    assert channel.merged([reply("<" * 900), reply("y")]) is not None
    assert channel.merged([reply("<" * 1000), reply("y")]) is None, "too long, as Slack counts"
    assert channel.merged([reply(), reply(options={"thread_ts": "1.2"})]) is None
