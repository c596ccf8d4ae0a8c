"""Settings that are secrets: kept apart when they are read, masked when they are shown."""

from __future__ import annotations

from typing import Any

from ackbone.core.secret import MASK, Secret, is_secret_name, mask_line, mask_text, mask_value

__all__ = [
    "MASK",
    "Secret",
    "is_secret_name",
    "mask_line",
    "mask_text",
    "mask_value",
    "masked",
    "protect",
]


def protect(value: Any, *, secret: bool) -> Any:
    """A plain value, as a `Secret` if it is one: known by its name, or a URL with a password."""
    if value is None or isinstance(value, bool | Secret):
        return value
    if secret or (isinstance(value, str) and mask_value(value) != value):
        return Secret(str(value))
    return value


def masked(value: Any, name: str = "") -> Any:
    """The value as a person may see it."""
    if isinstance(value, Secret):
        shown = mask_value(value.reveal())
        hidden = is_secret_name(name) or shown == value.reveal()
        return MASK if hidden else shown
    if isinstance(value, str):
        return MASK if value and is_secret_name(name) else mask_value(value)
    return value
