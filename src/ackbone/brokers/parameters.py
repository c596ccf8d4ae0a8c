"""The parameters after the `?` of a broker's URL, as all adapters read them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def seconds(name: str, written: str | None, default: float, problems: list[str]) -> float:
    """Return a number of seconds. A mistake is added to `problems`."""
    if not written:
        return default
    try:
        value = float(written)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        problems.append(f"{name} must be a number of seconds above 0")
    return value


def unknown(name: str, known: Sequence[str]) -> str:
    """Describe an unknown parameter without quoting it: it may be part of a password with a `?`."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown parameter after the ?{hint} Known: {', '.join(known)}"
