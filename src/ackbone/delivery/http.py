"""What channels over HTTP share: a session, deadlines, a capped answer, what silence means."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec
from yarl import URL

from ackbone.core.errors import FinalError, SendUnknown, TemporaryError

from .answers import shown

ANSWER_BYTES = 2_000
"""So much of an answer is read: enough to say why it is a no."""
TIMEOUT_S = 20.0
_NOT_SENT = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.ServerFingerprintMismatch,
)
"""The connection was never made: whatever happens later, this attempt did not arrive."""
_HEADERS = {
    "content-type": "application/json",
    "user-agent": "ackbone",
    "accept-encoding": "identity",  # answers are read as they come: nothing is unpacked
}
_WORD = re.compile(r"[\w-]{6,}", re.ASCII)
"""What may be a secret in a URL: no shorter part of it is one."""


class Answer(msgspec.Struct, frozen=True):
    """An answer, or the beginning of a long one."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    """Where it came from; never to be shown."""

    def __repr__(self) -> str:
        return f"Answer({self.status})"

    @property
    def text(self) -> str:
        """Its first words, as they may stand in a log: proxies like to repeat what they were asked
        for, and that may be a secret."""
        text = self.body.decode("utf-8", "replace")
        for word in _private_words(self.url):
            text = text.replace(word, "***")
        return shown(text)


class HttpChannel:
    """The base of channels over HTTP: connected when first used, closed by `close`."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, answer_bytes: int = ANSWER_BYTES) -> None:
        # Half of the time for the connection: what ends there was certainly not sent.
        self._timeout = aiohttp.ClientTimeout(
            total=timeout_s, connect=timeout_s / 2, sock_connect=timeout_s / 2
        )
        self._answer_bytes = answer_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(limit=0)  # whoever calls us says how many at a time

    async def _post(
        self, url: str | URL, body: bytes, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Raises TemporaryError if it was not sent, SendUnknown if no answer came.

        Errors name the host and no more: the rest of a URL may be a secret. For the same reason
        they have no cause: aiohttp's own errors show URLs.
        """
        try:
            async with self._opened().post(
                url, data=body, headers={**_HEADERS, **(headers or {})}, allow_redirects=False
            ) as answer:
                return Answer(
                    answer.status,
                    answer.headers,
                    await _beginning(answer, self._answer_bytes),
                    str(url),
                )
        except _NOT_SENT as error:
            if isinstance(error.__cause__, FinalError):
                raise error.__cause__ from None
            raise TemporaryError(f"{place(url)}: {said(error, url)}") from None
        except aiohttp.InvalidURL:
            raise FinalError(f"{place(url)}: that is no URL") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SendUnknown(f"{place(url)}: {said(error, url)}") from None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                timeout=self._timeout,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a small answer may unpack into a large one
            )
        return self._session


def place(url: str | URL) -> str:
    """The URL as it may stand in a log: without what comes after its host."""
    parts = urlsplit(str(url))
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def said(error: BaseException, url: str | URL) -> str:
    """What went wrong, in words that show nothing of the URL that was asked for.

    Errors of libraries show it as they like, and another version shows it elsewhere.
    """
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in time"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    # The whole text of an answer's error is the URL, and what was wrong.
    text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    if "://" in text or any(word in text for word in _private_words(str(url))):
        text = ""
    return shown(text) or type(error).__name__


def _private_words(url: str) -> list[str]:
    """The parts of a URL behind its host that may be secrets, the longest first."""
    parts = urlsplit(url)
    behind = url.partition("://")[2][len(parts.netloc) :]
    user = parts.netloc.rpartition("@")[0]
    found = {*_WORD.findall(user + behind), *_WORD.findall(unquote(user + behind))}
    return sorted(found, key=len, reverse=True)


def fingerprint(secret: str) -> str:
    """A short name for a secret URL or token, the same in every process."""
    return hashlib.sha256(secret.encode()).hexdigest()[:16]


async def _beginning(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """The first bytes of an answer. A receiver that never ends its answer has given it, too."""
    content = answer.content
    if content.is_eof() and content.total_bytes <= limit:  # it has come as a whole, as most do
        return content.read_nowait()
    found = b""
    try:
        async with asyncio.timeout(5.0):
            while len(found) < limit:
                part = await answer.content.read(limit - len(found))
                if not part:
                    break
                found += part
    except (TimeoutError, aiohttp.ClientError):
        pass  # the status is what counts, and that has come
    finally:
        if not answer.content.at_eof():
            answer.close()
    return found
