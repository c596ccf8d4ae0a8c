"""The Telegram channel against a server with Telegram's rules."""

from __future__ import annotations

import asyncio
import logging
import socket
import traceback
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.core.errors import (
    ConfigError,
    FinalError,
    RateLimited,
    SendUnknown,
    TemporaryError,
)
from ackbone.core.outbound.delivery import Channel, Limited, Merges, Outbound, Splits
from ackbone.delivery.channels.reply_text import MARK, utf16_length
from ackbone.delivery.channels.telegram_channel import TelegramChannel
from tests.servers.telegram import Fault, TelegramServer, telegram_server
from tests.servers.telegram_rules import Window, Windows

TOKEN = "123456:AAF-very_secret"
WIDE = Window(10_000, 1.0)


@pytest.fixture
async def server() -> AsyncIterator[TelegramServer]:
    async with telegram_server(Windows(WIDE, WIDE, WIDE)) as server:
        yield server


@pytest.fixture
async def channel(server: TelegramServer) -> AsyncIterator[TelegramChannel]:
    async with TelegramChannel(TOKEN, base_url=server.url, timeout_s=5.0) as channel:
        yield channel


def reply(content: str = "hello", recipient: str = "4711", **other: Any) -> Outbound:
    fields: dict[str, Any] = {
        "id": "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
        "tenant_id": "default",
        "channel": "telegram",
        "recipient": recipient,
        "content": content,
    }
    return Outbound(**{**fields, **other})


async def send_all(channel: TelegramChannel, whole: Outbound) -> list[str]:
    """As a carrier does: one call for each part, and a receipt for each."""
    receipts: list[str] = []
    while True:
        now = msgspec.structs.replace(whole, receipts=tuple(receipts))
        parts = channel.parts(now)
        if len(receipts) == len(parts):
            return receipts
        receipts.append(await channel.send(parts[len(receipts)]))


# -- texts ----------------------------------------------------------------------------------------


async def test_a_text_arrives_and_its_number_is_the_receipt(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    receipt = await channel.send(reply("Grüße, 你好 *not bold"))
    (entry,) = server.messages
    assert (entry.method, entry.chat, entry.text) == (
        "sendmessage",
        "4711",
        "Grüße, 你好 *not bold",
    )
    assert receipt == str(entry.message_ids[0])
    assert entry.arguments == {"chat_id": 4711, "text": "Grüße, 你好 *not bold"}


def test_it_is_what_the_carrier_asks_for() -> None:
    channel: Channel = TelegramChannel(TOKEN)
    assert isinstance(channel, Splits)
    assert isinstance(channel, Limited)
    assert isinstance(channel, Merges)
    assert not channel.merges, "unless it is asked to"
    assert channel.name == "telegram"


async def test_markdown(server: TelegramServer, channel: TelegramChannel) -> None:
    await channel.send(reply("*bold* and `code`", options={"format": "markdown"}))
    (entry,) = server.log
    assert entry.arguments["parse_mode"] == "Markdown"
    assert entry.text == "bold and code"


async def test_markdown_that_telegram_cannot_read_goes_as_plain_text(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    await channel.send(reply("2 * 3 = 6, snake_case", options={"format": "markdown"}))
    refused, taken = server.log
    assert "can't parse entities" in refused.description
    assert taken.text == "2 * 3 = 6, snake_case"
    assert "parse_mode" not in taken.arguments


async def test_a_long_text_goes_in_parts(server: TelegramServer, channel: TelegramChannel) -> None:
    text = "\n".join(f"line {n} " + "🎈" * 40 for n in range(200))
    receipts = await send_all(channel, reply(text))
    assert len(receipts) == len(server.messages) > 4
    assert "\n".join(entry.text for entry in server.messages) == text
    assert [str(number) for entry in server.messages for number in entry.message_ids] == receipts


async def test_blank_stretches_are_not_sent(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    await send_all(channel, reply("a" + "\n" * 9000 + "b"))
    assert [entry.text for entry in server.log] == ["a", "b"]


async def test_reply_to_and_silent(server: TelegramServer, channel: TelegramChannel) -> None:
    await send_all(channel, reply("x" * 5000, options={"reply_to": "17", "silent": True}))
    first, second = (entry.arguments for entry in server.messages)
    assert first["reply_parameters"]["message_id"] == 17
    assert "reply_parameters" not in second
    assert first["disable_notification"] is second["disable_notification"] is True


async def test_buttons_stand_below_the_last_part(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    rows = [[{"text": "Yes", "data": "y"}, {"text": "More", "url": "https://example.com"}]]
    await send_all(channel, reply("x" * 5000, options={"buttons": rows}))
    first, second = (entry.arguments for entry in server.messages)
    assert "reply_markup" not in first
    assert second["reply_markup"] == {
        "inline_keyboard": [
            [
                {"text": "Yes", "callback_data": "y"},
                {"text": "More", "url": "https://example.com"},
            ]
        ]
    }


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"format": "html"}, "Invalid enum value 'html'"),
        ({"buttons": [[{"text": "x"}]]}, "button 'x': data or url"),
        ({"buttons": [[{"data": "x"}]]}, "text"),
        ({"media": [{"type": "photo"}]}, "url or file_id"),
        ({"media": [{"type": "sticker", "url": "x"}]}, "sticker"),
        ({"edit": "first"}, "edit"),
        ({"edit": 1, "media": [{"type": "photo", "url": "x"}]}, "edit changes texts only"),
    ],
)
async def test_options_that_mean_nothing_are_final(
    server: TelegramServer, channel: TelegramChannel, options: dict[str, Any], why: str
) -> None:
    (part,) = channel.parts(reply(options=options))
    with pytest.raises(FinalError, match=why):
        await channel.send(part)
    assert server.log == []


