"""Finds a bot's message in Slack's history by the key in its metadata.

People do not see the metadata. The history of a channel has its top-level messages, that of a
thread has the answers in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from ackbone.core.errors import RateLimited, TemporaryError
from ackbone.core.outbound.delivery import Outbound

from .http_answers import TOO_MANY, retry_after_s, shown
from .http_channel import Answer
from .reply_text import key_uuid

EVENT = "ackbone_reply"
PAGE, PAGES = 100, 10
"""Messages per page, and the largest number of pages. A longer history gives no answer."""
CLOCKS_S = 600.0
"""Largest difference between Slack's clock and ours, in seconds."""
LIMITED = frozenset({"ratelimited", "rate_limited"})


class _Metadata(msgspec.Struct, frozen=True):
    event_type: str = ""
    event_payload: dict[str, Any] = {}


class _Message(msgspec.Struct, frozen=True):
    metadata: _Metadata | None = None


class _Next(msgspec.Struct, frozen=True):
    next_cursor: str = ""


class Page(msgspec.Struct, frozen=True):
    """One page of the history, or the error instead of it."""

    ok: bool
    error: str = ""
    messages: Sequence[_Message] = ()
    has_more: bool = False
    response_metadata: _Next | None = None

    @property
    def next_cursor(self) -> str:
        return "" if self.response_metadata is None else self.response_metadata.next_cursor

    def has(self, key: str) -> bool:
        found = (each.metadata for each in self.messages if each.metadata is not None)
        return any(m.event_type == EVENT and m.event_payload.get("key") == key for m in found)


_decode = msgspec.json.Decoder(Page).decode


def metadata(reply: Outbound) -> dict[str, Any]:
    """Return the metadata by which a message is found."""
    return {"event_type": EVENT, "event_payload": {"key": key_uuid(reply)}}


def question(reply: Outbound, thread_ts: str | None, cursor: str) -> tuple[str, bytes]:
    """Return the method and its arguments for the messages since the reply was made."""
    asked = {
        "channel": reply.recipient,
        "oldest": f"{max(0.0, reply.made_us / 1e6 - CLOCKS_S):.6f}",
        "limit": str(PAGE),
        "include_all_metadata": "true",
    }
    if thread_ts is not None:
        asked["ts"] = thread_ts
    if cursor:
        asked["cursor"] = cursor
    method = "conversations.history" if thread_ts is None else "conversations.replies"
    return method, urlencode(asked).encode()


def page_of(answer: Answer) -> Page:
    """Return a page of the history. Raises RateLimited or TemporaryError if it is worth asking
    later."""
    wait_s = retry_after_s(answer.headers)
    if answer.status == TOO_MANY:
        raise RateLimited("Slack: HTTP 429 for its history", retry_after_s=wait_s)
    if answer.status >= 500:
        raise TemporaryError(f"Slack: HTTP {answer.status} for its history", retry_after_s=wait_s)
    try:
        page = _decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Page(ok=False, error=f"HTTP {answer.status}, and no history")
    if page.error in LIMITED:
        raise RateLimited(f"Slack: {shown(page.error)} for its history", retry_after_s=wait_s)
    return page
