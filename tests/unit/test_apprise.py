"""The Apprise channel against a real HTTP server, by Apprise's own json:// URLs."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from ackbone.core.breaker import Breaker, BreakerPolicy
from ackbone.core.errors import ConfigError, FinalError, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Again, Channel, Limit, Outbound, Sent, Splits
from ackbone.delivery.attempts import Policy, Route, attempt
from ackbone.delivery.channels.apprise_channel import THREADS, AppriseChannel
from tests.servers.receiver import Receiver, receiving

# One of its hundred plugins imports a module that Python will drop.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


def url_of(receiver: Receiver, path: str = "hook") -> str:
    return f"json://me:very-secret@127.0.0.1:{receiver.port}/{path}"


def reply(recipient: str, content: str = "hello", **other: Any) -> Outbound:
    fields: dict[str, Any] = {
        "id": "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
        "tenant_id": "default",
        "channel": "apprise",
        "recipient": recipient,
        "content": content,
    }
    return Outbound(**{**fields, **other})


async def sent(channel: AppriseChannel, *replies: Outbound) -> None:
    try:
        for one in replies:
            await channel.send(one)
    finally:
        await channel.close()


async def test_a_url(receiver: Receiver) -> None:
    channel = AppriseChannel()
    assert isinstance(channel, AppriseChannel)
    options = {"title": "News", "type": "warning"}
    await sent(channel, reply(url_of(receiver), "Grüße", options=options))
    ((headers, body),) = receiver.got
    found = json.loads(body)
    assert (found["title"], found["message"], found["type"]) == ("News", "Grüße", "warning")
    assert headers["Authorization"].startswith("Basic ")


async def test_a_tag_stands_for_several(receiver: Receiver) -> None:
    """Each is a part of its own, and only the one that is in doubt is marked."""
    channel: Channel = AppriseChannel({"ops": [url_of(receiver, "a"), url_of(receiver, "b")]})
    assert isinstance(channel, Splits)
    try:
        for receipts, doubt in (((), False), (("",), True)):
            whole = reply("ops", receipts=receipts, in_doubt=doubt)
            parts = channel.parts(whole)
            assert [part.in_doubt for part in parts] == [False, doubt]
            await channel.send(parts[len(receipts)])
    finally:
        await channel.close()
    assert receiver.paths == ["/a", "/b"]
    texts = [json.loads(body)["message"] for _, body in receiver.got]
    assert texts == ["hello", "(may be a repeat) hello"]


async def test_one_of_two_that_hangs_is_asked_again_alone_and_marked(receiver: Receiver) -> None:
    """By the carrier: what the first service took does not go there again."""
    waiting = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/b" and receiver.paths.count("/b") == 1:
            await waiting.wait()
        return web.Response()

    receiver.answer = answer
    urls = [url_of(receiver, "a"), url_of(receiver, "b?rto=1")]
    channel = AppriseChannel({"ops": urls})
    route = Route(
        channel=channel,
        policy=Policy(),
        splits=channel,
        reconciles=None,
        breaker=Breaker(BreakerPolicy(), time.monotonic),
        destination=Limit("gate"),
        narrowest=Limit("gate"),
        widest=Limit("gate"),
    )
    now = reply("ops")
    try:
        for _ in range(3):
            ((result,), _) = await attempt([now], now, route)
            if isinstance(result, Sent) and not result.more:
                break
            receipts = (*now.receipts, result.receipt) if isinstance(result, Sent) else now.receipts
            doubt = isinstance(result, Again) and result.in_doubt
            now = msgspec.structs.replace(now, receipts=receipts, in_doubt=doubt)
    finally:
        waiting.set()
        await channel.close()
    assert [path.partition("?")[0] for path in receiver.paths] == ["/a", "/b", "/b"]
    texts = [json.loads(body)["message"] for _, body in receiver.got]
    assert texts == ["hello", "hello", "(may be a repeat) hello"]


async def test_a_gateway_without_an_answer_leaves_a_doubt(receiver: Receiver) -> None:
    receiver.says(504)
    with pytest.raises(SendUnknown, match=r"not accepted by json, as far as is known"):
        await sent(AppriseChannel(), reply(url_of(receiver)))


async def test_a_no_is_tried_again_and_shows_no_secret(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.says(500)
    with pytest.raises(TemporaryError, match=r"not accepted by json") as caught:
        await sent(AppriseChannel(), reply(url_of(receiver)))
    assert "very-secret" not in "".join(traceback.format_exception(caught.value)) + caplog.text


@pytest.mark.parametrize(
    ("recipient", "why"),
    [
        ("nonsense://me:very-secret@host", "it does not support this URL: nonsense://…"),
        ("json://", "it does not support this URL: json://…"),
        ("ops", "'ops' is neither tag nor URL"),
    ],
)
async def test_what_is_no_url_is_final(
    recipient: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FinalError, match=why) as caught:
        await sent(AppriseChannel(), reply(recipient))
    assert "very-secret" not in "".join(traceback.format_exception(caught.value)) + caplog.text


async def test_urls_can_be_forbidden(receiver: Receiver) -> None:
    with pytest.raises(FinalError, match="URLs are not allowed"):
        await sent(AppriseChannel(urls=False), reply(url_of(receiver)))
    assert receiver.got == []


async def test_too_late_means_that_nobody_knows(receiver: Receiver) -> None:
    asked, waiting = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        asked.set()
        await waiting.wait()
        return web.Response()

    receiver.answer = hang
    channel = AppriseChannel(timeout_s=0.5)
    try:
        # Loading the library takes its time: that is not what is measured here.
        with pytest.raises(FinalError):
            await sent(AppriseChannel(), reply("json://"))
        with pytest.raises(SendUnknown, match=r"no result within 0.5 s"):
            await channel.send(reply(url_of(receiver)))
        await asyncio.wait_for(asked.wait(), 20)
    finally:
        waiting.set()
        await channel.close()


async def test_what_never_began_is_not_in_doubt(receiver: Receiver) -> None:
    waiting = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await waiting.wait()
        return web.Response()

    receiver.answer = hang
    channel = AppriseChannel(timeout_s=0.7)
    try:
        with pytest.raises(FinalError):
            await sent(AppriseChannel(), reply("json://"))  # loads the library
        ends = await asyncio.gather(
            *(channel.send(reply(url_of(receiver, str(n)))) for n in range(THREADS + 1)),
            return_exceptions=True,
        )
    finally:
        waiting.set()
        await channel.close()
    assert [type(end) for end in ends] == [SendUnknown] * THREADS + [TemporaryError]
    assert "never began" in str(ends[-1])


async def test_nothing_to_say_is_final(receiver: Receiver) -> None:
    with pytest.raises(FinalError, match="no text"):
        await sent(AppriseChannel(), reply(url_of(receiver), " "))


async def test_options_that_mean_nothing_are_final(receiver: Receiver) -> None:
    with pytest.raises(FinalError, match="options for Apprise"):
        await sent(AppriseChannel(), reply(url_of(receiver), options={"type": "loud"}))


def test_a_tag_needs_urls() -> None:
    with pytest.raises(ConfigError, match="the tag 'ops' has no URL"):
        AppriseChannel({"ops": []})


def test_urls_do_not_show() -> None:
    channel = AppriseChannel({"ops": ["json://me:very-secret@host"]})
    assert "very-secret" not in repr(vars(channel))
