"""Masking of secrets in texts, values and whole records before they are logged.

There are three methods, each of which finds most secrets: values under a name such as `password`;
typical forms (passwords in URLs, bearer tokens, `password=…`); and the secrets that this process
knows, in every encoding that a text may contain.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec

from ackbone.core.secret import MASK, Secret, is_count, is_secret_name, known_secrets, mask_line

_DEPTH = 8
_SEQUENCES = (list, tuple, set, frozenset)


def redact(text: str) -> str:
    """Return the text with all recognizable secrets masked."""
    return mask_line(_without_known(text))


def redact_value(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return the value with secrets masked inside it."""
    if _is_secret(name, value) or isinstance(value, Secret):
        return MASK
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return redact(value)
    if depth >= _DEPTH:
        return redact(_shown(value))
    if isinstance(value, Mapping):
        return {
            redact(_shown(key)) if not isinstance(key, str) else redact(key): redact_value(
                item, key if isinstance(key, str) else "", depth + 1
            )
            for key, item in value.items()
        }
    if isinstance(value, _SEQUENCES):
        return [redact_value(item, name, depth + 1) for item in value]
    if isinstance(value, bytes | bytearray):
        return redact(bytes(value).decode("utf-8", "backslashreplace"))
    return redact(_shown(value))


def _is_secret(name: str, value: Any) -> bool:
    shown = value is None or isinstance(value, bool) or is_count(name, value)
    return not shown and is_secret_name(name)


def _shown(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


_pattern: tuple[frozenset[str], re.Pattern[str] | None] = (frozenset(), None)


def _without_known(text: str) -> str:
    global _pattern  # noqa: PLW0603 - compiled once for the secrets that there are
    known = known_secrets()
    if known != _pattern[0]:
        spellings = {spelling for secret in known for spelling in _spellings(secret)}
        longest_first = sorted(spellings, key=len, reverse=True)
        _pattern = known, re.compile("|".join(map(re.escape, longest_first))) if known else None
    pattern = _pattern[1]
    return text if pattern is None else pattern.sub(MASK, text)


def _spellings(secret: str) -> set[str]:
    """Return the encodings of a secret: in a URL, inside quotes, in JSON, in a header."""
    raw = secret.encode("utf-8", "surrogatepass")
    in_repr = repr(secret)[1:-1]
    return {
        secret,
        in_repr,
        in_repr.replace('"', '\\\\"'),
        ascii(secret)[1:-1],
        msgspec.json.encode(raw.decode("utf-8", "replace")).decode()[1:-1],
        quote(raw),
        quote(raw, safe=""),
        quote_plus(raw),
        base64.b64encode(raw).decode(),
    }
