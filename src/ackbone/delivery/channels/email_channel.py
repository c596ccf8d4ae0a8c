"""The e-mail channel: replies by SMTP. No text of a reply can add a header or a recipient."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import ssl
from collections.abc import Sequence
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import getaddresses, localtime
from typing import Literal, NoReturn

import aiosmtplib
import msgspec

from ackbone.core.errors import ConfigError, FinalError, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Outbound
from ackbone.core.secret import Secret
from ackbone.core.text import one_line

from .http_answers import shown
from .reply_text import options_of

log = logging.getLogger("ackbone.delivery")

TIMEOUT_S = 30.0
QUIT_S = 1.0
_OPERATOR = frozenset({530, 534, 535, 538})
"""The channel is configured wrongly (RFC 4954). Replies wait until an operator has fixed it."""
_PORTS = {"starttls": 587, "tls": 465, "none": 25}


class EmailChannel:
    """The recipient is an address, or several with commas. Each reply has its own connection.

    The Message-ID is made from the reply's id: mail servers and readers drop repeats.
    """

    def __init__(
        self,
        host: str,
        *,
        sender: str,
        port: int | None = None,
        security: Literal["starttls", "tls", "none"] = "starttls",
        login: tuple[str, str] | None = None,
        name: str = "email",
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`sender`: `Agent <agent@example.com>`. `login`: user and password."""
        if security not in _PORTS:
            raise ConfigError([f"{name}: security is {', '.join(_PORTS)}, not {security!r:.40}"])
        if login is not None and security == "none":
            raise ConfigError([f"{name}: a password goes over TLS only"])
        try:
            (self._sender,) = addresses_of(sender, what="the sender")
        except (FinalError, ValueError):
            raise ConfigError([f"{name}: the sender {sender!r:.80} is not one address"]) from None
        self.name = name
        self._host = host
        self._port = port or _PORTS[security]
        self._security = security
        self._user = login[0] if login else None
        self._password = Secret(login[1]) if login else None
        self._timeout_s = timeout_s
        self._tls = tls

    async def close(self) -> None:
        """Nothing stays open between replies."""

    async def send(self, reply: Outbound) -> str:
        """Return the Message-ID when the server has accepted the message."""
        message = message_for(reply, self._sender)
        to = [address.addr_spec for address in message["To"].addresses]
        smtp = self._client()
        try:
            await self._prepare(smtp, to)
            await self._data(smtp, message.as_bytes())
            with contextlib.suppress(aiosmtplib.SMTPException, OSError):
                # The server has the message. If QUIT took longer than the caller's time limit, a
                # message that arrived would be in doubt.
                async with asyncio.timeout(QUIT_S):
                    await smtp.quit()
        finally:
            smtp.close()
        return str(message["Message-ID"])

    def _client(self) -> aiosmtplib.SMTP:
        return aiosmtplib.SMTP(
            hostname=self._host,
            port=self._port,
            use_tls=self._security == "tls",
            start_tls=self._security == "starttls",
            username=self._user,
            password=self._password.reveal() if self._password else None,
            timeout=self._timeout_s,
            tls_context=self._tls,
        )

    async def _prepare(self, smtp: aiosmtplib.SMTP, to: Sequence[str]) -> None:
        """Do everything before the text within one timeout: up to here nothing was sent."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connect(smtp)
                await self._envelope(smtp, to)
        except TimeoutError:
            raise TemporaryError(
                f"{self._place}: not ready for the message within {self._timeout_s:g} s"
            ) from None

    async def _connect(self, smtp: aiosmtplib.SMTP) -> None:
        try:
            await smtp.connect()
        except aiosmtplib.SMTPAuthenticationError as error:
            raise TemporaryError(
                f"{self._place}: {_answer(error)}: the login is refused; check user and password"
            ) from None
        except (aiosmtplib.SMTPException, OSError) as error:
            raise TemporaryError(f"{self._place}: {_said(error)}") from None

    async def _envelope(self, smtp: aiosmtplib.SMTP, to: Sequence[str]) -> None:
        """Send sender and recipients. Raises if the server refuses all recipients."""
        refused: list[aiosmtplib.SMTPRecipientRefused] = []
        try:
            await smtp.mail(self._sender.addr_spec)
            for address in to:
                try:
                    await smtp.rcpt(address)
                except aiosmtplib.SMTPRecipientRefused as error:
                    if not 500 <= error.code < 600:
                        # Wait with all of them: otherwise the others would get it twice.
                        raise
                    refused.append(error)
        except aiosmtplib.SMTPResponseException as error:
            self._refuse(error)
        except (aiosmtplib.SMTPException, OSError) as error:
            raise TemporaryError(f"{self._place}: {_said(error)}") from None
        if len(refused) == len(to):
            self._refuse(refused[0])
        for one in refused:
            log.warning(
                "e-mail: %s is refused, the other recipients get it: %s",
                one.recipient,
                _answer(one),
            )

    async def _data(self, smtp: aiosmtplib.SMTP, message: bytes) -> None:
        try:
            await smtp.data(message)
        except aiosmtplib.SMTPResponseException as error:
            self._refuse(error)
        except (aiosmtplib.SMTPException, OSError) as error:
            raise SendUnknown(f"{self._place}: {_said(error)}") from None

    def _refuse(self, error: aiosmtplib.SMTPResponseException) -> NoReturn:
        why = f"{self._place}: {_answer(error)}"
        if error.code in _OPERATOR:
            raise TemporaryError(f"{why}: the server wants a login, or a different one") from None
        raise (FinalError if 500 <= error.code < 600 else TemporaryError)(why) from None

    @property
    def _place(self) -> str:
        return f"smtp://{self._host}:{self._port}"


def _answer(error: aiosmtplib.SMTPResponseException) -> str:
    return f"{error.code} {shown(error.message)}"


def _said(error: BaseException) -> str:
    return shown(str(error)) or type(error).__name__


# -- the message -----------------------------------------------------------------------------------

_POLICY = SMTP.clone(cte_type="7bit")  # not every server accepts eight bits
_ADDRESS = re.compile(r"[^\s@<>,;:\"\\()\[\]]{1,64}@[A-Za-z0-9._-]{1,255}", re.ASCII)
_BREAKS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_PLAIN_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_SUBJECT_LENGTH = 100
NO_SUBJECT = "(no subject)"


class Options(msgspec.Struct, frozen=True):
    """The options of a reply."""

    subject: str | None = None
    html: str | None = None
    """Sent together with the text, for mail programs that show HTML."""
    in_reply_to: str | None = None
    references: Sequence[str] = ()
    reply_to: str | None = None


def addresses_of(text: str, *, what: str) -> list[Address]:
    """Return the addresses of a text with commas. Raises FinalError if one of them is invalid."""
    _header_text(text, what)
    found = []
    for name, address in getaddresses([text]):
        if not _ADDRESS.fullmatch(address) or not address.isascii():
            raise FinalError(f"e-mail: {what} {text!r:.80} is not an address")
        try:
            found.append(Address(name, addr_spec=address))
        except (ValueError, MessageError):  # for example two dots in a row
            raise FinalError(f"e-mail: {what} {text!r:.80} is not an address") from None
    if not found:
        raise FinalError(f"e-mail: {what} is empty")
    return found


def message_for(reply: Outbound, sender: Address) -> EmailMessage:
    """Return the message, with the same id on every attempt: a mail program shows it once."""
    options = options_of(reply, Options, "e-mail")
    message = EmailMessage(policy=_POLICY)
    message["From"] = sender
    message["To"] = addresses_of(reply.recipient, what="the recipient")
    message["Subject"] = _subject(reply, options)
    message["Date"] = localtime()
    message["Message-ID"] = message_id(reply.id, sender.domain)
    message["Auto-Submitted"] = "auto-generated"  # absence notes do not answer those
    if options.in_reply_to is not None:
        message["In-Reply-To"] = _header_text(options.in_reply_to, "in_reply_to")
    earlier = options.references or ([options.in_reply_to] if options.in_reply_to else [])
    if earlier:
        message["References"] = " ".join(_header_text(item, "references") for item in earlier)
    if options.reply_to is not None:
        message["Reply-To"] = addresses_of(options.reply_to, what="reply_to")
    message.set_content(reply.content)
    if options.html is not None:
        message.add_alternative(options.html, subtype="html")
    return message


def message_id(reply_id: str, domain: str) -> str:
    name = reply_id
    if not _PLAIN_ID.fullmatch(name):
        name = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"<ackbone.{name}@{domain}>"


def _subject(reply: Outbound, options: Options) -> str:
    if options.subject is not None:
        return _header_text(options.subject, "subject")
    first = next((line for line in reply.content.splitlines() if line.strip()), NO_SUBJECT)
    return one_line(first.strip())[:_SUBJECT_LENGTH]


def _header_text(text: str, what: str) -> str:
    """Return the text. Raises FinalError for a line break: it would begin another header."""
    if _BREAKS.search(text):
        raise FinalError(f"e-mail: {what} has a line break or another control character in it")
    return text
