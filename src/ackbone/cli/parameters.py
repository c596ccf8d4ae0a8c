"""Types of options: lengths of time, moments, headers, effects, JSON."""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ackbone.core.clock import to_us
from ackbone.core.errors import DecodeError, InvalidMessage
from ackbone.core.json_text import loads
from ackbone.core.message import Priority
from ackbone.core.records import EffectWord, Resumption

if TYPE_CHECKING:  # generic since click 8.4, and not before
    Parameter = click.ParamType[Any]
else:
    Parameter = click.ParamType

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)?")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:/\s*(s|min|m|h|d))?")
_EFFECT = re.compile(r"(?P<name>.+?)=(?P<word>not-done|done)(?::(?P<value>.*))?", re.DOTALL)


class Span(Parameter):
    """Seconds, or a number with a unit: 90, 1.5s, 10m, 2h, 7d."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = _SPAN.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is no length of time; write 90, 10s, 5m, 2h or 7d", param, ctx)
        return float(found[1]) * _UNITS[found[2] or "s"]


class Moment(Parameter):
    """A time in ISO 8601, or how long ago: 2025-11-20T10:00, 15m, 2d. Gives microseconds."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _SPAN.fullmatch(value.strip())
        if found is not None and found[2]:
            return time.time_ns() // 1000 - int(float(found[1]) * _UNITS[found[2]] * 1e6)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(
                f"{value!r} is no time; write 15m, 2h, 7d (ago) or 2025-11-20T10:00", param, ctx
            )
        return to_us(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


class Rate(Parameter):
    """So many a second, or a minute, or an hour: 5, 5/s, 90/m, 1000/h. Gives those a second."""

    name = "n/s"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = _RATE.fullmatch(value.strip())
        rate = float(found[1]) / _UNITS[found[2] or "s"] if found else 0.0
        if rate <= 0:
            self.fail(f"{value!r} is no rate above 0; write 5/s, 90/m or 1000/h", param, ctx)
        return rate


class Assignment(Parameter):
    """PATH=VALUE as a `Change`; a VALUE that is no JSON is a text."""

    name = "path=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ackbone.admin.repairs import Change

        if not isinstance(value, str):
            return value
        path, separator, text = value.partition("=")
        if not separator:
            self.fail(f"{value!r} sets nothing; write payload.FIELD=VALUE", param, ctx)
        try:
            found = loads(text.encode())
        except DecodeError:
            found = text
        if not path.startswith("payload"):  # everywhere else only a text can stand
            found = text
        try:
            return Change(path, found)
        except InvalidMessage as error:
            self.fail(str(error), param, ctx)


class Place(Parameter):
    """PATH as a `Change` that takes it away."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ackbone.admin.repairs import Change

        if not isinstance(value, str):
            return value
        try:
            return Change(value)
        except InvalidMessage as error:
            self.fail(str(error), param, ctx)


class Json(Parameter):
    """A JSON value; `-` reads it from standard input."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        text = sys.stdin.buffer.read() if value == "-" else value.encode()
        try:
            return loads(text)
        except DecodeError as error:
            hint = "" if value == "-" else "; text needs quotes inside: '\"hello\"'"
            self.fail(f"{error}{hint}", param, ctx)


class Header(Parameter):
    """NAME=VALUE."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, separator, text = value.partition("=")
        if not separator or not name:
            self.fail(f"{value!r} is no header; write NAME=VALUE", param, ctx)
        return name, text


class EffectState(Parameter):
    """NAME=done, NAME=not-done, or NAME=done:JSON with what `ctx.once` shall return."""

    name = "name=done|not-done"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> EffectWord:
        if isinstance(value, EffectWord):
            return value
        found = _EFFECT.fullmatch(value)
        if found is None or (found["value"] is not None and found["word"] == "not-done"):
            self.fail(
                f"{value!r} says nothing about an effect; write NAME=done, NAME=done:JSON or "
                "NAME=not-done",
                param,
                ctx,
            )
        text = (found["value"] or "null").encode()
        try:
            loads(text)
        except DecodeError as error:
            self.fail(f"the result of {found['name']!r} is {error}", param, ctx)
        return EffectWord(name=found["name"], word=Resumption(found["word"]), value=text)


class PriorityName(Parameter):
    """low, normal, high, critical, or 0 to 3."""

    name = "priority"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return int(value)
        text = value.strip()
        if text in {str(int(each)) for each in Priority}:
            return int(text)
        if text.upper() in Priority.__members__:
            return int(Priority[text.upper()])
        self.fail(
            f"{value!r} is no priority; write low, normal, high, critical or 0 to 3", param, ctx
        )
