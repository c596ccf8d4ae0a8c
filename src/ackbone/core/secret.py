"""Secrets that print as `***`, and masking of texts before a person sees them."""

from __future__ import annotations

import re
from urllib.parse import unquote

MASK = "***"
SHORTEST_KNOWN = 4
"""Shortest secret that is searched for in texts. A shorter one would match parts of many words."""
_SECRET_WORDS = {
    "apikey", "authorization", "cookie", "credential", "credentials", "jaas", "key", "keys",
    "passphrase", "passwd", "password", "pwd", "sas", "secret", "secrets", "signature", "token",
    "tokens",
}  # fmt: skip
_SECRET_NAMES = {"connection_string", "sasl_jaas_config"}
_HARMLESS_NAMES = {
    "dedup_key", "idempotency_key", "message_key", "ordering_key", "partition_key", "routing_key",
}  # fmt: skip
"""Names that end like the name of a secret, but identify messages."""
_COUNTING_WORDS = {"keys", "tokens"}
"""Names under which a number is a count."""
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_TOKEN = re.compile(r"[^\s\"']+")
_PASSWORD = re.compile(r"://[^\s/\"':@]*:([^\s/\"']*)@")
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]+", re.IGNORECASE)
_NAMED = re.compile(r"""(?<![\w.-])([A-Za-z_][\w.-]*)\\*["']?\s*[=:]\s*(\\*["'])?""")
_BARE = re.compile(r"""[^\s"',;&})\]]+""")
_REST_OF_LINE = re.compile(r"""[^\r\n"']+""")
_WHOLE_LINE = {"authorization", "cookie"}
"""Headers whose value may have several words."""
_QUERY = re.compile(r"([?&;]([^=&;?\s]+)=)[^&;\s]*")

_known: set[str] = set()


class Secret:
    """A text that prints as `***`. `reveal()` returns it for the driver that needs it.

    From then on, logs of this process mask it wherever it appears.
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

    def __format__(self, spec: str) -> str:
        return format(MASK, spec)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._text))


def known_secrets() -> frozenset[str]:
    """Return the texts of all secrets of this process, and the passwords inside them."""
    return frozenset(_known)


def is_secret_name(name: str) -> bool:
    """Return True if a key of this name holds a secret. The last word decides (`sasl_password`).

    `key_file` and `password_file` name a place, not a secret.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    whole = "_".join(words)
    if not words or whole in _HARMLESS_NAMES:
        return False
    return words[-1] in _SECRET_WORDS or whole in _SECRET_NAMES


def is_count(name: str, value: object) -> bool:
    """Return True if the value is only a count, as in `tokens: 120`."""
    words = _WORDS.findall(name)
    number = isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal())
    return bool(words) and words[-1].lower() in _COUNTING_WORDS and number


def mask_text(text: str) -> str:
    """Mask user and password of URLs, and secret parameters."""
    if "://" in text and "@" in text:
        text = _TOKEN.sub(lambda token: _without_userinfo(token[0]), text)
    return _QUERY.sub(lambda m: m[1] + MASK if is_secret_name(m[2]) else m[0], text)


def mask_value(value: str) -> str:
    """As `mask_text`, for a value that may be one URL, whose password may hold spaces and
    quotes."""
    return mask_text(_without_userinfo(value))


def _without_userinfo(found: str) -> str:
    """Scanned by hand: a regular expression for "from :// to the last @" backtracks on long
    tokens."""
    start, end = found.find("://"), found.rfind("@")
    return f"{found[: start + 3]}{MASK}{found[end:]}" if 0 <= start < end else found


def mask_line(text: str) -> str:
    """Mask a line for a log or an error: also `password=…`, `"token": "…"` and `Bearer …`."""
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
    """Return where the value after a name begins and ends, with its quotes."""
    after, quote = name.end(), name[2]
    if quote:
        at = text.find(quote, after)
        while at > after and text[at - 1] == "\\":  # a quote inside the value
            at = text.find(quote, at + 1)
        return name.start(2), len(text) if at < 0 else at + len(quote)
    whole = _WORDS.findall(name[1])[-1].lower() in _WHOLE_LINE
    value = (_REST_OF_LINE if whole else _BARE).match(text, after)
    return after, after if value is None else value.end()
