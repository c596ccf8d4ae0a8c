"""The webhook channel against a real server: what arrives, what is refused, what is unknown."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from standardwebhooks import Webhook, WebhookVerificationError

from ackbone.core.errors import (
    ConfigError,
    FinalError,
    RateLimited,
    SendUnknown,
    TemporaryError,
)
from ackbone.core.outbound.delivery import Outbound
from ackbone.delivery.backoff import LONGEST_WAIT_S
from ackbone.delivery.channels.http_answers import check_answer, retry_after_s
from ackbone.delivery.channels.http_channel import ANSWER_BYTES
from ackbone.delivery.channels.webhook_channel import (
    AddressGuard,
    AddressRefused,
    Signer,
    WebhookChannel,
)
from ackbone.delivery.files.channel_sender import Channels
from ackbone.delivery.files.delivery_queue import DeliveryQueue
from ackbone.delivery.files.delivery_runner import DeliveryRunner
from tests.servers.receiver import Receiver, receiving

HERE = "127.0.0.0/8"
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OLDER = "whsec_" + base64.b64encode(bytes(range(32, 64))).decode()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


def reply(url: str, **other: Any) -> Outbound:
    fields: dict[str, Any] = {
        "id": "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
        "tenant_id": "default",
        "channel": "webhook",
        "recipient": url,
        "content": "Grüße, 你好",
    }
    return Outbound(**{**fields, **other})


def inside(**options: Any) -> WebhookChannel:
    """A channel that may reach this machine."""
    options = {"keys": [SECRET], "allow": [HERE], "https_only": False, "timeout_s": 5.0, **options}
    return WebhookChannel(options.pop("keys"), **options)


# -- what arrives ---------------------------------------------------------------------------------


async def test_the_public_library_of_the_standard_accepts_it(receiver: Receiver) -> None:
    async with inside() as channel:
        await channel.send(reply(receiver.url(), conversation="c1", task_id="t1"))
    ((headers, body),) = receiver.got
    found = Webhook(SECRET).verify(body, headers)
    assert found == {
        "type": "reply",
        "data": {
            "id": "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
            "content": "Grüße, 你好",
            "conversation": "c1",
            "task_id": "t1",
            "tenant_id": "default",
        },
    }
    assert headers["webhook-id"] == "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11"
    assert headers["Content-Type"] == "application/json"
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body + b" ", headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(OLDER).verify(body, headers)


async def test_while_a_key_is_replaced_both_are_good(receiver: Receiver) -> None:
    async with inside(keys=[SECRET, OLDER]) as channel:
        await channel.send(reply(receiver.url()))
    ((headers, body),) = receiver.got
    assert Webhook(SECRET).verify(body, headers) == Webhook(OLDER).verify(body, headers)


async def test_signed_with_a_private_key(receiver: Receiver) -> None:
    private = Ed25519PrivateKey.generate()
    seed = private.private_bytes_raw()
    whole = base64.b64encode(seed + private.public_key().public_bytes_raw()).decode()
    for key in (f"whsk_{base64.b64encode(seed).decode()}", f"whsk_{whole}"):
        async with inside(keys=[key]) as channel:
            await channel.send(reply(receiver.url()))
        headers, body = receiver.got.pop()
        version, _, signature = headers["webhook-signature"].partition(",")
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        private.public_key().verify(base64.b64decode(signature), signed)
        assert version == "v1a"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([], "at least one key"),
        (["whsec_!!!"], "key 1 is not base64"),
        ([SECRET, "whsec_c2hvcnQ="], "key 2 has 5 bytes; a secret has 24 to 64"),
        (["whsk_c2hvcnQ="], "key 1 is not an Ed25519 private key"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(keys: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        Signer(keys)
    assert not any(key and key[6:] in str(caught.value) for key in keys if len(key) > 10)


# -- where it may not go --------------------------------------------------------------------------

CLOSED = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1",
    "192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1",
    "239.255.255.255", "240.0.0.1", "255.255.255.255", "::", "::1", "::7f00:1",
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b::808:808", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::",
    "3fff::1", "5f00::1", "fc00::1", "fd12:3456::1", "fe80::1", "fe80::1%eth0", "fec0::1",
    "ff02::1", "not an address", "", "127.1",
]  # fmt: skip
OPEN = ["168.63.129.15", "168.63.129.17",
        "8.8.8.8", "1.1.1.1", "100.63.255.255", "100.128.0.1", "172.32.0.1", "198.17.0.1",
        "198.20.0.1", "223.255.255.255", "2606:4700::1", "2a00:1450::1"]  # fmt: skip


@pytest.mark.parametrize("address", CLOSED)
def test_addresses_inside(address: str) -> None:
    assert not AddressGuard().is_open(address)


@pytest.mark.parametrize("address", OPEN)
def test_addresses_outside(address: str) -> None:
    assert AddressGuard().is_open(address)


def test_a_network_may_be_allowed_by_name() -> None:
    guard = AddressGuard(["10.1.0.0/16", "fd00:1::/32"])
    assert guard.is_open("10.1.2.3")
    assert guard.is_open("fd00:1::5")
    assert guard.is_open("::ffff:10.1.2.3")
    assert not guard.is_open("10.2.2.3")
    assert not guard.is_open("fd00:2::5")


FORMS = [
    "127.0.0.1", "localhost", "LOCALHOST", "localhost.", "127.1", "127.0.1", "2130706433",
    "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001", "127.000.000.001", "0",
    "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:0:0:1]",
    "[::127.0.0.1]", "%31%32%37.0.0.1", "\u2460\u2461\u2466.0.0.1",
    "\uff11\uff12\uff17.\uff10.\uff10.\uff11",
]  # fmt: skip


@pytest.mark.parametrize("host", FORMS)
async def test_no_form_of_an_address_leads_inside(receiver: Receiver, host: str) -> None:
    """On every attempt: the server beside us never hears of it."""
    async with WebhookChannel([SECRET], https_only=False, timeout_s=5.0) as channel:
        for _ in range(3):
            with pytest.raises((FinalError, TemporaryError)) as caught:
                await channel.send(reply(receiver.url(host)))
            # A name that does not even resolve may be tried again: it led nowhere.
            if isinstance(caught.value, TemporaryError):
                assert "resolve" in str(caught.value) or "Name" in str(caught.value)
    assert receiver.got == []


@pytest.mark.parametrize(
    "host",
    [
        "168.63.129.16",
        "169.254.169.254",
        "10.0.0.1",
        "192.168.0.1",
        "[fd00::1]",
        "[fe80::1]",
        "100.64.0.1",
    ],
)
async def test_neighbours_and_metadata_are_refused_by_name_of_the_address(host: str) -> None:
    async with WebhookChannel([SECRET], https_only=False, timeout_s=5.0) as channel:
        with pytest.raises(
            AddressRefused, match=r"is not a public address; if this is intended, add"
        ):
            await channel.send(reply(f"http://{host}/latest/meta-data/"))


async def test_a_name_that_changes_its_address_does_not_get_in(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: public when somebody looks, inside when the connection is made."""
    answers = ["127.0.0.1", "127.0.0.1"]
    asked: list[str] = []

    async def lookup(host: str, port: int, **more: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(), port))]

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", lookup)
    async with WebhookChannel([SECRET], https_only=False, timeout_s=5.0) as channel:
        for _ in range(2):
            with pytest.raises(AddressRefused):
                await channel.send(reply(receiver.url("rebind.example")))
    assert asked == ["rebind.example"] * 2, "each attempt looks the name up again"
    assert receiver.got == []


