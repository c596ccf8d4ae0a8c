"""The e-mail channel: replies by SMTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Sequence
from typing import Literal, NoReturn

import aiosmtplib

from ackbone.core.errors import ConfigError, FinalError, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Outbound
from ackbone.core.secret import Secret

from .email_message import addresses_of, message_for
from .http_answers import shown

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
