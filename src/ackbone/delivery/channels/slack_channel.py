"""The Slack channel: incoming webhooks of an app, and a bot's messages through the Web API."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlencode

import msgspec

from ackbone.core.errors import FinalError, RateLimited, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Limit, Outbound

from .http_answers import TOO_MANY, check_answer, retry_after_s, shown
from .http_channel import TIMEOUT_S, Answer, ChatChannel
from .reply_text import (
    MARK,
    key_uuid,
    marked,
    options_of,
    split,
    split_fenced,
    text_parts,
    utf16_length,
)

log = logging.getLogger("ackbone.delivery")

BASE_URL = "https://slack.com/api"
HOOKS_URL = "https://hooks.slack.com"
TEXT_LIMIT = 4000
"""Slack cuts texts at 40,000, and recommends 4,000."""
MOST_BLOCKS = 50
"""Slack accepts no more. A mark must not push a message over the limit."""
PER_CHANNEL = (1, 1.0)
_LATER = frozenset({"service_unavailable", "request_timeout", "team_added_to_org"})
_IN_DOUBT = frozenset({"internal_error", "fatal_error"})
"""Slack documents that the message may have been posted before these errors."""
_OPERATOR = frozenset(
    {
        "account_inactive", "invalid_auth", "missing_scope", "no_permission",
        "not_allowed_token_type", "not_authed", "org_login_required", "token_expired",
        "token_revoked",
    }
)  # fmt: skip
"""The bot is configured wrongly. Replies wait until an operator has fixed it."""
_JSON = "application/json; charset=utf-8"
_FORM = "application/x-www-form-urlencoded"
_encode = msgspec.json.Encoder().encode


class Options(msgspec.Struct, frozen=True, omit_defaults=True):
    """The options of a reply."""

    format: Literal["plain", "markdown"] = "plain"
    """`markdown` is Slack's own, which it calls mrkdwn."""
    thread_ts: str | None = None
    blocks: Sequence[dict[str, Any]] = ()
    attachments: Sequence[dict[str, Any]] = ()


class _Said(msgspec.Struct, frozen=True):
    ok: bool
    error: str = ""
    ts: str = ""


_decode = msgspec.json.Decoder(_Said).decode


class SlackChannel(ChatChannel):
    """The recipient is a channel's or person's id (for the bot), a webhook's name, or its URL.

    The bot's messages carry a key by which Slack recognises a repeat. Slack's reference mentions
    the key only among the errors, so repeats are marked as well. Where the key works, the first
    copy stays, and the mark is not seen.

    With `reconcile`, Slack's history is searched first: a reply that is in it is not sent again.
    """

    service = "Slack"

    def __init__(
        self,
        token: str = "",
        *,
        webhooks: Mapping[str, str] | None = None,
        name: str = "slack",
        base_url: str = BASE_URL,
        hooks_url: str = HOOKS_URL,
        timeout_s: float = TIMEOUT_S,
        merge: bool = False,
        reconcile: bool = False,
    ) -> None:
        """`token`: the bot's (`xoxb-…`). `webhooks`: URLs by the names that replies use. `merge`:
        plain texts that wait for one place are sent as one message, if they fit. `reconcile`:
        search the history for a reply that may have arrived; the bot needs the scopes for that."""
        if merge and reconcile:
            raise ValueError(
                "merge and reconcile exclude each other: a text that was sent in another's message"
                " cannot be found by its own key"
            )
        super().__init__(
            token,
            base_url,
            name=name,
            timeout_s=timeout_s,
            merge=merge,
            webhooks=webhooks,
            hooks_urls=[hooks_url],
        )
        self.reconciles = reconcile

    def _split(self, reply: Outbound) -> Sequence[Outbound]:
        options = options_of(reply, Options, self.service)
        if options.blocks:  # people see the blocks; the text is only in notifications
            return [reply]
        room = TEXT_LIMIT - len(MARK)
        if options.format == "markdown":
            texts = split_fenced(reply.content, room)
        else:
            texts = split(reply.content, room, length=_escaped_length)
        return text_parts(reply, texts, options, last_only=["attachments"])

    def limits(self, reply: Outbound) -> Sequence[Limit]:
        """Return Slack's limit: one message per second and channel."""
        hook = self._hook_key(reply.recipient)
        place = f"webhook:{hook}" if hook is not None else f"channel:{reply.recipient}"
        return (Limit(f"{self.name}:{place}", *PER_CHANNEL),)

    async def send(self, reply: Outbound) -> str | None:
        """Return the message's `ts`; a webhook gives none."""
        options = options_of(reply, Options, self.service)
        reply = marked(reply)
        url = self._hook_url(reply.recipient)
        if url is not None:
            _check_hook(await self._post(url, _encode(_message(reply, options))))
            return None
        self._need_token(reply)
        message = {
            "channel": reply.recipient,
            "client_msg_id": key_uuid(reply),
            **_message(reply, options),
        }
        if self.reconciles:
            # People do not see the metadata. The history has it.
            message["metadata"] = {"event_type": EVENT, "event_payload": {"key": key_uuid(reply)}}
        return self._receipt(await self._call("chat.postMessage", _encode(message), _JSON))

    async def arrived(self, reply: Outbound) -> bool | None:
        """Search the messages since the reply was made. Returns None where there is no history to
        search: for a webhook, a person's id, or a bot without the scopes."""
        options = options_of(reply, Options, self.service)
        if not self._token or not reply.made_us or self._hook_url(reply.recipient) is not None:
            return None
        key, cursor = key_uuid(reply), ""
        for _ in range(PAGES):
            method, asked = _question(reply, options.thread_ts, cursor)
            try:
                page = _page_of(await self._call(method, asked, _FORM))
            except SendUnknown as error:  # this call only reads: no message is in doubt
                raise TemporaryError(str(error), retry_after_s=error.retry_after_s) from None
            if not page.ok:
                log.warning(
                    "[delivery] Slack does not say whether %s arrived (%s); its bot needs"
                    " channels:history, groups:history or im:history, and to be in the channel",
                    reply.id[:8],
                    shown(page.error),
                )
                return None
            if page.has(key):
                return True
            cursor = page.next_cursor
            if not cursor:
                return None if page.has_more else False
        return None

    async def _call(self, method: str, body: bytes, kind: str) -> Answer:
        headers = {"authorization": f"Bearer {self._token.reveal()}", "content-type": kind}
        return await self._post(f"{self._base_url}/{method}", body, headers)

    def _receipt(self, answer: Answer) -> str:
        """Return the message's `ts`; otherwise raise the error that decides what happens next."""
        wait_s = retry_after_s(answer.headers)
        if answer.status == TOO_MANY:
            raise RateLimited("Slack: HTTP 429", retry_after_s=wait_s)
        said = self._said(answer, _decode)
        if said.ok:
            return said.ts
        why = f"Slack: {shown(said.error)}"
        if said.error in _LIMITED:
            raise RateLimited(why, retry_after_s=wait_s)
        if said.error in _OPERATOR:
            raise TemporaryError(f"{why}: Slack refuses the bot; check its token and its scopes")
        if said.error in _IN_DOUBT:
            raise SendUnknown(why, retry_after_s=wait_s)
        if said.error in _LATER or answer.status >= 500:
            raise TemporaryError(why, retry_after_s=wait_s)
        raise FinalError(why)


