"""The texts of replies as channels send them: in parts, several as one, and marked as repeats."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ackbone.core.errors import FinalError
from ackbone.core.outbound.delivery import Outbound

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)
Length = Callable[[str], int]
FENCE = "```"
MARK = "(may be a repeat) "
"""Every part has room for it, because the split must not depend on whether a reply is in doubt."""
BETWEEN = "\n\n"
_CLOSING = "\n" + FENCE
_WIDEST_OPENING = 24
"""Characters of a fence's opening line (its language) that the next part repeats."""
_SEPARATORS = ("\n\n", "\n", " ")
_EARLIEST_CUT = 0.5
"""A cut before this share of the room would waste a message to save a word."""
_EARLIEST_FENCE_CUT = 0.25
_NAMESPACE = uuid.UUID("b6a6f0c4-6a5e-5d0b-9a5f-0b9f3f1c9d27")
_NONCE_LENGTH = 25


def options_of(reply: Outbound, kind: type[OptionsT], service: str) -> OptionsT:
    """Return the options of a reply. Raises FinalError for any that the service does not have."""
    try:
        return msgspec.convert(dict(reply.options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise FinalError(f"options for {service}: {error}") from None


# -- long texts in parts --------------------------------------------------------------------------
# Lengths are counted as the service counts them. A character is never cut in two.


def utf16_length(text: str) -> int:
    """Return the length in UTF-16 code units, as Telegram counts."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def split(text: str, limit: int, *, length: Length = utf16_length) -> list[str]:
    """Return one or more parts of at most `limit`. Joined, they are the text.

    The text is cut between paragraphs, lines or words; inside a word only if nothing else fits.
    """
    parts: list[str] = []
    start = 0
    while length(text[start:]) > limit:
        end = _cut(text, start, _reach(text, start, limit, length))
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def split_fenced(text: str, limit: int, *, length: Length = utf16_length) -> list[str]:
    """As `split`. A code fence is closed before a cut and opened again after it.

    `limit` is at least 64: fences need room, too.
    """
    parts: list[str] = []
    start, opening = 0, ""
    while length(opening + text[start:]) > limit:
        room = limit - length(opening) - length(_CLOSING)
        end = _cut(text, start, _reach(text, start, room, length))
        inside, at = _open_fence(text, start, end, opening)
        if inside and at > start + (end - start) * _EARLIEST_FENCE_CUT:
            end, inside = at, ""  # the whole fence goes into the next part
        parts.append(opening + text[start:end] + _closing(text[end - 1], inside))
        start, opening = end, inside
    return [*parts, opening + text[start:]]


def readable(texts: Sequence[str]) -> list[str]:
    """Return the texts without blank ones, which no chat accepts; at least one."""
    return [text for text in texts if text.strip()] or [""]


def text_parts(
    reply: Outbound,
    texts: Sequence[str],
    options: msgspec.Struct,
    *,
    first_only: Sequence[str] = (),
    last_only: Sequence[str] = (),
) -> list[Outbound]:
    """Return one part for each readable text.

    `first_only` and `last_only` are options that only the first or the last part has.
    """
    shown = readable(texts)
    asked = msgspec.to_builtins(options)
    parts = []
    for number, text in enumerate(shown, 1):
        others = {*(first_only if number > 1 else ()), *(last_only if number < len(shown) else ())}
        own = {name: value for name, value in asked.items() if name not in others}
        parts.append(msgspec.structs.replace(reply, content=text, options=own))
    return doubt_placed(reply, parts)


def doubt_placed(reply: Outbound, parts: Sequence[Outbound]) -> list[Outbound]:
    """Return the parts of a reply, with the doubt on the part that is sent next.

    The parts before it have arrived, and those after it were never sent.
    """
    return [
        msgspec.structs.replace(part, in_doubt=reply.in_doubt and number == len(reply.receipts))
        for number, part in enumerate(parts)
    ]


def _closing(last: str, inside: str) -> str:
    if not inside:
        return ""
    return FENCE if last == "\n" else _CLOSING


def _reach(text: str, start: int, limit: int, length: Length) -> int:
    """Return the furthest end of a part that begins at `start`: at least one character further."""
    low, high = start + 1, min(len(text), start + limit)
    while low < high:
        middle = (low + high + 1) // 2
        if length(text[start:middle]) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(text: str, start: int, reach: int) -> int:
    """Return the best place to cut up to `reach`. A separator stays with the part before it."""
    if reach >= len(text):
        return len(text)
    earliest = start + int((reach - start) * _EARLIEST_CUT)
    for separator in _SEPARATORS:
        at = text.rfind(separator, earliest, reach)
        if at > start:
            return at + len(separator)
    for end in range(reach, max(start + 1, reach - len(FENCE)), -1):
        if text[end - 1 : end + 1] != "``":  # do not cut through a fence
            return end
    return reach


def _open_fence(text: str, start: int, end: int, opening: str) -> tuple[str, int]:
    """Return the opening line of the fence that is open at `end` ("" if none is) and its place."""
    began, at = start, start
    for line in text[start:end].split("\n"):
        stripped = line.lstrip(" ")
        if stripped.startswith(FENCE) and (at == 0 or text[at - 1] == "\n"):
            if opening:
                opening = ""
            else:
                opening, began = stripped.rstrip()[:_WIDEST_OPENING] + "\n", at
        at += len(line) + 1
    return opening, began


# -- several replies as one -----------------------------------------------------------------------


def joined(
    replies: Sequence[Outbound], parts: Callable[[Outbound], Sequence[Outbound]]
) -> Outbound | None:
    """Return one reply with all texts, a blank line between them, or None.

    None if one of them is more than a text, has been sent in part or may have been, or if the
    joined text does not fit into one part.
    """
    if not all(_is_plain(reply) for reply in replies):
        return None
    content = BETWEEN.join(reply.content for reply in replies)
    found = msgspec.structs.replace(replies[0], content=content)
    return found if len(parts(found)) == 1 else None


def _is_plain(reply: Outbound) -> bool:
    is_fresh = not reply.receipts and not reply.in_doubt
    return is_fresh and not reply.options and bool(reply.content.strip())


# -- repeats --------------------------------------------------------------------------------------
# A service recognises a repeat by a key, if it accepts one; people by a mark in the text. A part is
# numbered by the parts that arrived before it: its key is its own, and the same on every attempt.


def marked(reply: Outbound) -> Outbound:
    """Return the reply, with a mark before its text if it may have arrived already."""
    if not reply.in_doubt:
        return reply
    mark = MARK
    if reply.content.startswith(FENCE):  # a fence begins its line
        mark = MARK.rstrip() + "\n"
    return msgspec.structs.replace(reply, content=(mark + reply.content).strip())


def key_uuid(reply: Outbound) -> str:
    """Return the key of the part that is sent now; the key of the first part is the reply's id."""
    number = len(reply.receipts)
    if number == 0:
        try:
            return str(uuid.UUID(reply.id))
        except ValueError:
            pass  # an id in another form is hashed
    return str(uuid.uuid5(_NAMESPACE, f"{reply.id}/{number}"))


def key_short(reply: Outbound) -> str:
    """Return the same key as 25 letters and digits."""
    text = f"{reply.id}/{len(reply.receipts)}"
    return hashlib.sha256(text.encode()).hexdigest()[:_NONCE_LENGTH]
