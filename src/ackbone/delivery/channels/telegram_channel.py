"""The Telegram channel: a bot's messages through the Bot API."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec

from ackbone.core.errors import ConfigError, FinalError, RateLimited, SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Limit, Outbound

from .http_answers import IN_DOUBT, TOO_MANY, shown
from .http_channel import TIMEOUT_S, ChatChannel
from .reply_text import (
    MARK,
    doubt_placed,
    marked,
    options_of,
    readable,
    split,
    split_fenced,
    utf16_length,
)

log = logging.getLogger("ackbone.delivery")

BASE_URL = "https://api.telegram.org"
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


class TelegramChannel(ChatChannel):
    """Sends replies to chats; the recipient is a chat's number or a channel's `@name`.

    Telegram has no idempotency keys, so a repeat of a reply that may have arrived is marked.
    """

    service = "Telegram"

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
        super().__init__(token, base_url, name=name, timeout_s=timeout_s, merge=merge)
        found = _TOKEN.fullmatch(token)
        if found is None:
            raise ConfigError([f"{name}: the token is not that of a Telegram bot (123456:ABC…)"])
        self._bot = found[1]

    def _split(self, reply: Outbound) -> Sequence[Outbound]:
        options = telegram_options(reply)
        albums = _albums(options, has_text=bool(reply.content.strip()))
        first_caption = ""
        text = reply.content
        if _fits_as_caption(text, options, albums):
            first_caption, text = text, ""
        pieces: list[tuple[str, Sequence[Media]]] = [
            (first_caption if place == 0 else "", album) for place, album in enumerate(albums)
        ]
        if text.strip() or not pieces:
            room = TEXT_LIMIT - len(MARK)
            cut = split_fenced if options.format == "markdown" else split
            pieces += [(piece, ()) for piece in readable(cut(text, room))]
        last = len(pieces) - 1
        parts = []
        for place, (content, album) in enumerate(pieces):
            own = msgspec.structs.replace(
                options,
                media=album,
                edit=options.edit if place == 0 else None,
                reply_to=options.reply_to if place == 0 else None,
                buttons=options.buttons if place == last else (),
            )
            part_options = msgspec.to_builtins(own)
            parts.append(msgspec.structs.replace(reply, content=content, options=part_options))
        return doubt_placed(reply, parts)

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
        return self._said(await self._post(url, _encode(call.arguments)), _decode)


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


TEXT_LIMIT = 4096
CAPTION_LIMIT = 1024
ALBUM = 10
"""Largest number of media in one message."""
_METHODS = {
    "photo": "sendPhoto",
    "video": "sendVideo",
    "document": "sendDocument",
    "audio": "sendAudio",
}


class Button(msgspec.Struct, frozen=True):
    """A button below a message: it sends `data` to the bot, or opens `url`."""

    text: str
    data: str | None = None
    url: str | None = None


class Media(msgspec.Struct, frozen=True):
    """A file that Telegram fetches from `url`, or already has (`file_id`)."""

    type: Literal["photo", "video", "document", "audio"]
    url: str | None = None
    file_id: str | None = None
    caption: str = ""


class Options(msgspec.Struct, frozen=True, omit_defaults=True):
    """The options of a reply."""

    format: Literal["plain", "markdown"] = "plain"
    buttons: Sequence[Sequence[Button]] = ()
    media: Sequence[Media] = ()
    edit: int | None = None
    """The message to change, instead of sending a new one."""
    reply_to: int | None = None
    silent: bool = False


class Call(msgspec.Struct, frozen=True):
    """A method of the Bot API and its arguments."""

    method: str
    arguments: dict[str, Any]


def telegram_options(reply: Outbound) -> Options:
    """Return the options of a reply. Raises FinalError for any that Telegram does not have."""
    found = options_of(reply, Options, "Telegram")
    for button in (button for row in found.buttons for button in row):
        if (button.data is None) == (button.url is None):
            raise FinalError(f"options for Telegram: button {button.text!r:.40}: data or url")
    if found.edit is not None and found.media:
        raise FinalError("options for Telegram: edit changes texts only, not media")
    for item in found.media:
        if (item.url is None) == (item.file_id is None):
            raise FinalError(f"options for Telegram: a {item.type}: url or file_id")
    return found


# -- parts ----------------------------------------------------------------------------------------


def _albums(options: Options, *, has_text: bool) -> list[Sequence[Media]]:
    """Return the media in groups of at most ten. Telegram does not mix pictures and videos with
    documents, nor documents with audio."""
    found: list[Sequence[Media]] = []
    for _, run in groupby(options.media, key=_family):
        items = list(run)
        found += [items[at : at + ALBUM] for at in range(0, len(items), ALBUM)]
    if found and options.buttons and not has_text and len(found[-1]) > 1:
        # An album cannot have buttons, so the last item goes alone and carries them.
        album = found.pop()
        found += [album[:-1], album[-1:]]
    return found


def _family(item: Media) -> str:
    return item.type if item.type in ("document", "audio") else "pictures"


def _fits_as_caption(text: str, options: Options, albums: Sequence[Sequence[Media]]) -> bool:
    if not albums or albums[0][0].caption or not text.strip():
        return False
    carries_buttons = bool(options.buttons) and (len(albums) > 1 or len(albums[0]) > 1)
    return not carries_buttons and utf16_length(text) <= CAPTION_LIMIT - len(MARK)


# -- calls ----------------------------------------------------------------------------------------


def call_for(reply: Outbound) -> Call:
    """Return the call that sends one part. Raises FinalError if its options are wrong."""
    options = telegram_options(reply)
    common: dict[str, Any] = {"chat_id": chat_id(reply.recipient)}
    if options.edit is None:
        if options.silent:
            common["disable_notification"] = True
        if options.reply_to is not None:
            common["reply_parameters"] = {
                "message_id": options.reply_to,
                "allow_sending_without_reply": True,  # a deleted question still gets its answer
            }
    if options.buttons:
        common["reply_markup"] = {"inline_keyboard": _keyboard(options.buttons)}
    mode = {"parse_mode": "Markdown"} if options.format == "markdown" else {}
    if options.edit is not None:
        text = {"message_id": options.edit, "text": reply.content}
        return Call("editMessageText", {**common, **text, **mode})
    if not options.media:
        return Call("sendMessage", {**common, "text": reply.content, **mode})
    if len(options.media) == 1:
        (item,) = options.media
        caption = _captioned(item, reply.content, mode)
        return Call(_METHODS[item.type], {**common, item.type: item.url or item.file_id, **caption})
    album = [
        {
            "type": item.type,
            "media": item.url or item.file_id,
            **_captioned(item, reply.content if place == 0 else "", mode),
        }
        for place, item in enumerate(options.media)
    ]
    return Call("sendMediaGroup", {**common, "media": album})


def without_markup(call: Call) -> Call | None:
    """Return the same call as plain text; None if it is plain already."""
    arguments = {name: value for name, value in call.arguments.items() if name != "parse_mode"}
    if "media" in arguments:
        arguments["media"] = [
            {name: value for name, value in item.items() if name != "parse_mode"}
            for item in arguments["media"]
        ]
    return None if arguments == call.arguments else Call(call.method, arguments)


def chat_id(recipient: str) -> int | str:
    """Return the number of a person or group, or the name of a channel."""
    text = recipient.strip()
    return int(text) if text.removeprefix("-").isdecimal() else text


def _captioned(item: Media, text: str, mode: dict[str, str]) -> dict[str, str]:
    caption = " ".join(part for part in (text, item.caption) if part)
    if utf16_length(caption) > CAPTION_LIMIT and item.caption:
        caption = item.caption  # leave out a mark that does not fit: the message would be refused
    return {"caption": caption, **mode} if caption else {}


def _keyboard(rows: Sequence[Sequence[Button]]) -> list[list[dict[str, str]]]:
    return [
        [
            {"text": button.text, "url": button.url}
            if button.url is not None
            else {"text": button.text, "callback_data": button.data or ""}
            for button in row
        ]
        for row in rows
    ]
