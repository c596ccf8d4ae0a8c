"""What Telegram's Bot API takes and refuses: lengths, markup, and how often it may be called."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

TEXT_LIMIT = 4096
CAPTION_LIMIT = 1024
MAX_BUTTON_BYTES = 64
ESCAPED = frozenset("_*`[")
TOKEN = re.compile(r"\d+:[\w-]{3,}", re.ASCII)


class Refused(Exception):
    """An answer that is no yes."""

    def __init__(self, code: int, description: str, **parameters: Any) -> None:
        super().__init__(description)
        self.code = code
        self.description = description
        self.parameters = parameters


@dataclass(frozen=True)
class Window:
    """At most `count` messages in any `per_s` seconds."""

    count: int
    per_s: float


@dataclass
class Windows:
    """Telegram's limits, each exactly as it is written: no bursts."""

    bot: Window = Window(30, 1.0)
    chat: Window = Window(1, 1.0)
    group: Window = Window(20, 60.0)
    _taken: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def take(self, bot: str, chat: str, now_s: float) -> None:
        """Counts one message; raises Refused, and counts nothing, if a window is full."""
        of_chat = self.group if chat.startswith(("-", "@")) else self.chat
        windows = [(f"{bot}", self.bot), (f"{bot}/{chat}", of_chat)]
        for key, window in windows:
            taken = self._taken[key]
            while taken and taken[0] <= now_s - window.per_s:
                taken.popleft()
            if len(taken) >= window.count:
                wait_s = max(1, math.ceil(taken[0] + window.per_s - now_s))
                raise Refused(429, f"Too Many Requests: retry after {wait_s}", retry_after=wait_s)
        for key, _ in windows:
            self._taken[key].append(now_s)


def utf16_units(text: str) -> int:
    return sum(2 if ord(letter) > 0xFFFF else 1 for letter in text)


def plain_text(text: str, mode: str | None) -> str:
    """What people will read. Raises Refused where an entity does not end."""
    if mode is None:
        return text
    if mode != "Markdown":
        raise Refused(400, "Bad Request: unsupported parse_mode")
    found: list[str] = []
    at = 0
    while at < len(text):
        letter = text[at]
        if letter == "\\" and text[at + 1 : at + 2] in ESCAPED and at + 1 < len(text):
            found.append(text[at + 1])
            at += 2
        elif letter in ESCAPED:
            inner, at = _entity(text, at)
            found.append(inner)
        else:
            found.append(letter)
            at += 1
    return "".join(found)


def _entity(text: str, at: int) -> tuple[str, int]:
    if text[at] == "[":
        closing = "]"
    else:
        closing = "```" if text.startswith("```", at) else text[at]
    opening_length = 1 if closing == "]" else len(closing)
    end = text.find(closing, at + opening_length)
    if end < 0:
        offset = len(text[:at].encode())
        raise Refused(
            400,
            "Bad Request: can't parse entities: "
            f"Can't find end of the entity starting at byte offset {offset}",
        )
    inner, after = text[at + opening_length : end], end + len(closing)
    if closing == "]" and text.startswith("(", after):
        after = text.find(")", after) + 1 or len(text)
    return inner, after


def check_text(text: Any, mode: str | None) -> str:
    shown = plain_text(str(text or ""), mode)
    if not shown.strip():
        raise Refused(400, "Bad Request: message text is empty")
    if utf16_units(shown) > TEXT_LIMIT:
        raise Refused(400, "Bad Request: message is too long")
    return shown.strip()


def check_caption(arguments: dict[str, Any]) -> str:
    shown = plain_text(str(arguments.get("caption") or ""), arguments.get("parse_mode"))
    if utf16_units(shown) > CAPTION_LIMIT:
        raise Refused(400, "Bad Request: message caption is too long")
    return shown.strip()


def check_keyboard(markup: Any) -> None:
    if not markup:
        return
    for row in markup["inline_keyboard"]:
        for button in row:
            if not button.get("text"):
                raise Refused(400, "Bad Request: inline keyboard button text is empty")
            if not (button.get("url") or button.get("callback_data")):
                raise Refused(400, "Bad Request: inline keyboard button is of unknown type")
            if len(button.get("callback_data", "").encode()) > MAX_BUTTON_BYTES:
                raise Refused(400, "Bad Request: BUTTON_DATA_INVALID")


def check_album(media: Any) -> list[dict[str, Any]]:
    if not isinstance(media, list) or not 2 <= len(media) <= 10:
        raise Refused(400, "Bad Request: there must be from 2 to 10 messages to send as an album")
    kinds = {item["type"] for item in media}
    if len(kinds) > 1 and not kinds <= {"photo", "video"}:
        raise Refused(400, "Bad Request: media of these types can't be mixed in an album")
    for item in media:
        check_caption(item)
    return media