def _message(reply: Outbound, options: Options) -> dict[str, Any]:
    plain = options.format == "plain"
    message: dict[str, Any] = {
        "text": _escaped(reply.content) if plain else reply.content,
        "mrkdwn": not plain,
    }
    if options.thread_ts is not None:
        message["thread_ts"] = options.thread_ts
    if options.blocks:
        message["blocks"] = _marked_blocks(reply, options.blocks)
    if options.attachments:
        message["attachments"] = options.attachments
    return message


def _marked_blocks(reply: Outbound, blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks with the mark of a repeat: people see the blocks instead of the text."""
    if not reply.in_doubt or len(blocks) >= MOST_BLOCKS:
        return list(blocks)
    mark = {"type": "plain_text", "text": MARK.strip()}
    return [{"type": "context", "elements": [mark]}, *blocks]


def _escaped(text: str) -> str:
    """Escape the three characters that Slack interprets even in plain text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _escaped_length(text: str) -> int:
    return utf16_length(_escaped(text))


def _check_hook(answer: Answer) -> None:
    check_answer(answer.status, answer.headers, f"Slack: {answer.text}")
    if answer.text != "ok":
        raise SendUnknown(f"Slack: its webhooks answer ok, but this one answered: {answer.text}")


# -- the history -----------------------------------------------------------------------------------

EVENT = "ackbone_reply"
PAGE, PAGES = 100, 10
"""Messages per page, and the largest number of pages. A longer history gives no answer."""
CLOCKS_S = 600.0
"""Largest difference between Slack's clock and ours, in seconds."""
_LIMITED = frozenset({"ratelimited", "rate_limited"})


class _Metadata(msgspec.Struct, frozen=True):
    event_type: str = ""
    event_payload: dict[str, Any] = {}


class _Posted(msgspec.Struct, frozen=True):
    metadata: _Metadata | None = None


class _Next(msgspec.Struct, frozen=True):
    next_cursor: str = ""


class _Page(msgspec.Struct, frozen=True):
    """One page of the history, or the error instead of it."""

    ok: bool
    error: str = ""
    messages: Sequence[_Posted] = ()
    has_more: bool = False
    response_metadata: _Next | None = None

    @property
    def next_cursor(self) -> str:
        return "" if self.response_metadata is None else self.response_metadata.next_cursor

    def has(self, key: str) -> bool:
        found = (each.metadata for each in self.messages if each.metadata is not None)
        return any(m.event_type == EVENT and m.event_payload.get("key") == key for m in found)


_decode_page = msgspec.json.Decoder(_Page).decode


def _question(reply: Outbound, thread_ts: str | None, cursor: str) -> tuple[str, bytes]:
    """Return the method and its arguments for the messages since the reply was made. The history
    of a channel has its top-level messages, that of a thread the answers in it."""
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


def _page_of(answer: Answer) -> _Page:
    """Return a page of the history. Raises RateLimited or TemporaryError if it is worth asking
    later."""
    wait_s = retry_after_s(answer.headers)
    if answer.status == TOO_MANY:
        raise RateLimited("Slack: HTTP 429 for its history", retry_after_s=wait_s)
    if answer.status >= 500:
        raise TemporaryError(f"Slack: HTTP {answer.status} for its history", retry_after_s=wait_s)
    try:
        page = _decode_page(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Page(ok=False, error=f"HTTP {answer.status}, and no history")
    if page.error in _LIMITED:
        raise RateLimited(f"Slack: {shown(page.error)} for its history", retry_after_s=wait_s)
    return page
