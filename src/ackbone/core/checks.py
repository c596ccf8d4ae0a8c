"""The findings of `doctor`."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Finding(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Works, but someone should know."""
    REFUSED = "refused"
    """The promise does not hold like this."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    finding: Finding
    detail: str
    hint: str | None = None


def ok(name: str, detail: str, hint: str | None = None) -> Check:
    return Check(name=name, finding=Finding.OK, detail=detail, hint=hint)


def warning(name: str, detail: str, hint: str | None = None) -> Check:
    return Check(name=name, finding=Finding.WARNING, detail=detail, hint=hint)


def refused(name: str, detail: str, hint: str | None = None) -> Check:
    return Check(name=name, finding=Finding.REFUSED, detail=detail, hint=hint)
