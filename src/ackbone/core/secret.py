"""Secrets that do not show themselves, and how texts are masked before a person sees them."""

from __future__ import annotations

import re
from urllib.parse import unquote

MASK = "***"
SHORTEST_KNOWN = 4
"""A shorter secret is not looked for in texts: it would be found in every word."""
_SECRET_WORDS = {
    "apikey", "authorization", "cookie", "credential", "credentials", "jaas", "key", "keys",
    "passphrase", "passwd", "password", "pwd", "sas", "secret", "secrets", "signature", "token",
    "tokens",
}  # fmt: skip
_SECRET_NAMES = {"connection_string", "sasl_jaas_config"}
_HARMLESS_NAMES = {
    "dedup_key", "idempotency_key", "message_key", "ordering_key", "partition_key", "routing_key",
}  # fmt: skip
"""They end like a secret's, and identify messages."""
_COUNTING_WORDS = {"keys", "tokens"}
"""A number under such a name counts something."""
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_TOKEN = re.compile(r"[^\s\"']+")
_PASSWORD = re.compile(r"://[^\s/\"':@]*:([^\s/\"']*)@")
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]+", re.IGNORECASE)
_NAMED = re.compile(r"""(?<![\w.-])([A-Za-z_][\w.-]*)\\*["']?\s*[=:]\s*(\\*["'])?""")
_BARE = re.compile(r"""[^\s"',;&})\]]+""")
_REST_OF_LINE = re.compile(r"""[^\r\n"']+""")
_WHOLE_LINE = {"authorization", "cookie"}
"""Headers whose value has several words."""
_QUERY = re.compile(r"([?&;]([^=&;?\s]+)=)[^&;\s]*")

_known: set[str] = set()


class Secret:
    """A text that prints as `***`. `reveal()` gives it to the driver that needs it.

    Once made it is known in this process, and logs mask it wherever it turns up.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text
        for part in (text, *(unquote(found) for found in _PASSWORD.findall(text))):
            if len(part) >= SHORTEST_KNOWN:
                _known.add(part)

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return MASK

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return format(MASK, spec)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._text))


def known_secrets() -> frozenset[str]:
    """The texts of every `Secret` made in this process, and the passwords inside them."""
    return frozenset(_known)


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret: its last word says so (`sasl_password`).

    `key_file` and `password_file` name a place, not a secret.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    whole = "_".join(words)
    if not words or whole in _HARMLESS_NAMES:
        return False
    return words[-1] in _SECRET_WORDS or whole in _SECRET_NAMES


def is_count(name: str, value: object) -> bool:
    """Whether the value only counts what the name speaks of: `tokens: 120`."""
    words = _WORDS.findall(name)
    number = isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal())
    return bool(words) and words[-1].lower() in _COUNTING_WORDS and number


def mask_text(text: str) -> str:
    """The text without user and password of a URL, and without secret parameters."""
    if "://" in text and "@" in text:
        text = _TOKEN.sub(lambda token: _without_userinfo(token[0]), text)
    return _QUERY.sub(lambda m: m[1] + MASK if is_secret_name(m[2]) else m[0], text)


def mask_value(value: str) -> str:
    """The same of a value that may be one URL, whose password may hold spaces and quotes."""
    return mask_text(_without_userinfo(value))


def _without_userinfo(found: str) -> str:
    """By hand: an expression for "from :// to the last @" looks at a long token over and over."""
    start, end = found.find("://"), found.rfind("@")
    return f"{found[: start + 3]}{MASK}{found[end:]}" if 0 <= start < end else found


def mask_line(text: str) -> str:
    """A line for a log or an error: also without `password=…`, `"token": "…"` and `Bearer …`."""
    text = _SCHEME.sub(rf"\1 {MASK}", mask_text(text))
    parts: list[str] = []
    at = 0
    for found in _NAMED.finditer(text):
        if found.start() >= at and is_secret_name(found[1]):
            start, end = _value(text, found)
            value = text[start:end]
            if value and not value.endswith(MASK) and not is_count(found[1], value):
                parts += text[at:start], MASK
                at = end
    return "".join(parts) + text[at:]


def _value(text: str, name: re.Match[str]) -> tuple[int, int]:
    """Where the value behind a name begins and ends, its quotes included."""
    after, quote = name.end(), name[2]
    if quote:
        at = text.find(quote, after)
        while at > after and text[at - 1] == "\\":  # a quote inside the value
            at = text.find(quote, at + 1)
        return name.start(2), len(text) if at < 0 else at + len(quote)
    whole = _WORDS.findall(name[1])[-1].lower() in _WHOLE_LINE
    value = (_REST_OF_LINE if whole else _BARE).match(text, after)
    return after, after if value is None else value.end()
