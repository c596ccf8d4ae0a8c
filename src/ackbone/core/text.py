"""Text from outside, made safe to print and to store.

Nothing in a printed text can move the cursor or imitate a line of its own.
"""

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
    """Show control characters, line breaks and reordering marks as escapes."""
    return encodable(text.translate(_LINE))


def json_line(document: str) -> str:
    """Show such characters in a one-line JSON document as JSON's own escapes."""
    return document.translate(_JSON)


def lines(text: str, indent: str = "    ") -> str:
    """As `one_line`, but line breaks are kept, and every line after the first is indented."""
    unified = text.replace("\r\n", "\n")
    return encodable(unified.translate(_LINES)).replace("\n", f"\n{indent}")


def encodable(text: str) -> str:
    """Show lone surrogates, which UTF-8 does not have, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def storable(text: str) -> str:
    """Return text that every database accepts: no lone surrogates, no NUL, at most 8,000
    characters."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()[:8000]


def counted(count: int, noun: str, verb: str = "") -> str:
    """Return a number with its noun, and with its verb if there is one: "1 message waits"."""
    one = count == 1
    words = f"{count} {noun}{'' if one else 's'}"
    return f"{words} {verb}{'s' if one else ''}" if verb else words


def unknown_option(name: str, known: Iterable[str]) -> str:
    """Describe an unknown option: name the nearest one, else all of them."""
    options = sorted(known)
    near = difflib.get_close_matches(name, options, 2, 0.6)
    if near:
        return f"unknown option {name!r}; did you mean {' or '.join(map(repr, near))}?"
    return f"unknown option {name!r}; the options are {', '.join(options)}"
