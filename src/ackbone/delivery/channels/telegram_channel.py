"""The Telegram channel: a bot's messages through the Bot API."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ackbone.core.errors import (
    ConfigError,
    FinalError,
    RateLimited,
    SendUnknown,
    TemporaryError,
)
from ackbone.core.outbound.delivery import Limit, Outbound
from ackbone.core.secret import Secret

from .http_answers import IN_DOUBT, TOO_MANY, not_theirs, shown
from .http_channel import TIMEOUT_S, Answer, HttpChannel
from .reply_text import joined, marked
from .telegram_calls import Call, call_for, parts_of, telegram_options, without_markup

log = logging.getLogger("ackbone.delivery")

BASE_URL = "https://api.telegram.org"
ANSWER_BYTES = 1_000_000
"""An answer contains the message with all its media."""
PER_BOT = (30, 1.0)
PER_CHAT = (1, 1.0)
PER_GROUP = (20, 60.0)
_TOKEN = re.compile(r"(\d+):[\w-]+", re.ASCII)
_encode = msgspec.json.Encoder().encode


class _Parameters(msgspec.Struct, frozen=True):
    retry_after: float | None = None
    migrate_to_chat_id: int | None = None


class _Said(msgspec.Struct, frozen=True):
    ok: bool
    result: Any = None
    error_code: int = 0
    description: str = ""
    parameters: _Parameters = _Parameters()


_decode = msgspec.json.Decoder(_Said).decode


class TelegramChannel(HttpChannel):
    """Sends replies to chats; the recipient is a chat's number or a channel's `@name`.

    Telegram has no idempotency keys, so a repeat of a reply that may have arrived is marked.
    """

    def __init__(
        self,
        token: str,
        *,
        name: str = "telegram",
        base_url: str = BASE_URL,
        timeout_s: float = TIMEOUT_S,
        merge: bool = False,
    ) -> None:
        """`base_url`: your own Bot API server. `merge`: plain texts that wait for one chat are sent
        as one message, if they fit. Raises ConfigError for an invalid token."""
        super().__init__(timeout_s=timeout_s, answer_bytes=ANSWER_BYTES)
        found = _TOKEN.fullmatch(token)
        if found is None:
            raise ConfigError([f"{name}: the token is not that of a Telegram bot (123456:ABC…)"])
        self.name = name
        self.merges = merge
        self._bot = found[1]
        self._token = Secret(token)
        self._base_url = base_url.rstrip("/")

    def parts(self, reply: Outbound) -> Sequence[Outbound]:
        return parts_of(reply)

    def merged(self, replies: Sequence[Outbound]) -> Outbound | None:
        return joined(replies, self.parts)

    def limits(self, reply: Outbound) -> Sequence[Limit]:
        """Return Telegram's limits: for the bot, for each chat, and for groups and channels."""
        chat = reply.recipient.strip()
        of_all = (
            Limit(f"telegram:{self._bot}", *PER_BOT, whole_channel=True),
            Limit(f"telegram:{self._bot}:chat:{chat}", *PER_CHAT),
        )
        if not chat.startswith(("-", "@")):
            return of_all
        return (*of_all, Limit(f"telegram:{self._bot}:group:{chat}", *PER_GROUP))

    async def send(self, reply: Outbound) -> str:
        """Return the number of the message; for an album, all numbers with commas."""
        if telegram_options(reply).edit is None:  # the same edit twice changes nothing
            reply = marked(reply)
        call = call_for(reply)
        said = await self._call(call)
        if not said.ok and "can't parse entities" in said.description:
            plain = without_markup(call)
            if plain is not None:
                call, said = plain, await self._call(plain)
        moved_to = said.parameters.migrate_to_chat_id
        if not said.ok and moved_to is not None:
            log.warning(
                "Telegram: group %s is now %d; use the new number", reply.recipient, moved_to
            )
            said = await self._call(Call(call.method, {**call.arguments, "chat_id": moved_to}))
        if not said.ok and "message is not modified" in said.description:
            return str(call.arguments.get("message_id", ""))
        _check(said)
        return _receipt(said.result)

    async def _call(self, call: Call) -> _Said:
        url = f"{self._base_url}/bot{self._token.reveal()}/{call.method}"
        return _read(await self._post(url, _encode(call.arguments)))


def _read(answer: Answer) -> _Said:
    try:
        return _decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise not_theirs("Telegram", answer.status, answer.headers, answer.text) from None


def _check(said: _Said) -> None:
    """Return if the message arrived; otherwise raise the error that decides what happens next."""
    if said.ok:
        return
    code, why = said.error_code, f"Telegram: {shown(said.description)}"
    if code == TOO_MANY:
        raise RateLimited(why, retry_after_s=said.parameters.retry_after)
    if code == 401 or (code == 404 and said.description == "Not Found"):
        # An unknown chat is a 400. This answer means that Telegram does not know the bot.
        raise TemporaryError(f"{why}: the bot's token is refused; give the channel a valid one")
    if 400 <= code < 500:
        raise FinalError(why)
    if code in IN_DOUBT:
        # The Bot API itself has no such code: its gateway gives this answer.
        raise SendUnknown(why)
    raise TemporaryError(why)


def _receipt(result: Any) -> str:
    messages = result if isinstance(result, list) else [result]
    numbers = [message.get("message_id") for message in messages if isinstance(message, dict)]
    return ",".join(str(number) for number in numbers if number is not None)
