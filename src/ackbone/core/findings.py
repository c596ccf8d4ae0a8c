"""The findings of `doctor`."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .errors import AckboneError, BrokerDenied


class Finding(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but the operator should know about it."""
    REFUSED = "refused"
    """A promise does not hold."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding, and a hint how to fix it."""

    name: str
    finding: Finding
    detail: str
    hint: str | None = None


def ok(name: str, detail: str) -> Check:
    return Check(name=name, finding=Finding.OK, detail=detail)


def warning(name: str, detail: str, hint: str | None = None) -> Check:
    return Check(name=name, finding=Finding.WARNING, detail=detail, hint=hint)


def refused(name: str, detail: str, hint: str | None = None) -> Check:
    return Check(name=name, finding=Finding.REFUSED, detail=detail, hint=hint)


def unanswered(name: str, error: AckboneError) -> Check:
    """Return the finding about a broker that could not be asked.

    One that refuses the login is up, and its error says what to correct.
    """
    denied = isinstance(error, BrokerDenied)
    hint = None if denied else "start it, or correct `broker` in ackbone.yaml"
    return refused(name, str(error), hint)
