"""Options that several commands have, and types: durations, times, headers, effects, JSON."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import msgspec

from ackbone.admin.repairs import Change
from ackbone.core.clock import to_us
from ackbone.core.codecs.values import loads
from ackbone.core.errors import DecodeError, InvalidMessage
from ackbone.core.message import Priority
from ackbone.core.records import EffectWord, Resumption

if TYPE_CHECKING:
    # Generic since click 8.4, and not before.
    Parameter = click.ParamType[Any]
else:
    Parameter = click.ParamType

Fn = TypeVar("Fn", bound=Callable[..., Any])

page_limit = click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="At most this many."
)


in_tenant = click.option("--tenant", help="Look only at this tenant.")
yes = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
yes_to_several = click.option(
    "-y", "--yes", is_flag=True, help="Do not ask for confirmation, even for several."
)
some_ids = click.argument("names", metavar="ID...", nargs=-1, required=True)


def together(*options: Callable[[Fn], Fn]) -> Callable[[Fn], Fn]:
    """Return one decorator that adds all these options, in this order."""

    def decorate(fn: Fn) -> Fn:
        for option in reversed(options):
            fn = option(fn)
        return fn

    return decorate


one_id = together(click.argument("name", metavar="ID"), in_tenant)
"""The argument ID, passed on as `name`, and --tenant to narrow the search for it."""


def filter_options(kind: type[msgspec.Struct], *options: Callable[[Fn], Fn]) -> Callable[[Fn], Fn]:
    """Add options that are named like the fields of `kind`, passed on as one `kind`, `where`."""

    def decorate(fn: Fn) -> Fn:
        @functools.wraps(fn)
        def wrapped(*args: Any, **given: Any) -> Any:
            fields = [name for name in kind.__struct_fields__ if name in given]
            where = kind(**{name: given.pop(name) for name in fields})
            return fn(*args, where=where, **given)

        return together(*options)(cast(Fn, wrapped))

    return decorate


def any_of(choices: Sequence[str], *, usual: str, help: str) -> Callable[[Fn], Fn]:
    """Add --state with these choices and `all`, which is passed on as None."""
    return click.option(
        "--state",
        type=click.Choice([*choices, "all"]),
        default=usual,
        show_default=True,
        callback=lambda ctx, param, value: None if value == "all" else value,
        help=help,
    )


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)?")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:/\s*(s|min|m|h|d))?")
_EFFECT = re.compile(r"(?P<name>.+?)=(?P<word>not-done|done)(?::(?P<value>.*))?", re.DOTALL)


class Parsed(Parameter):
    """A value that a function makes from the text on the command line."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        """`parse` raises ValueError, InvalidMessage or DecodeError with the reason."""
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # a default
        try:
            return self._parse(value)
        except (ValueError, InvalidMessage, DecodeError) as error:
            self.fail(str(error), param, ctx)


def _span(text: str) -> float:
    """Seconds, or a number with a unit: 90, 1.5s, 10m, 2h, 7d."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a duration; write 90, 10s, 5m, 2h or 7d")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _moment(text: str) -> int:
    """A time in ISO 8601, or a duration ago: 2025-11-20T10:00, 15m, 2d. Gives microseconds."""
    found = _SPAN.fullmatch(text.strip())
    if found is not None and found[2]:
        return time.time_ns() // 1000 - int(float(found[1]) * _UNITS[found[2]] * 1e6)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; write 15m, 2h, 7d (ago) or 2025-11-20T10:00"
        ) from None
    return to_us(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _rate(text: str) -> float:
    """A rate per second, minute or hour: 5, 5/s, 90/m, 1000/h. Converted to a rate per second."""
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) / _UNITS[found[2] or "s"] if found else 0.0
    if rate <= 0:
        raise ValueError(f"{text!r} is not a rate above 0; write 5/s, 90/m or 1000/h")
    return rate


def _assignment(text: str) -> Change:
    """PATH=VALUE as a `Change`. A VALUE that is not JSON is taken as text."""
    path, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"{text!r} sets nothing; write payload.FIELD=VALUE")
    if not path.startswith("payload"):  # type, headers and the key are always text
        return Change(path, value)
    try:
        return Change(path, loads(value.encode()))
    except DecodeError:
        return Change(path, value)


def _json(text: str) -> Any:
    """A JSON value. `-` reads it from standard input."""
    if text == "-":
        return loads(sys.stdin.buffer.read())
    try:
        return loads(text.encode())
    except DecodeError as error:
        raise ValueError(f"{error}; text needs quotes inside: '\"hello\"'") from None


def _header(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"{text!r} is not a header; write NAME=VALUE")
    return name, value


def _effect(text: str) -> EffectWord:
    """NAME=done, NAME=not-done, or NAME=done:JSON with the value that `ctx.once` returns."""
    found = _EFFECT.fullmatch(text)
    if found is None or (found["value"] is not None and found["word"] == "not-done"):
        raise ValueError(
            f"{text!r} does not describe an effect; write NAME=done, NAME=done:JSON or "
            "NAME=not-done"
        )
    value = (found["value"] or "null").encode()
    try:
        loads(value)
    except DecodeError as error:
        raise ValueError(f"the result of {found['name']!r} is {error}") from None
    return EffectWord(name=found["name"], word=Resumption(found["word"]), value=value)


def _priority(text: str) -> int:
    """low, normal, high, critical, or 0 to 3."""
    name = text.strip()
    if name in {str(int(each)) for each in Priority}:
        return int(name)
    if name.upper() in Priority.__members__:
        return int(Priority[name.upper()])
    raise ValueError(f"{text!r} is not a priority; write low, normal, high, critical or 0 to 3")


SPAN = Parsed("time", _span)
MOMENT = Parsed("when", _moment)
RATE = Parsed("n/s", _rate)
ASSIGNMENT = Parsed("path=value", _assignment)
PLACE = Parsed("path", Change)
JSON = Parsed("json", _json)
HEADER = Parsed("name=value", _header)
EFFECT = Parsed("name=done|not-done", _effect)
PRIORITY = Parsed("priority", _priority)
