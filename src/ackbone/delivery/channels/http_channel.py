"""The base of channels over HTTP: a session, deadlines, and answers of limited size."""

from __future__ import annotations

import asyncio
import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec
from yarl import URL

from ackbone.core.errors import FinalError, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Outbound
from ackbone.core.secret import Secret

from .http_answers import not_theirs, shown
from .reply_text import joined

T = TypeVar("T")

ANSWER_BYTES = 2_000
"""Read at most this many bytes of an answer: enough for the error message."""
CHAT_ANSWER_BYTES = 1_000_000
"""The same for chat services, whose answers contain the message with all its media."""
TIMEOUT_S = 20.0
_NOT_SENT = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.ServerFingerprintMismatch,
)
"""Errors before a connection existed: this attempt certainly did not arrive."""
_HEADERS = {
    "content-type": "application/json",
    "user-agent": "ackbone",
    "accept-encoding": "identity",  # answers are not decompressed
}
_WORD = re.compile(r"[\w-]{6,}", re.ASCII)
"""A part of a URL that may be a secret. Shorter parts are not."""


class Answer(msgspec.Struct, frozen=True):
    """An answer, or the first bytes of a long one."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    """The URL that was called. It may contain a secret and is never shown."""

    def __repr__(self) -> str:
        return f"Answer({self.status})"

    @property
    def text(self) -> str:
        """The first words of the answer, without parts of the URL: proxies often repeat the URL,
        and it may contain a secret."""
        text = self.body.decode("utf-8", "replace")
        for word in _private_words(self.url):
            text = text.replace(word, "***")
        return shown(text)


class HttpChannel:
    """A channel over HTTP. It connects when it is first used."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, answer_bytes: int = ANSWER_BYTES) -> None:
        # Half of the time is for the connection: a call that fails there was certainly not sent.
        self._timeout = aiohttp.ClientTimeout(
            total=timeout_s, connect=timeout_s / 2, sock_connect=timeout_s / 2
        )
        self._answer_bytes = answer_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(limit=0)  # the carrier limits the calls at a time

    async def _post(
        self, url: str | URL, body: bytes, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Raise TemporaryError if the request was not sent, SendUnknown if no answer came.

        Errors name only the host, because the rest of a URL may be a secret. They have no cause
        for the same reason: aiohttp's own errors show URLs.
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
            raise FinalError(f"{place(url)}: that is not a valid URL") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SendUnknown(f"{place(url)}: {said(error, url)}") from None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                timeout=self._timeout,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a small answer may decompress into a large one
            )
        return self._session


def place(url: str | URL) -> str:
    """Return the URL as a log may show it: without everything after the host."""
    parts = urlsplit(str(url))
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def said(error: BaseException, url: str | URL) -> str:
    """Return the error as text that shows nothing of the URL.

    Libraries put the URL into their errors in ways that change with the version.
    """
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in time"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    # The text of a ClientResponseError contains the URL; its message does not.
    text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    if "://" in text or any(word in text for word in _private_words(str(url))):
        text = ""
    return shown(text) or type(error).__name__


def _private_words(url: str) -> list[str]:
    """Return the parts of a URL that may be secrets, the longest first."""
    parts = urlsplit(url)
    behind = url.partition("://")[2][len(parts.netloc) :]
    user = parts.netloc.rpartition("@")[0]
    found = {*_WORD.findall(user + behind), *_WORD.findall(unquote(user + behind))}
    return sorted(found, key=len, reverse=True)


class ChatChannel(HttpChannel):
    """A channel to a chat service: with a bot's token, with webhooks, or with both.

    URLs of webhooks are secrets: anyone who knows one may post. The recipient is the name of a
    configured one, or a URL that begins with one of `hooks_urls`. Other URLs are refused, so that
    replies cannot be used to reach other places.
    """

    service: str
    """The name of the service in errors."""

    def __init__(
        self,
        token: str,
        base_url: str,
        *,
        name: str,
        timeout_s: float,
        merge: bool,
        webhooks: Mapping[str, str] | None = None,
        hooks_urls: Sequence[str] = (),
    ) -> None:
        super().__init__(timeout_s=timeout_s, answer_bytes=CHAT_ANSWER_BYTES)
        self.name = name
        self.merges = merge
        self._token = Secret(token)
        self._hooks = {hook: Secret(url) for hook, url in (webhooks or {}).items()}
        self._hooks_urls = tuple(url.rstrip("/") + "/" for url in hooks_urls)
        self._base_url = base_url.rstrip("/")

    def parts(self, reply: Outbound) -> Sequence[Outbound]:
        try:
            return self._split(reply)
        except FinalError:
            return [reply]  # refused when it is sent

    @abstractmethod
    def _split(self, reply: Outbound) -> Sequence[Outbound]:
        """Return the parts of a reply, the same ones for every attempt. Raises FinalError for
        options that the service does not have."""

    def merged(self, replies: Sequence[Outbound]) -> Outbound | None:
        return joined(replies, self.parts)

    def _hook_url(self, recipient: str) -> str | None:
        """Return None if it is not a webhook. Raises FinalError for a URL of another place."""
        named = self._hooks.get(recipient)
        if named is not None:
            return named.reveal()
        if "://" not in recipient:
            return None
        if not recipient.startswith(self._hooks_urls):
            allowed = " or ".join(self._hooks_urls)
            raise FinalError(f"the recipient is a URL that does not begin with {allowed}")
        return recipient

    def _hook_key(self, recipient: str) -> str | None:
        """Return the name of this webhook in limits, the same in every process, or None if it is
        not a webhook."""
        named = self._hooks.get(recipient)
        if named is None and "://" not in recipient:
            return None
        url = recipient if named is None else named.reveal()
        return hashlib.sha256(url.encode()).hexdigest()[:16]

    def _need_token(self, reply: Outbound) -> None:
        if not self._token:
            raise FinalError(
                f"{self.service}: {reply.recipient!r:.60} is not the name of a webhook, and no bot"
                " token is configured"
            )

    def _said(self, answer: Answer, decode: Callable[[bytes], T]) -> T:
        """Return what the service said. Raises if the answer does not have the service's form."""
        try:
            return decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self._not_theirs(answer) from None

    def _not_theirs(self, answer: Answer) -> Exception:
        return not_theirs(self.service, answer.status, answer.headers, answer.text)


async def _beginning(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the first bytes of an answer. One that never ends is an answer, too."""
    content = answer.content
    if content.is_eof() and content.total_bytes <= limit:  # most answers have arrived completely
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
        pass  # the status decides, and it has arrived
    finally:
        if not answer.content.at_eof():
            answer.close()
    return found
