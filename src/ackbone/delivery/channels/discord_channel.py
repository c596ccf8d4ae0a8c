"""The Discord channel: webhooks, and a bot's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from ackbone.core.errors import FinalError, RateLimited, TemporaryError
from ackbone.core.outbound.delivery import Limit, Outbound

from .http_answers import TOO_MANY, retry_after_s, shown
from .http_channel import TIMEOUT_S, Answer, ChatChannel
from .reply_text import MARK, key_short, marked, options_of, split_fenced, text_parts

BASE_URL = "https://discord.com/api/v10"
HOOKS_URLS = ("https://discord.com/api", "https://discordapp.com/api")
TEXT_LIMIT = 2000
PER_BOT = (50, 1.0)
PER_PLACE = (5, 5.0)
"""Limit of one channel or one webhook."""
_SILENT = 1 << 12
_REACHES_FURTHER = ("```", ">>>")
"""Markup that may continue after the end of a text, into the next one."""
_encode = msgspec.json.Encoder().encode


class Options(msgspec.Struct, frozen=True, omit_defaults=True):
    """The options of a reply."""

    thread: str | None = None
    embeds: Sequence[dict[str, Any]] = ()
    components: Sequence[dict[str, Any]] = ()
    allowed_mentions: dict[str, Any] | None = None
    """None: mentions in the text notify nobody."""
    reply_to: str | None = None
    silent: bool = False
    username: str | None = None
    avatar_url: str | None = None
    """`username` and `avatar_url` are for webhooks only."""


class _Said(msgspec.Struct, frozen=True):
    id: str = ""
    message: str = ""
    code: int = 0
    retry_after: float | None = None
    is_global: bool = msgspec.field(default=False, name="global")


_decode = msgspec.json.Decoder(_Said, strict=False).decode


class DiscordChannel(ChatChannel):
    """The recipient is a channel's id (for the bot), a webhook's name, or its URL.

    The bot's messages carry a key by which Discord recognises a repeat for some minutes. Repeats
    are marked as well.
    """

    service = "Discord"

    def __init__(
        self,
        token: str = "",
        *,
        webhooks: Mapping[str, str] | None = None,
        name: str = "discord",
        base_url: str = BASE_URL,
        hooks_urls: Sequence[str] = HOOKS_URLS,
        timeout_s: float = TIMEOUT_S,
        merge: bool = False,
    ) -> None:
        """`token`: the bot's. `webhooks`: URLs by the names that replies use. `merge`: texts that
        wait for one place are sent as one message, if they fit."""
        super().__init__(
            token,
            base_url,
            name=name,
            timeout_s=timeout_s,
            merge=merge,
            webhooks=webhooks,
            hooks_urls=hooks_urls,
        )

    def _split(self, reply: Outbound) -> Sequence[Outbound]:
        options = options_of(reply, Options, self.service)
        texts = split_fenced(reply.content, TEXT_LIMIT - len(MARK))
        last_only = ["embeds", "components"]
        return text_parts(reply, texts, options, first_only=["reply_to"], last_only=last_only)

    def merged(self, replies: Sequence[Outbound]) -> Outbound | None:
        if any(mark in reply.content for reply in replies for mark in _REACHES_FURTHER):
            return None
        return super().merged(replies)

    def limits(self, reply: Outbound) -> Sequence[Limit]:
        """Return Discord's limits: for the bot, and for each channel or webhook."""
        hook = self._hook_key(reply.recipient)
        if hook is not None:
            return (Limit(f"{self.name}:webhook:{hook}", *PER_PLACE),)
        return (
            Limit(f"{self.name}:bot", *PER_BOT, whole_channel=True),
            Limit(f"{self.name}:channel:{reply.recipient}", *PER_PLACE),
        )

    async def send(self, reply: Outbound) -> str:
        """Return the message's id."""
        options = options_of(reply, Options, self.service)
        url = self._hook_url(reply.recipient)
        if url is not None:
            body = _encode(_hook_message(marked(reply), options))
            return self._receipt(await self._post(_waiting(url, options.thread), body), bot=False)
        self._need_token(reply)
        place = options.thread or reply.recipient
        if not place.isdecimal():
            raise FinalError(f"Discord: a channel is a number, not {place!r:.60}")
        # Discord remembers the key for some minutes only, and not at all if the reply was merged
        # into another one. While it does, the first copy stays, and the mark is not seen.
        reply = marked(reply)
        headers = {"authorization": f"Bot {self._token.reveal()}"}
        answer = await self._post(
            f"{self._base_url}/channels/{place}/messages",
            _encode(_bot_message(reply, options)),
            headers,
        )
        return self._receipt(answer, bot=True)

    def _receipt(self, answer: Answer, *, bot: bool) -> str:
        """Return the message's id; otherwise raise the error that decides what happens next."""
        said = self._said(answer, _decode)
        if 200 <= answer.status < 300 and said.id:
            return said.id
        why = f"Discord: HTTP {answer.status}: {shown(said.message)} ({said.code})"
        if answer.status == TOO_MANY:
            wait_s = retry_after_s(answer.headers) if said.retry_after is None else said.retry_after
            raise RateLimited(
                why + (", for all of the bot" if said.is_global else ""),
                retry_after_s=wait_s,
                whole_channel=said.is_global,
            )
        if bot and answer.status == 401:
            raise TemporaryError(f"{why}: the bot's token is refused; give the channel a valid one")
        if 400 <= answer.status < 500:
            raise FinalError(why)
        if answer.status >= 500 and said.message:
            raise TemporaryError(why, retry_after_s=retry_after_s(answer.headers))
        raise self._not_theirs(answer)


def _message(reply: Outbound, options: Options) -> dict[str, Any]:
    message: dict[str, Any] = {
        "content": reply.content,
        "allowed_mentions": options.allowed_mentions or {"parse": []},
    }
    if options.embeds:
        message["embeds"] = options.embeds
    if options.components:
        message["components"] = options.components
    if options.silent:
        message["flags"] = _SILENT
    return message


def _bot_message(reply: Outbound, options: Options) -> dict[str, Any]:
    message = {**_message(reply, options), "nonce": key_short(reply), "enforce_nonce": True}
    if options.reply_to is not None:
        # The reply is sent even if the message that it answers was deleted.
        reference = {"message_id": options.reply_to, "fail_if_not_exists": False}
        message["message_reference"] = reference
    return message


def _hook_message(reply: Outbound, options: Options) -> dict[str, Any]:
    message = _message(reply, options)
    if options.username is not None:
        message["username"] = options.username
    if options.avatar_url is not None:
        message["avatar_url"] = options.avatar_url
    return message


def _waiting(url: str, thread: str | None) -> str:
    """Return the webhook's URL with `wait`, so that Discord answers with the message. Other
    parameters stay: the URL may name a thread."""
    if thread is not None and not thread.isdecimal():
        raise FinalError(f"Discord: a thread is a number, not {thread!r:.60}")
    ours = {"wait": "true"} if thread is None else {"wait": "true", "thread_id": thread}
    parts = urlsplit(url)
    query = urlencode({**ours, **dict(parse_qsl(parts.query)), **ours})
    return urlunsplit(parts._replace(query=query, fragment=""))