# -- media ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["photo", "video", "document", "audio"])
async def test_one_file(server: TelegramServer, channel: TelegramChannel, kind: str) -> None:
    media = [{"type": kind, "url": "https://example.com/f"}]
    await send_all(channel, reply("see", options={"media": media}))
    (entry,) = server.messages
    assert entry.method == f"send{kind}"
    assert entry.arguments == {"chat_id": 4711, kind: "https://example.com/f", "caption": "see"}


async def test_many_files_go_in_albums_of_ten(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    media = [{"type": "photo", "file_id": f"p{n}"} for n in range(12)]
    media += [{"type": "document", "file_id": "d"}, {"type": "audio", "file_id": "a"}]
    receipts = await send_all(channel, reply("", options={"media": media}))
    assert [entry.method for entry in server.messages] == [
        "sendmediagroup", "sendmediagroup", "senddocument", "sendaudio",
    ]  # fmt: skip
    assert [len(entry.message_ids) for entry in server.messages] == [10, 2, 1, 1]
    assert receipts[1] == "11,12"


async def test_a_text_too_long_for_a_caption_follows(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    media = [{"type": "photo", "file_id": "p"}]
    await send_all(channel, reply("x" * 1100, options={"media": media}))
    assert [entry.method for entry in server.messages] == ["sendphoto", "sendmessage"]
    assert "caption" not in server.messages[0].arguments


async def test_an_album_has_no_buttons_so_what_follows_carries_them(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    media = [{"type": "photo", "file_id": f"p{n}"} for n in range(3)]
    options = {"media": media, "buttons": [[{"text": "ok", "data": "ok"}]]}
    await send_all(channel, reply("choose", options=options))
    await send_all(channel, reply("", options=options))
    assert [entry.method for entry in server.messages] == [
        "sendmediagroup", "sendmessage", "sendmediagroup", "sendphoto",
    ]  # fmt: skip
    assert ["reply_markup" in entry.arguments for entry in server.messages] == [
        False, True, False, True,
    ]  # fmt: skip


async def test_a_caption_that_telegram_cannot_read_goes_as_plain_text(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    media = [{"type": "photo", "file_id": f"p{n}"} for n in range(2)]
    await send_all(channel, reply("2 * 3", options={"media": media, "format": "markdown"}))
    assert [entry.code for entry in server.log] == [400, 200]
    assert server.messages[0].text == "2 * 3"


# -- edits ----------------------------------------------------------------------------------------


async def test_a_message_is_changed(server: TelegramServer, channel: TelegramChannel) -> None:
    number = int(await channel.send(reply("thinking")))
    change = reply("done", options={"edit": number}, in_doubt=True)
    assert await channel.send(change) == str(number)
    assert server.text_of("4711", number) == "done", "a repeated change needs no mark"
    assert await channel.send(change) == str(number)
    assert "not modified" in server.log[-1].description


async def test_a_change_too_long_for_a_message_goes_on_in_new_ones(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    number = int(await channel.send(reply("thinking")))
    await send_all(channel, reply("x " * 3000, options={"edit": number}))
    assert [entry.method for entry in server.log[1:]] == ["editmessagetext", "sendmessage"]


async def test_what_is_not_there_cannot_be_changed(channel: TelegramChannel) -> None:
    with pytest.raises(FinalError, match="message to edit not found"):
        await channel.send(reply("done", options={"edit": 999}))


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "why"),
    [("missing", "chat not found"), ("blocked", "blocked by the user"), ("kicked", "kicked")],
)
async def test_chats_that_never_will_take_it(
    server: TelegramServer, channel: TelegramChannel, state: Any, why: str
) -> None:
    server.chats["4711"] = state
    with pytest.raises(FinalError, match=f"Telegram: .*{why}"):
        await channel.send(reply())


async def test_a_refused_token_loses_nothing(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    server.refused_tokens.add(TOKEN)
    with pytest.raises(TemporaryError, match="the bot's token is refused"):
        await channel.send(reply())
    async with TelegramChannel("1:a", base_url=server.url) as other:
        with pytest.raises(TemporaryError, match="Not Found: the bot's token is refused"):
            await other.send(reply())


async def test_a_group_that_moved_gets_it_at_its_new_place(
    server: TelegramServer, channel: TelegramChannel, caplog: pytest.LogCaptureFixture
) -> None:
    server.moved["-5"] = -1005
    with caplog.at_level(logging.WARNING, "ackbone.delivery"):
        await channel.send(reply(recipient="-5"))
    assert [entry.chat for entry in server.messages] == ["-1005"]
    assert "group -5 is now -1005" in caplog.text


async def test_limits_of_the_server_say_how_long() -> None:
    async with (
        telegram_server(Windows(group=Window(1, 30.0))) as server,
        TelegramChannel(TOKEN, base_url=server.url) as channel,
    ):
        await channel.send(reply(recipient="-5"))
        with pytest.raises(RateLimited, match="Too Many Requests") as caught:
            await channel.send(reply(recipient="-5"))
    assert caught.value.retry_after_s is not None
    assert 28 <= caught.value.retry_after_s <= 30


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("answer", code=500), TemporaryError),
        (Fault("answer", code=502, description="Bad Gateway"), SendUnknown),
        (Fault("answer", code=504, description="Gateway Timeout"), SendUnknown),
        (Fault("garbage", code=502), SendUnknown),
        (Fault("garbage", code=503), TemporaryError),
        (Fault("garbage", code=504), SendUnknown),
        (Fault("garbage", code=404), TemporaryError),
        (Fault("garbage", code=429), RateLimited),
        (Fault("garbage", code=200), SendUnknown),
        (Fault("reset"), SendUnknown),
        (Fault("reset", after=True), SendUnknown),
        (Fault("answer", code=418, description="I'm a teapot"), FinalError),
    ],
    ids=lambda value: f"{value.kind}-{value.code}" if isinstance(value, Fault) else "",
)
async def test_faults(
    server: TelegramServer, channel: TelegramChannel, fault: Fault, error: type[Exception]
) -> None:
    server.faults.append(fault)
    with pytest.raises(error) as caught:
        await channel.send(reply())
    assert type(caught.value) is error
    shown = "".join(traceback.format_exception(caught.value))
    assert "very_secret" not in shown


async def test_silence_means_that_nobody_knows(server: TelegramServer) -> None:
    server.faults.append(Fault("hang"))
    async with TelegramChannel(TOKEN, base_url=server.url, timeout_s=1.0) as channel:
        with pytest.raises(SendUnknown):
            await channel.send(reply())
    assert len(server.log) == 1


async def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        async with TelegramChannel(TOKEN, base_url=f"http://127.0.0.1:{port}") as channel:
            with pytest.raises(TemporaryError) as caught:
                await channel.send(reply())
    assert "very_secret" not in "".join(traceback.format_exception(caught.value))


async def test_a_connection_that_is_never_made_sent_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = asyncio.Event()

    async def lookup(host: str, port: int, **more: Any) -> list[Any]:
        await never.wait()
        return []

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    async with TelegramChannel(TOKEN, base_url="http://bots.example", timeout_s=0.4) as channel:
        with pytest.raises(TemporaryError):
            await channel.send(reply())
    never.set()


@pytest.mark.parametrize("token", ["", "xyz", "987654", "98 76:xyz", "9:x\n"])
def test_what_is_no_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="the token is not that of a Telegram bot") as caught:
        TelegramChannel(token)
    assert not token.strip() or token.strip() not in str(caught.value)


