"""Long texts in parts: cut between paragraphs, lines or words, and in a word only if it has to be.

Lengths are counted as the other side counts them; a character is never cut in two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ackbone.core.delivery import Outbound

Length = Callable[[str], int]
FENCE = "```"
_CLOSING = "\n" + FENCE
_WIDEST_OPENING = 24
"""So much of the line that opened a fence is said again in the next part: its language."""
_SEPARATORS = ("\n\n", "\n", " ")
_EARLIEST_CUT = 0.5
"""A cut before this share of the room would waste a message to save a word."""
_EARLIEST_FENCE_CUT = 0.25


def utf16_length(text: str) -> int:
    """In UTF-16 code units, as Telegram counts."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def split(text: str, limit: int, *, length: Length = utf16_length) -> list[str]:
    """Parts of at most `limit`, at least one; joined, they are the text."""
    parts: list[str] = []
    start = 0
    while length(text[start:]) > limit:
        end = _cut(text, start, _reach(text, start, limit, length))
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def split_fenced(text: str, limit: int, *, length: Length = utf16_length) -> list[str]:
    """As `split`; a code fence that a cut goes through is closed before it and opened again after.

    `limit` is at least 64: fences need room, too.
    """
    parts: list[str] = []
    start, opening = 0, ""
    while length(opening + text[start:]) > limit:
        room = limit - length(opening) - length(_CLOSING)
        end = _cut(text, start, _reach(text, start, room, length))
        inside, at = _open_fence(text, start, end, opening)
        if inside and at > start + (end - start) * _EARLIEST_FENCE_CUT:
            end, inside = at, ""  # the fence goes whole into the next part
        parts.append(opening + text[start:end] + _closing(text[end - 1], inside))
        start, opening = end, inside
    return [*parts, opening + text[start:]]


def readable(texts: Sequence[str]) -> list[str]:
    """Without the blank ones, which no chat takes; at least one."""
    return [text for text in texts if text.strip()] or [""]


def doubt_placed(reply: Outbound, parts: Sequence[Outbound]) -> list[Outbound]:
    """The parts of a reply, of which only the one that is sent next can be in doubt.

    Those before it arrived, those behind it never left.
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
    """The furthest end of a part that begins at `start`; one character further at the least."""
    low, high = start + 1, min(len(text), start + limit)
    while low < high:
        middle = (low + high + 1) // 2
        if length(text[start:middle]) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(text: str, start: int, reach: int) -> int:
    """The best place to cut, not behind `reach`. What separates stays with the part before it."""
    if reach >= len(text):
        return len(text)
    earliest = start + int((reach - start) * _EARLIEST_CUT)
    for separator in _SEPARATORS:
        at = text.rfind(separator, earliest, reach)
        if at > start:
            return at + len(separator)
    for end in range(reach, max(start + 1, reach - len(FENCE)), -1):
        if text[end - 1 : end + 1] != "``":  # half a fence is none
            return end
    return reach


def _open_fence(text: str, start: int, end: int, opening: str) -> tuple[str, int]:
    """The line that opens the fence which is open at `end`, and where it begins; "" if none is."""
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