async def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    receiver.says(302, location=receiver.url() + "/secret")
    async with inside() as channel:
        with pytest.raises(FinalError, match="HTTP 302: redirects are not followed"):
            await channel.send(reply(receiver.url()))
    assert len(receiver.got) == 1


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://example.com/x", "not an https or http URL"),
        ("file:///etc/passwd", "not an https or http URL"),
        ("//example.com", "not an https or http URL"),
        ("http://", "not an https or http URL"),
        ("http://[::1/x", "not a URL"),
        ("http://example.com:99999/", "not a URL"),
        ("http://user:secret@example.com/", "URLs with a password are refused"),
        ("", "not an https or http URL"),
    ],
)
async def test_what_is_no_url_is_refused(url: str, why: str) -> None:
    async with inside() as channel:
        with pytest.raises(FinalError, match=why) as caught:
            await channel.send(reply(url))
    assert "secret" not in str(caught.value)


async def test_plain_http_has_to_be_asked_for(receiver: Receiver) -> None:
    async with inside(https_only=True) as channel:
        with pytest.raises(FinalError, match="not an https URL"):
            await channel.send(reply(receiver.url()))
    assert receiver.got == []


# -- what an answer means -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error"),
    [
        *[(status, None) for status in (200, 201, 202, 204, 299)],
        *[(status, FinalError) for status in (301, 304, 400, 401, 403, 404, 410, 413, 422, 451)],
        *[(status, TemporaryError) for status in (408, 421, 425, 500, 503, 521, 599)],
        *[(status, SendUnknown) for status in (502, 504, 520, 522, 524)],
        (429, RateLimited),
    ],
)
def test_answers(status: int, error: type[Exception] | None) -> None:
    if error is None:
        check_answer(status, {}, "")
        return
    with pytest.raises(error, match=f"HTTP {status}: why not") as caught:
        check_answer(status, {"Retry-After": "7"}, "why not")
    if isinstance(caught.value, RateLimited | TemporaryError | SendUnknown):
        assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [("30", 30.0), ("0", 0.0), ("-5", 0.0), ("1.5", 1.5), ("1e9", LONGEST_WAIT_S), ("nan", None),
     ("soon", None), ("", None), ("Wed, 99 Foo", None),
     ("Thu, 31 Dec 2026 23:59:59 +99999999999999", None)],
)  # fmt: skip
def test_how_long_to_wait(text: str, wait_s: float | None) -> None:
    assert retry_after_s({"Retry-After": text}) == wait_s


