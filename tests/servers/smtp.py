"""A real SMTP server on loopback, with as many faults as a test asks for."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any, Literal

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

AfterData = Literal["yes", "reset", "hang"]


class SmtpServer:
    """`got` has every message that was taken, with the recipients of its envelope."""

    def __init__(self, user: str = "", password: str = "") -> None:
        self.got: list[tuple[list[str], EmailMessage]] = []
        self.sender_answer = "250 OK"
        """To MAIL."""
        self.recipients: dict[str, str] = {}
        """What is answered to a RCPT, where it is not yes."""
        self.answer = "250 OK"
        """To the end of DATA."""
        self.after_data: AfterData = "yes"
        self.never_ends = False
        """It says nothing to a QUIT."""
        self.port = 0
        self._login = (user.encode(), password.encode())
        self._released = asyncio.Event()

    def release(self) -> None:
        """Ends what hangs."""
        self._released.set()

    async def handle_MAIL(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if self.sender_answer.startswith("250"):
            envelope.mail_from = address
        return self.sender_answer

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        answer = self.recipients.get(address, "250 OK")
        if answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        if self.answer.startswith("250"):
            content = envelope.content
            assert isinstance(content, bytes)
            message = message_from_bytes(content, policy=default)
            self.got.append((list(envelope.rcpt_tos), message))
        if self.after_data == "hang":
            await self._released.wait()
        if self.after_data == "reset":
            assert isinstance(server.transport, asyncio.WriteTransport)
            server.transport.abort()
        return self.answer

    async def handle_QUIT(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        if self.never_ends:
            await self._released.wait()
        return "221 Bye"

    def authenticate(
        self, server: SMTP, session: Session, envelope: Envelope, mechanism: str, data: Any
    ) -> AuthResult:
        given = (data.login, data.password) if isinstance(data, LoginPassword) else None
        return AuthResult(success=given == self._login, handled=False)


@asynccontextmanager
async def smtp_server(
    *, user: str = "", password: str = "", tls: ssl.SSLContext | None = None
) -> AsyncIterator[SmtpServer]:
    """With `tls`, by STARTTLS; with a user, nothing is taken without a login."""
    found = SmtpServer(user, password)

    def protocol() -> SMTP:
        return SMTP(
            found,
            hostname="localhost",
            tls_context=tls,
            require_starttls=tls is not None,
            auth_required=bool(user),
            authenticator=found.authenticate if user else None,
        )

    loop = asyncio.get_running_loop()
    server = await loop.create_server(protocol, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        found.release()
        server.close()
        await server.wait_closed()
