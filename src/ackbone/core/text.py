"""Text from outside, made safe to print, where nothing in it can move a cursor or forge a line, and
to keep."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_BIDI_AND_SEPARATORS = (
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    0x200E,
    0x200F,
    0x2028,
    0x2029,
)
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *_BIDI_AND_SEPARATORS)
_NAMED = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r", 0x1B: "\\e"}


def _escape(code: int) -> str:
    return _NAMED.get(code) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


_LINE = {code: _escape(code) for code in _CONTROLS}
_JSON = {code: f"\\u{code:04x}" for code in _CONTROLS if code > 0x20}
_LINES = {code: text for code, text in _LINE.items() if code != 0x0A}


def one_line(text: str) -> str:
    """Control characters, line breaks and reordering marks as visible escapes."""
    return _encodable(text.translate(_LINE))


def json_line(document: str) -> str:
    """A JSON document of one line whose strings hold such characters only as JSON's own escapes."""
    return document.translate(_JSON)


def lines(text: str, indent: str = "    ") -> str:
    """As `one_line`, but line breaks stay, and every line but the first is indented."""
    unified = text.replace("\r\n", "\n")
    return _encodable(unified.translate(_LINES)).replace("\n", f"\n{indent}")


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def storable(text: str) -> str:
    """Text that every database takes: no lone surrogates, no NUL, not endless."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()[:8000]


def unknown_option(name: str, known: Iterable[str]) -> str:
    """What to say to an option that does not exist: the nearest one, else all of them."""
    options = sorted(known)
    near = difflib.get_close_matches(name, options, 2, 0.6)
    if near:
        return f"unknown option {name!r}; did you mean {' or '.join(map(repr, near))}?"
    return f"unknown option {name!r}; there are {', '.join(options)}"