def test_how_long_to_wait_as_a_date() -> None:
    found = retry_after_s({"Retry-After": formatdate(time.time() + 60, usegmt=True)})
    assert found is not None
    assert 55 < found <= 60


async def test_a_limit_says_how_long(receiver: Receiver) -> None:
    receiver.says(429, "slow down", Retry_After="12")
    async with inside() as channel:
        with pytest.raises(RateLimited, match="HTTP 429: slow down") as caught:
            await channel.send(reply(receiver.url()))
    assert caught.value.retry_after_s == 12.0


async def test_nobody_listens(receiver: Receiver) -> None:
    """It certainly did not arrive."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with inside() as channel:
        with pytest.raises(TemporaryError):
            await channel.send(reply(f"http://127.0.0.1:{port}/"))


async def test_no_answer_means_that_nobody_knows(receiver: Receiver) -> None:
    waiting = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await waiting.wait()
        return web.Response()

    receiver.answer = hang
    async with inside(timeout_s=1.0) as channel:
        with pytest.raises(SendUnknown):
            await channel.send(reply(receiver.url()))
    waiting.set()
    assert len(receiver.got) == 1


async def test_a_connection_that_breaks_means_that_nobody_knows(receiver: Receiver) -> None:
    receiver.breaks()
    async with inside() as channel:
        with pytest.raises(SendUnknown):
            await channel.send(reply(receiver.url()))


async def test_an_endless_answer_is_not_read_to_its_end(receiver: Receiver) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        while sent < 50_000_000:
            await response.write(b"x" * 10_000)
            sent += 10_000
        return response

    receiver.answer = endless
    async with inside() as channel:
        with pytest.raises(TemporaryError) as caught:
            await channel.send(reply(receiver.url()))
    assert len(str(caught.value)) < 400
    assert sent < 50_000_000, f"more was read than {ANSWER_BYTES} bytes"


async def test_a_packed_answer_is_not_unpacked(receiver: Receiver) -> None:
    bomb = gzip.compress(b"\0" * 5_000_000)

    async def packed(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, body=bomb, headers={"Content-Encoding": "gzip"})

    receiver.answer = packed
    async with inside() as channel:
        with pytest.raises(TemporaryError) as caught:
            await channel.send(reply(receiver.url()))
    assert len(str(caught.value)) < 2_000


async def test_what_an_answer_says_cannot_move_a_cursor(receiver: Receiver) -> None:
    receiver.says(400, "no\x1b[2J\nforged line")
    async with inside() as channel:
        with pytest.raises(FinalError, match=r"no\\e\[2J\\nforged line"):
            await channel.send(reply(receiver.url()))


# -- with the queue of files ----------------------------------------------------------------------


async def test_through_the_queue_every_attempt_has_one_id(
    receiver: Receiver, tmp_path: Path
) -> None:
    statuses = [503, 429, 200]
    done = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        status = statuses.pop(0)
        if not statuses:
            done.set()
        return web.Response(status=status, headers={"Retry-After": "1"})

    receiver.answer = answer
    queue = DeliveryQueue(tmp_path / "q")
    delivery = queue.enqueue("webhook", receiver.url(), "hello")
    lost = queue.enqueue("pigeon", "roof", "coo")
    runner = DeliveryRunner(queue, Channels(inside()), wait_scale=0.001)
    runner.start()
    try:
        await asyncio.wait_for(done.wait(), 20)
    finally:
        await asyncio.to_thread(runner.stop)
    assert [headers["webhook-id"] for headers, _ in receiver.got] == [delivery.id] * 3
    assert {json.loads(body)["data"]["content"] for _, body in receiver.got} == {"hello"}
    (failed,) = queue.load_failed()
    assert (failed.id, failed.last_error) == (
        lost.id,
        "there is no channel 'pigeon'; there are: webhook",
    )


async def test_an_unknown_end_is_marked_in_the_file(receiver: Receiver, tmp_path: Path) -> None:
    seen: list[int] = []
    queue = DeliveryQueue(tmp_path / "q")
    delivery = queue.enqueue("webhook", receiver.url(), "hello")
    done = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        found = queue.read(delivery.id)
        seen.append(-1 if found is None else found.resent)
        if len(seen) == 1:
            assert request.transport is not None
            request.transport.abort()
        else:
            done.set()
        return web.Response()

    receiver.answer = answer
    runner = DeliveryRunner(queue, Channels(inside()), wait_scale=0.001)
    runner.start()
    try:
        await asyncio.wait_for(done.wait(), 20)
    finally:
        await asyncio.to_thread(runner.stop)
    assert seen == [0, 1]
    assert os.listdir(queue.queue_dir) == ["failed"] or not queue.load_pending()