def test_the_token_does_not_show() -> None:
    channel = TelegramChannel(TOKEN)
    assert "secret" not in repr(channel) + repr(vars(channel))


# -- limits and doubts ----------------------------------------------------------------------------


def test_limits_of_bot_chat_and_group() -> None:
    channel = TelegramChannel(TOKEN)
    bot, chat = channel.limits(reply())
    assert (bot.key, bot.count, bot.per_s, bot.whole_channel) == ("telegram:123456", 30, 1.0, True)
    assert (chat.key, chat.count, chat.per_s) == ("telegram:123456:chat:4711", 1, 1.0)
    for place in ("-100", "@news"):
        _, chat, group = channel.limits(reply(recipient=place))
        assert (chat.key, chat.count, chat.per_s) == (f"telegram:123456:chat:{place}", 1, 1.0)
        assert (group.key, group.count, group.per_s) == (f"telegram:123456:group:{place}", 20, 60.0)
        assert not chat.whole_channel
        assert not group.whole_channel


async def test_only_the_part_in_doubt_is_marked(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    whole = reply("".join(f"{n:04} " for n in range(2000)))
    parts = channel.parts(whole)
    doubtful = msgspec.structs.replace(whole, receipts=("1",), in_doubt=True)
    again = channel.parts(doubtful)
    assert [part.content for part in again] == [part.content for part in parts]
    assert [part.in_doubt for part in again] == [False, True, False]
    await channel.send(again[1])
    assert server.messages[0].text == (MARK + parts[1].content).strip()


@given(st.text(st.sampled_from("ab \n🎈"), max_size=30), st.integers(1, 500), st.booleans())
def test_parts_fit_with_their_mark(text: str, times: int, doubt: bool) -> None:
    text *= times
    channel = TelegramChannel(TOKEN)
    parts = channel.parts(reply(text, in_doubt=doubt))
    assert "".join("".join(part.content for part in parts).split()) == "".join(text.split())
    assert all(utf16_length(MARK + part.content) <= 4096 for part in parts)
    assert [part.in_doubt for part in parts] == [doubt] + [False] * (len(parts) - 1)


async def test_a_mark_that_does_not_fit_is_left_out(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    media = [{"type": "photo", "file_id": "p", "caption": "x" * 1020}]
    (part,) = channel.parts(reply("", options={"media": media}, in_doubt=True))
    await channel.send(part)
    assert server.messages[0].text == "x" * 1020


async def test_a_picture_in_doubt_says_so_in_its_caption(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    media = [{"type": "photo", "file_id": "p"}]
    for text, shown in (("", MARK.strip()), ("x" * 1006, MARK + "x" * 1006)):
        (part,) = channel.parts(reply(text, options={"media": media}, in_doubt=True))
        await channel.send(part)
        assert server.messages[-1].text == shown


# -- several in one message -----------------------------------------------------------------------


async def test_texts_that_wait_become_one_message(
    server: TelegramServer, channel: TelegramChannel
) -> None:
    merged = channel.merged([reply("one"), reply("*two", id="other"), reply("three")])
    assert merged is not None
    assert merged.id == reply().id
    await channel.send(merged)
    (entry,) = server.messages
    assert entry.text == "one\n\n*two\n\nthree"


def test_what_is_one_message_only_alone() -> None:
    channel = TelegramChannel(TOKEN, merge=True)
    assert channel.merges
    room = 4096 - len(MARK)
    assert channel.merged([reply("x" * (room - 3)), reply("y")]) is not None
    assert channel.merged([reply("x" * (room - 2)), reply("y")]) is None, "too long"
    for other in (
        reply(options={"buttons": [[{"text": "Yes", "data": "y"}]]}),
        reply(options={"silent": True}),
        reply(receipts=("1",)),
        reply(in_doubt=True),
        reply("  "),
    ):
        assert channel.merged([reply(), other]) is None
        assert channel.merged([other, reply()]) is None
