"""The Apprise channel: many other services, through the library Apprise."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import apprise
import msgspec

from ackbone.core.errors import ConfigError, FinalError, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Outbound
from ackbone.core.secret import Secret

from .http_answers import IN_DOUBT
from .reply_text import doubt_placed, marked, options_of

TIMEOUT_S = 60.0
THREADS = 4
_STATUS = re.compile(r"\berror=(\d{3})\b", re.ASCII)
"""Every plugin of Apprise logs the status of a refusal in this form."""


class Options(msgspec.Struct, frozen=True):
    """The options of a reply."""

    title: str = ""
    type: Literal["info", "success", "warning", "failure"] = "info"
    format: Literal["text", "markdown", "html"] = "text"


class AppriseChannel:
    """The recipient is a configured tag, which names Apprise URLs, or an Apprise URL.

    The library is synchronous and runs in threads. A call that takes too long cannot be stopped;
    the channel only stops waiting for it. There are no idempotency keys, so repeats are marked. The
    library returns only success or failure: after a failure the reply is in doubt, unless the
    library's log names the answer of the service.
    """

    def __init__(
        self,
        tags: Mapping[str, Sequence[str]] | None = None,
        *,
        urls: bool = True,
        name: str = "apprise",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`urls`: recipients may be URLs. Turn it off if recipients come from outside."""
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
        """Return one part for each URL: a service that accepted the reply does not get it again."""
        try:
            urls = self._urls_of(reply.recipient)
        except FinalError:
            return [reply]  # refused when it is sent
        return doubt_placed(reply, [reply for _ in urls])

    async def send(self, reply: Outbound) -> None:
        """Return when the next service of the recipient has accepted the reply."""
        options = options_of(reply, Options, "Apprise")
        url = self._urls_of(reply.recipient)[len(reply.receipts)]
        text = marked(reply).content
        if not text.strip():
            raise FinalError("Apprise: there is no text to send")
        call = self._threads.submit(_notify, url, text, options)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wrap_future(call)
        except TimeoutError:
            late = f"Apprise: no result within {self._timeout_s:g} s"
            if call.cancelled():
                raise TemporaryError(f"{late}: it never began, others took too long") from None
            raise SendUnknown(late) from None

    def _urls_of(self, recipient: str) -> Sequence[Secret]:
        tagged = self._tags.get(recipient)
        if tagged is not None:
            return tagged
        if not self._urls:
            raise FinalError("Apprise: the recipient is not a tag, and URLs are not allowed here")
        if "://" not in recipient:
            raise FinalError(f"Apprise: the recipient {recipient!r:.60} is neither tag nor URL")
        return [Secret(recipient)]


class _Heard(logging.Handler):
    """Collects what the library logs about one failed call."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: list[int | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        status = _STATUS.search(record.getMessage())
        self._found.append(int(status[1]) if status else None)

    @property
    def refused(self) -> bool:
        """True if the library logged only answers, and each of them is a certain refusal."""
        return bool(self._found) and not any(
            status is None or status in IN_DOUBT for status in self._found
        )


def _notify(url: Secret, text: str, options: Options) -> None:
    """Send a text; runs in a thread. Errors show only the scheme of the URL, which has secrets."""
    service = apprise.Apprise.instantiate(url.reveal())
    notifier = apprise.Apprise()
    if service is None or not notifier.add(service):
        raise FinalError(f"Apprise: it does not support this URL: {_scheme(url)}://…")
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
    why = f"Apprise: not accepted by {_scheme(url)}"
    # One URL may name several places, and some of them may have accepted it.
    if heard.refused and len(service) == 1:
        raise TemporaryError(f"{why}; the log of `apprise` says why")
    raise SendUnknown(f"{why}, as far as is known; the log of `apprise` says why")


def _log_of_one_call(heard: logging.Handler) -> logging.Logger:
    """Return a private logger for one call, which passes everything on to the library's log."""
    log = logging.Logger("apprise")  # noqa: LOG001 - private, not registered by its name
    log.parent = logging.getLogger("apprise")
    log.addHandler(heard)
    return log


def _scheme(url: Secret) -> str:
    return url.reveal().partition("://")[0][:40]
