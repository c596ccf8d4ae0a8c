"""The webhook channel: signed HTTP requests to URLs of receivers."""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp
import msgspec
from yarl import URL

from ackbone.core.errors import FinalError
from ackbone.core.outbound.delivery import Outbound

from .address_guard import AddressGuard
from .http_answers import check_answer
from .http_channel import TIMEOUT_S, HttpChannel, place
from .webhook_signatures import Signer

PLACES = 10_000
"""Number of parsed URLs that are cached."""
_encode = msgspec.json.Encoder().encode


class WebhookChannel(HttpChannel):
    """POSTs replies as JSON, signed by Standard Webhooks; the recipient is the URL.

    With the option `raw` the content is JSON already, and becomes the whole body.

    The delivery's id is the request's `webhook-id`, the same on every attempt. A receiver that has
    seen it answers 2xx and does nothing.
    """

    def __init__(
        self,
        keys: Sequence[str],
        *,
        allow: Sequence[str] = (),
        https_only: bool = True,
        name: str = "webhook",
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`allow`: internal networks that may be reached."""
        super().__init__(timeout_s=timeout_s)
        self.name = name
        self._signer = Signer(keys)
        self._guard = AddressGuard(allow)
        self._schemes = ("https",) if https_only else ("https", "http")
        self._tls = tls

    async def send(self, reply: Outbound) -> None:
        """Return when the receiver has accepted the request."""
        url = _checked(reply.recipient, self._schemes)
        body = _body(reply)
        signed = self._signer.headers(reply.id, int(time.time()), body)
        answer = await self._post(url, body, signed)
        check_answer(answer.status, answer.headers, answer.text)

    def destination(self, reply: Outbound) -> str:
        return _destination(reply.recipient)

    def _connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(
            limit=0,
            socket_factory=self._guard.socket,
            use_dns_cache=False,  # every connection resolves the name again
            ssl=True if self._tls is None else self._tls,
        )


@functools.lru_cache(maxsize=PLACES)
def _destination(url: str) -> str:
    try:
        return place(url)
    except ValueError:
        return "nowhere"


@functools.lru_cache(maxsize=PLACES)
def _checked(url: str, schemes: tuple[str, ...]) -> URL:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise FinalError(f"the recipient is not a URL: {error}") from None
    if parts.scheme not in schemes or not host:
        raise FinalError(
            f"the recipient is not an {' or '.join(schemes)} URL, but {parts.scheme!r:.20}://…"
        )
    if parts.username or parts.password:
        raise FinalError(f"{place(url)}: URLs with a password are refused")
    try:
        return URL(url)
    except (ValueError, UnicodeError):
        raise FinalError(f"{place(url)}: that is not a valid URL") from None


def _body(reply: Outbound) -> bytes:
    if reply.options.get("raw") is True:
        return reply.content.encode()
    data = {
        "id": reply.id,
        "content": reply.content,
        "conversation": reply.conversation,
        "task_id": reply.task_id,
        "tenant_id": reply.tenant_id,
    }
    return _encode({"type": "reply", "data": {k: v for k, v in data.items() if v is not None}})
