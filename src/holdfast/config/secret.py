"""Secrets that do not show themselves, and how texts are masked before a person sees them."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
_SECRET_WORDS = {
    "apikey", "credential", "credentials", "jaas", "key", "keys", "passphrase", "passwd",
    "password", "pwd", "sas", "secret", "secrets", "signature", "token", "tokens",
}  # fmt: skip
_SECRET_NAMES = {"connection_string", "sasl_jaas_config"}
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_USERINFO = re.compile(r"(://)[^\s\"']*@")
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]+", re.IGNORECASE)
_NAMED = re.compile(r"""([A-Za-z_][\w.-]*)["']?\s*[=:]\s*""")
_VALUE = re.compile(r"""(Bearer |Basic )?("[^"]*"|'[^']*'|[^\s"',;&})\]]+)""", re.IGNORECASE)
_QUERY = re.compile(r"([?&;]([^=&;\s]+)=)[^&;\s]*")


class Secret:
    """A text that prints as `***`. `reveal()` gives it to the driver that needs it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

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


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret: its last word says so (`sasl_password`).

    `key_file` and `password_file` name a place, not a secret.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and (words[-1] in _SECRET_WORDS or "_".join(words) in _SECRET_NAMES)


def mask_text(text: str) -> str:
    """The text without user and password of a URL, and without secret parameters."""
    text = _USERINFO.sub(rf"\1{MASK}@", text)
    return _QUERY.sub(lambda m: m[1] + MASK if is_secret_name(m[2]) else m[0], text)


def mask_line(text: str) -> str:
    """A line for a log or an error: also without `password=…`, `"token": "…"` and `Bearer …`."""
    text = _SCHEME.sub(rf"\1 {MASK}", mask_text(text))
    parts: list[str] = []
    at = 0
    for name in _NAMED.finditer(text):
        value = _VALUE.match(text, name.end())
        if name.start() >= at and value is not None and is_secret_name(name[1]):
            parts += text[at : name.end()], MASK
            at = value.end()
    return "".join(parts) + text[at:]


def protect(value: Any, *, secret: bool) -> Any:
    """A plain value, as a `Secret` if it is one: known by its name, or a URL with a password."""
    if value is None or isinstance(value, bool):
        return value
    if secret or (isinstance(value, str) and mask_text(value) != value):
        return Secret(str(value))
    return value


def masked(value: Any, name: str = "") -> Any:
    """The value as a person may see it."""
    if isinstance(value, Secret):
        shown = mask_text(value.reveal())
        hidden = is_secret_name(name) or shown == value.reveal()
        return MASK if hidden else shown
    if isinstance(value, str):
        return MASK if value and is_secret_name(name) else mask_text(value)
    return value
