"""What channels over HTTP have in common: a URL is a secret, whatever goes wrong."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest

from ackbone.core.errors import SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Outbound
from ackbone.delivery.channels.discord_channel import DiscordChannel
from ackbone.delivery.channels.http_channel import HttpChannel, said
from ackbone.delivery.channels.slack_channel import SlackChannel
from ackbone.delivery.channels.telegram_channel import TelegramChannel
from ackbone.delivery.channels.webhook_channel import WebhookChannel
from tests.servers.receiver import Receiver, receiving

SECRET = "AAF-very_secret"
TOKEN = f"123456:{SECRET}"
KEY = "whsec_" + "QUJD" * 8


@pytest.fixture
async def silent_port() -> AsyncIterator[int]:
    """Takes connections and says nothing: no handshake comes to its end."""
    ended = asyncio.Event()

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(nothing, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    ended.set()
    server.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


Made = tuple[HttpChannel, str]


def telegram(base: str) -> Made:
    return TelegramChannel(TOKEN, base_url=base, timeout_s=1.0), "4711"


def slack(base: str) -> Made:
    return SlackChannel(hooks_url=base, timeout_s=1.0), f"{base}/services/T0/B0/{SECRET}"


def discord(base: str) -> Made:
    return DiscordChannel(hooks_urls=[base], timeout_s=1.0), f"{base}/webhooks/1/{SECRET}"


def webhook(base: str) -> Made:
    channel = WebhookChannel([KEY], allow=["127.0.0.0/8"], https_only=False, timeout_s=1.0)
    return channel, f"{base}/hook?key={SECRET}"


EACH = pytest.mark.parametrize("make", [telegram, slack, discord, webhook])


async def error_of(made: Made) -> BaseException:
    channel, recipient = made
    reply = Outbound(
        id="0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
        tenant_id="default",
        channel="c",
        recipient=recipient,
        content="hello",
    )
    async with channel:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller looks at it
            await channel.send(reply)  # type: ignore[attr-defined]
    return caught.value


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@EACH
async def test_a_handshake_that_hangs_was_not_sent_and_shows_no_url(
    silent_port: int, make: Callable[[str], Made]
) -> None:
    error = await error_of(make(f"https://127.0.0.1:{silent_port}"))
    assert type(error) is TemporaryError
    assert str(error) == f"https://127.0.0.1:{silent_port}: no connection in time"
    assert SECRET not in shown(error)


@EACH
async def test_a_proxy_that_repeats_the_path_does_not_make_it_known(
    receiver: Receiver, make: Callable[[str], Made]
) -> None:
    async def page(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        return aiohttp.web.Response(status=503, text=f"no route for {request.path_qs}, sorry")

    receiver.answer = page
    error = await error_of(make(f"http://127.0.0.1:{receiver.port}"))
    assert "no route for" in str(error)
    assert SECRET not in shown(error)


@EACH
async def test_an_answer_that_is_none_is_not_repeated(make: Callable[[str], Made]) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline() + b"\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    error = await error_of(make(f"http://127.0.0.1:{port}"))
    server.close()
    assert type(error) is SendUnknown
    assert SECRET not in shown(error)


URL = f"https://api.example.com/bot{TOKEN}/sendMessage?key=sesame"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (aiohttp.ConnectionTimeoutError(f"Connection timeout to host {URL}"),
         "no connection in time"),
        (TimeoutError(), "no answer in time"),
        (aiohttp.SocketTimeoutError(f"waited for {URL}"), "no answer in time"),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
        (OSError("the pipe is broken"), "the pipe is broken"),
        (OSError(f"cannot reach {URL}"), "OSError"),
        (OSError("cannot reach another https://place"), "OSError"),
        (OSError(f"asked for /bot{TOKEN}/sendMessage"), "OSError"),
        (OSError("with the key sesame"), "OSError"),
        (aiohttp.ClientError(), "ClientError"),
    ],
)  # fmt: skip
def test_words_for_what_went_wrong(error: BaseException, words: str) -> None:
    assert said(error, URL) == words
