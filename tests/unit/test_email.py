"""The e-mail channel against a real SMTP server."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import traceback
from collections.abc import AsyncIterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.core.errors import ConfigError, FinalError, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Channel, Outbound
from ackbone.delivery.channels.email_channel import (
    EmailChannel,
    addresses_of,
    message_for,
    message_id,
)
from tests.servers.certificates import Authority
from tests.servers.smtp import SmtpServer, smtp_server

SENDER = "Agent Smith <agent@example.com>"


@pytest.fixture
async def server() -> AsyncIterator[SmtpServer]:
    async with smtp_server() as server:
        yield server


def channel_to(server: SmtpServer, **more: Any) -> EmailChannel:
    settings: dict[str, Any] = {"sender": SENDER, "port": server.port, "security": "none", **more}
    return EmailChannel("127.0.0.1", **settings)


def reply(content: str = "Hello.\nHow are you?", **other: Any) -> Outbound:
    fields: dict[str, Any] = {
        "id": "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
        "tenant_id": "default",
        "channel": "email",
        "recipient": "jo@example.org",
        "content": content,
    }
    return Outbound(**{**fields, **other})


def text_of(message: EmailMessage, kind: Literal["plain", "html"] = "plain") -> str:
    body = message.get_body((kind,))
    assert body is not None
    return str(body.get_content()).replace("\r\n", "\n")


# -- messages -------------------------------------------------------------------------------------


async def test_a_message_arrives(server: SmtpServer) -> None:
    channel: Channel = channel_to(server)
    receipt = await channel.send(reply("Grüße, 你好\n.\nMAIL FROM:<x@example.com>\n"))
    ((to, message),) = server.got
    assert to == ["jo@example.org"]
    assert text_of(message) == "Grüße, 你好\n.\nMAIL FROM:<x@example.com>\n"
    assert message["From"] == SENDER
    assert message["To"] == "jo@example.org"
    assert message["Subject"] == "Grüße, 你好"
    assert message["Auto-Submitted"] == "auto-generated"
    assert message["Date"].datetime is not None
    assert receipt == message["Message-ID"]
    assert receipt == "<ackbone.0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11@example.com>"


async def test_a_repeat_has_the_same_id_and_no_mark(server: SmtpServer) -> None:
    channel = channel_to(server)
    await channel.send(reply())
    await channel.send(reply(in_doubt=True))
    (_, first), (_, again) = server.got
    assert first["Message-ID"] == again["Message-ID"]
    assert text_of(first) == text_of(again) == "Hello.\nHow are you?\n"


async def test_options(server: SmtpServer) -> None:
    options = {
        "subject": "Über Ünicode",
        "html": "<p>Hello</p>",
        "in_reply_to": "<question@example.org>",
        "reply_to": "desk@example.com",
    }
    await channel_to(server).send(reply(options=options))
    ((_, message),) = server.got
    assert message["Subject"] == "Über Ünicode"
    assert message["In-Reply-To"] == message["References"] == "<question@example.org>"
    assert message["Reply-To"] == "desk@example.com"
    assert text_of(message) == "Hello.\nHow are you?\n"
    assert text_of(message, "html") == "<p>Hello</p>\n"


def test_a_subject_is_found() -> None:
    (sender,) = addresses_of(SENDER, what="the sender")
    assert message_for(reply("\n\n  One\t1 \nTwo"), sender)["Subject"] == "One\\t1"
    assert message_for(reply("\n"), sender)["Subject"] == "(no subject)"
    assert len(message_for(reply("x" * 500), sender)["Subject"]) == 100


@pytest.mark.parametrize(
    "options",
    [
        {"subject": "x\r\nBcc: all@example.com"},
        {"subject": "x\ny"},
        {"subject": "x\u2028y"},
        {"subject": "x\x85y"},
        {"in_reply_to": "<a@b>\r\nBcc: all@example.com"},
        {"references": ["<a@b>\nX: y"]},
        {"reply_to": "a@example.com\nBcc: all@example.com"},
    ],
)
async def test_nothing_adds_a_header(server: SmtpServer, options: dict[str, Any]) -> None:
    with pytest.raises(FinalError, match="has a line break"):
        await channel_to(server).send(reply(options=options))
    assert server.got == []


@pytest.mark.parametrize(
    "recipient",
    [
        "", "jo", "jo@", "@example.org", "jo@example.org\r\nRCPT TO:<all@example.org>",
        "jo@exämple.org", "jö@example.org", "jo@example.org>", "a b@example.org",
        "a@example.org; b@example.org", "jo..e@example.org", ".jo@example.org", "jo@example..org",
        "jo@example.org.",
    ],
)  # fmt: skip
async def test_what_is_no_address_is_refused(server: SmtpServer, recipient: str) -> None:
    with pytest.raises(FinalError, match="e-mail: the recipient"):
        await channel_to(server).send(reply(recipient=recipient))
    assert server.got == []


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_no_text_becomes_a_header(text: str) -> None:
    (sender,) = addresses_of(SENDER, what="the sender")
    message = message_for(reply(text), sender)
    head = message.as_bytes().partition(b"\r\n\r\n")[0].decode("ascii")
    names = {line.partition(":")[0] for line in head.split("\r\n") if not line.startswith(" ")}
    assert names == {
        "From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted", "Content-Type",
        "Content-Transfer-Encoding", "MIME-Version",
    }  # fmt: skip


def test_ids_of_other_forms_are_hashed() -> None:
    found = message_id("order 7\r\n", "example.com")
    assert found == message_id("order 7\r\n", "example.com")
    assert " " not in found
    assert "\n" not in found


# -- several recipients ---------------------------------------------------------------------------


async def test_who_is_refused_for_good_does_not_stop_the_others(
    server: SmtpServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.recipients["gone@example.org"] = "550 5.1.1 no such user"
    with caplog.at_level(logging.WARNING, "ackbone.delivery"):
        await channel_to(server).send(reply(recipient="gone@example.org, Jo <jo@example.org>"))
    ((to, _),) = server.got
    assert to == ["jo@example.org"]
    assert "gone@example.org is refused" in caplog.text


async def test_who_is_refused_for_now_lets_all_wait(server: SmtpServer) -> None:
    server.recipients["busy@example.org"] = "450 4.2.1 try later"
    with pytest.raises(TemporaryError, match=r"450 4.2.1 try later"):
        await channel_to(server).send(reply(recipient="jo@example.org, busy@example.org"))
    assert server.got == []


async def test_nobody_is_left(server: SmtpServer) -> None:
    server.recipients["jo@example.org"] = "550 5.1.1 no such user"
    with pytest.raises(FinalError, match=r"550 5.1.1 no such user"):
        await channel_to(server).send(reply())


# -- answers --------------------------------------------------------------------------------------


async def test_a_server_that_wants_a_login_loses_no_reply(server: SmtpServer) -> None:
    server.sender_answer = "530 5.7.0 Authentication required"
    with pytest.raises(TemporaryError, match="Authentication required: the server wants a login"):
        await channel_to(server).send(reply())
    server.sender_answer = "550 5.7.1 not from you"
    with pytest.raises(FinalError, match="not from you"):
        await channel_to(server).send(reply())


@pytest.mark.parametrize(
    ("answer", "error"),
    [("452 4.3.1 disk full", TemporaryError), ("554 5.7.1 that is spam", FinalError)],
)
async def test_answers_to_the_message(
    server: SmtpServer, answer: str, error: type[Exception]
) -> None:
    server.answer = answer
    with pytest.raises(error, match=answer) as caught:
        await channel_to(server).send(reply())
    assert type(caught.value) is error


async def test_a_connection_that_breaks_after_the_message(server: SmtpServer) -> None:
    server.after_data = "reset"
    with pytest.raises(SendUnknown):
        await channel_to(server).send(reply())
    assert len(server.got) == 1


async def test_silence_after_the_message(server: SmtpServer) -> None:
    server.after_data = "hang"
    with pytest.raises(SendUnknown):
        await channel_to(server, timeout_s=2.0).send(reply())
    assert len(server.got) == 1


async def test_who_has_the_message_may_be_silent_then(server: SmtpServer) -> None:
    """What arrived must not be in doubt, and sent again, because of how the call ended."""
    server.never_ends = True
    async with asyncio.timeout(10):  # whoever calls has a patience of its own
        assert await channel_to(server).send(reply())
    assert len(server.got) == 1


async def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        channel = EmailChannel(
            "127.0.0.1", sender=SENDER, port=free.getsockname()[1], security="none"
        )
        with pytest.raises(TemporaryError):
            await channel.send(reply())


async def test_a_server_without_tls_is_not_used(server: SmtpServer) -> None:
    with pytest.raises(TemporaryError):
        await channel_to(server, security="starttls", login=("me", "secret")).send(reply())
    assert server.got == []


# -- TLS and login --------------------------------------------------------------------------------


async def test_login_over_tls(tmp_path: Path) -> None:
    server_side, client_side = contexts(tmp_path)
    async with smtp_server(user="me", password="very-secret", tls=server_side) as server:
        good = channel_to(server, security="starttls", login=("me", "very-secret"), tls=client_side)
        await good.send(reply())
        assert len(server.got) == 1
        bad = channel_to(server, security="starttls", login=("me", "other-secret"), tls=client_side)
        with pytest.raises(TemporaryError, match="the login is refused") as caught:
            await bad.send(reply())
        assert "other-secret" not in "".join(traceback.format_exception(caught.value))
        assert "secret" not in repr(vars(good))
        untrusting = channel_to(server, security="starttls", login=("me", "very-secret"))
        with pytest.raises(TemporaryError):
            await untrusting.send(reply())
    assert len(server.got) == 1


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = Authority(folder)
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(*authority.sign("mail"))
    return server_side, ssl.create_default_context(cafile=authority.certificate)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"sender": "nobody"}, "is not one address"),
        ({"sender": "a@example.com, b@example.com"}, "is not one address"),
        ({"security": "ssl"}, "security is starttls, tls, none"),
        ({"security": "none", "login": ("me", "very-secret")}, "over TLS only"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        EmailChannel("localhost", **{"sender": SENDER, **settings})
    assert "very-secret" not in str(caught.value)
