"""The Apprise channel: a hundred other services, by the library of that name."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import apprise
import msgspec

from ackbone.core.delivery import Outbound
from ackbone.core.errors import ConfigError, FinalError, SendUnknown, TemporaryError
from ackbone.core.secret import Secret

from .answers import IN_DOUBT
from .repeats import marked
from .splitting import doubt_placed

TIMEOUT_S = 60.0
THREADS = 4
_STATUS = re.compile(r"\berror=(\d{3})\b", re.ASCII)
"""In every plugin's words for an answer that is a no."""


class Options(msgspec.Struct, frozen=True):
    """What a reply may ask for."""

    title: str = ""
    type: Literal["info", "success", "warning", "failure"] = "info"
    format: Literal["text", "markdown", "html"] = "text"


class AppriseChannel:
    """The recipient is a tag, which stands for URLs of Apprise's, or such a URL.

    The library is a synchronous one: it runs in threads, and what takes too long is not stopped;
    it is only not waited for. It knows no keys: a reply that may have arrived says so. It says yes
    or no and no more: a no is a doubt, unless its log names the answer that it got.
    """

    def __init__(
        self,
        tags: Mapping[str, Sequence[str]] | None = None,
        *,
        urls: bool = True,
        name: str = "apprise",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`urls`: replies may name URLs themselves; not for recipients that strangers choose."""
        self.name = name
        self._urls = urls
        self._timeout_s = timeout_s
        self._tags = {tag: [Secret(url) for url in found] for tag, found in (tags or {}).items()}
        empty = [tag for tag, found in self._tags.items() if not found]
        if empty:
            raise ConfigError([f"{name}: the tag {tag!r:.60} has no URL" for tag in empty])
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ackbone-apprise")

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def parts(self, reply: Outbound) -> Sequence[Outbound]:
        """One for each URL: what one service took does not go there again."""
        try:
            urls = self._urls_of(reply.recipient)
        except FinalError:
            return [reply]  # refused when it is sent
        return doubt_placed(reply, [reply for _ in urls])

    async def send(self, reply: Outbound) -> None:
        """Returns when the service that is next, of those of the recipient, has taken it."""
        try:
            options = msgspec.convert(dict(reply.options), Options, strict=False)
        except msgspec.ValidationError as error:
            raise FinalError(f"options for Apprise: {error}") from None
        url = self._urls_of(reply.recipient)[len(reply.receipts)]
        text = marked(reply).content
        if not text.strip():
            raise FinalError("Apprise: there is no text to send")
        call = self._threads.submit(_notify, url, text, options)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wrap_future(call)
        except TimeoutError:
            late = f"Apprise: no end after {self._timeout_s:g} s"
            if call.cancelled():
                raise TemporaryError(f"{late}: it never began, others took too long") from None
            raise SendUnknown(late) from None

    def _urls_of(self, recipient: str) -> Sequence[Secret]:
        tagged = self._tags.get(recipient)
        if tagged is not None:
            return tagged
        if not self._urls:
            raise FinalError("Apprise: the recipient is no tag, and URLs are not allowed here")
        if "://" not in recipient:
            raise FinalError(f"Apprise: the recipient {recipient!r:.60} is neither tag nor URL")
        return [Secret(recipient)]


class _Heard(logging.Handler):
    """What one service tells its log of a call that failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: list[int | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        status = _STATUS.search(record.getMessage())
        self._found.append(int(status[1]) if status else None)

    @property
    def refused(self) -> bool:
        """Answers came, and nothing else: each of them a no that leaves no doubt."""
        return bool(self._found) and not any(
            status is None or status in IN_DOUBT for status in self._found
        )


def _notify(url: Secret, text: str, options: Options) -> None:
    """In a thread. The URL is shown by its scheme alone: the rest is secrets."""
    service = apprise.Apprise.instantiate(url.reveal())
    notifier = apprise.Apprise()
    if service is None or not notifier.add(service):
        raise FinalError(f"Apprise: there is no such URL: {_scheme(url)}://…")
    heard = _Heard()
    service.logger = _log_of_one_call(heard)
    done = notifier.notify(
        body=text,
        title=options.title,
        notify_type=options.type,
        body_format=options.format,
    )
    if done:
        return
    why = f"Apprise: not taken by ({_scheme(url)})"
    # One URL may name several places, of which some may have taken it.
    if heard.refused and len(service) == 1:
        raise TemporaryError(f"{why}; the log of `apprise` says why")
    raise SendUnknown(f"{why}, as far as is known; the log of `apprise` says why")


def _log_of_one_call(heard: logging.Handler) -> logging.Logger:
    """Says all that it is told to the library's own log, too; nobody else can get at it."""
    log = logging.Logger("apprise")  # noqa: LOG001 - one of its own, in no register
    log.parent = logging.getLogger("apprise")
    log.addHandler(heard)
    return log


def _scheme(url: Secret) -> str:
    return url.reveal().partition("://")[0][:40]
