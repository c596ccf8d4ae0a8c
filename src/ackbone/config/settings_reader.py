"""Read nodes as settings: check each value against the type of the field, collect all mistakes."""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec

from ackbone.core.secret import Secret, is_secret_name, mask_value

from .nodes import (
    BROKEN_TEXT,
    Node,
    Problems,
    Where,
    is_broken_text,
    join,
    last_name,
    plain_words,
    shown,
)
from .settings import NOT_SETTINGS

S = TypeVar("S", bound=msgspec.Struct)
_FAILED: Any = object()
_UNITS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_SIZES = {"b": 1, "k": 1024, "kb": 1024, "kib": 1024, "m": 1024**2, "mb": 1024**2, "mib": 1024**2}
_QUANTITY = re.compile(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*([A-Za-z]{1,3})\s*\Z")


class Shape(NamedTuple):
    """The type of a field, taken apart."""

    kind: Literal["section", "map", "list", "path", "any", "value"]
    inner: Any
    """The struct, the type of the items of a map or a list, or the plain type."""
    optional: bool
    whole: Any
    """The declared type."""


def shape_of(declared: Any) -> Shape:
    """Return the shape of a declared type."""
    whole = declared
    optional = False
    if get_origin(declared) in (Union, UnionType):
        members = [member for member in get_args(declared) if member is not NoneType]
        optional = len(members) < len(get_args(declared))
        declared = members[0]
    origin = get_origin(declared)
    if declared is Any:
        return Shape("any", Any, True, whole)
    if declared is Path:
        return Shape("path", Path, optional, whole)
    if isinstance(declared, type) and issubclass(declared, msgspec.Struct):
        return Shape("section", declared, optional, whole)
    if origin is dict:
        return Shape("map", get_args(declared)[1], optional, whole)
    if origin is tuple:
        return Shape("list", get_args(declared)[0], optional, whole)
    return Shape("value", declared, optional, whole)


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return names and types of the settings of a section."""
    fields = msgspec.structs.fields(struct)
    return {field.name: field.type for field in fields if field.name not in NOT_SETTINGS}


class Reader:
    """Reads nodes as settings and collects the mistakes."""

    def __init__(
        self,
        problems: Problems,
        folders: Mapping[str, Path],
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.problems = problems
        self.folders = folders
        """The folder to which relative paths are relative, by origin of the value."""
        self.elsewhere = elsewhere or {}
        """Full paths of settings by last name, to suggest the right section."""
        self.places: dict[str, Where] = {}
        """The place of each value and section that was read."""
        self.origins: dict[str, str] = {}
        """The origin of each single value."""

    def say(self, path: str, text: str, fallback: Where) -> None:
        """Add a mistake at the place of the value, or of the section around it."""
        place, at = path, self.places.get(path)
        while at is None and place:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
            at = self.places.get(place)
        self.problems.add(at or fallback, path, text)

    def section(self, node: Node, struct: type[S], path: str) -> S:
        """Return the struct, with defaults for values that are missing or wrong."""
        if node.value is None or node.broken:
            return struct()
        if not isinstance(node.value, dict):
            known = ", ".join(list(fields_of(struct))[:4])
            text = f"expected a section (keys such as {known}), found {shown(node, path)}"
            self.problems.add(node.where, path, text)
            return struct()
        fields = fields_of(struct)
        defaults = struct()
        values: dict[str, Any] = {}
        for key, child in node.value.items():
            at = join(path, key)
            if key not in fields:
                self.problems.add(child.where, at, self.unknown(key, path, fields))
                continue
            value = self.read(child, fields[key], at, default=getattr(defaults, key))
            if value is not _FAILED:
                values[key] = value
        return struct(**values)

    def unknown(self, key: str, path: str, fields: Mapping[str, Any]) -> str:
        """Return the message for an unknown key."""
        near = difflib.get_close_matches(key.lower(), fields, 1, 0.6)
        if near:
            return f"unknown setting; did you mean {join(path, near[0])}?"
        if key in self.elsewhere:
            return f"unknown setting here; did you mean {self.elsewhere[key]}?"
        return f"unknown setting; known here: {', '.join(sorted(fields))}"

    def read(self, node: Node, declared: Any, path: str, default: Any = None) -> Any:
        """Return the value of a field, or `_FAILED` after a mistake."""
        broken = is_broken_text(node.value)  # of a variable; the file's values were checked before
        if broken:
            self.problems.add(node.where, path, BROKEN_TEXT)
        if broken or node.broken:
            return _FAILED
        shape = shape_of(declared)
        if node.value is None and shape.kind in ("map", "list"):
            return _FAILED  # `queues:` without a value: use the default
        self.places[path] = node.where
        if shape.kind == "section":
            return self.section(node, shape.inner, path)
        if shape.kind == "map":
            return self.map(node, shape, path)
        if shape.kind == "list":
            return self.list(node, shape, path, default)
        if shape.kind == "path":
            return self.path(node, shape, path)
        if shape.kind == "any":
            return self.anything(node, path)
        return self.value(node, shape, path, default)

    def map(self, node: Node, shape: Shape, path: str) -> Any:
        if not isinstance(node.value, dict):
            text = f"expected a section with one key for each entry, found {shown(node, path)}"
            self.problems.add(node.where, path, text)
            return _FAILED
        if shape.inner is Any:
            return self.anything(node, path)
        found: dict[str, Any] = {}
        for key, child in node.value.items():
            value = self.read(child, shape.inner, join(path, key))
            if value is not _FAILED:
                found[key] = value
        return found

    def list(self, node: Node, shape: Shape, path: str, default: Any) -> Any:
        if not isinstance(node.value, list):
            name = last_name(path)
            example = f"{name}: [5, 25, 120]" if shape_of(shape.inner).kind == "value" else ""
            hint = f"; write for example {example}" if example else "; begin each entry with `- `"
            self.problems.add(node.where, path, f"expected a list, found {shown(node, path)}{hint}")
            return _FAILED
        self.leaf(node, path)
        items = [self.read(n, shape.inner, join(path, i)) for i, n in enumerate(node.value)]
        return tuple(item for item in items if item is not _FAILED)

    def path(self, node: Node, shape: Shape, path: str) -> Any:
        self.leaf(node, path)
        name = node.text if node.loose else node.value
        if name in (None, "") and shape.optional:
            return None
        if not isinstance(name, str) or not name or "\0" in name:
            text = f"expected a path, found {shown(node, path)}; write it as text, in quotes"
            self.problems.add(node.where, path, text)
            return _FAILED
        full = self.folders[node.where.origin] / os.path.expanduser(name)
        return Path(os.path.abspath(full))

    def anything(self, node: Node, path: str, *, secret: bool = False) -> Any:
        """Return a free value for an adapter; `secret` if the name of a section above says so.

        Values of `${…}` in the file stay text.
        """
        if node.broken:
            return None
        if isinstance(node.value, dict) and node.value:
            return {
                key: self.anything(child, join(path, key), secret=secret or is_secret_name(key))
                for key, child in node.value.items()
            }
        self.leaf(node, path)
        if isinstance(node.value, list):
            items = enumerate(node.value)
            return [self.anything(child, join(path, i), secret=secret) for i, child in items]
        as_text = node.loose and (node.where.origin == "file" or secret)
        return _protected(node.text if as_text else node.value, secret=secret)

    def leaf(self, node: Node, path: str) -> None:
        self.places[path] = node.where
        self.origins[path] = node.where.origin

    def value(self, node: Node, shape: Shape, path: str, default: Any) -> Any:
        """Read a number, text, choice or boolean."""
        self.leaf(node, path)
        given = node.value
        wants_text = shape.inner is str or get_origin(shape.inner) is Literal
        if node.loose:
            if node.text == "" and shape.optional:
                return None
            given = node.text if wants_text and not (given is None and shape.optional) else given
        if isinstance(given, str) and get_origin(shape.inner) is Literal:
            given = given.lower()
        try:
            if isinstance(given, float) and not math.isfinite(given):
                raise msgspec.ValidationError("not finite")
            return msgspec.convert(given, shape.whole)
        except (msgspec.ValidationError, OverflowError):
            found = shown(node, path)
            text = f"expected {expected(shape)}, found {found}{hint(node, shape, path, default)}"
            self.problems.add(node.where, path, text)
            return _FAILED


def expected(shape: Shape) -> str:
    """Describe the values that a plain field accepts."""
    kind, meta = shape.inner, None
    if get_origin(kind) is Annotated:
        kind, meta = get_args(kind)[:2]
    if get_origin(kind) is Literal:
        words = "one of " + ", ".join(get_args(kind))
    elif kind is bool:
        words = "true or false"
    elif kind in (int, float):
        words = ("a whole number" if kind is int else "a number") + _range(meta)
    else:
        words = "text"
    return f"{words}, or null" if shape.optional else words


def _range(meta: msgspec.Meta | None) -> str:
    if meta is None:
        return ""
    if meta.gt is not None:
        return f" above {_digits(meta.gt)} and up to {_digits(meta.le)}"
    return f" from {_digits(meta.ge)} to {_digits(meta.le)}"


def _digits(number: float | None) -> str:
    number = 0 if number is None else number
    return str(int(number)) if float(number).is_integer() else str(number)


def hint(node: Node, shape: Shape, path: str, default: Any) -> str:
    """Return what to write instead, if it can be guessed."""
    name = last_name(path)
    kind = get_args(shape.inner)[0] if get_origin(shape.inner) is Annotated else shape.inner
    value = node.value
    if get_origin(shape.inner) is Literal and isinstance(value, str):
        near = difflib.get_close_matches(value.lower(), get_args(shape.inner), 1)
        return f"; did you mean {near[0]}?" if near else ""
    if kind is str:
        plain = value is not None and not isinstance(value, dict | list) and not node.loose
        return "; put it in quotes" if plain else ""
    if isinstance(value, str) and kind in (int, float):
        guess = _quantity(value, name) or _unquoted(value)
        if guess is not None and (not node.loose or node.where.origin == "env"):
            return f"; write {_assignment(node, name, guess)}"
    if value is None and default is not None:
        return f"; remove the key for the default, {_example(default)}"
    if default is None:
        return ""
    return f"; write for example {_assignment(node, name, _example(default))}"


def _assignment(node: Node, name: str, value: str) -> str:
    """Return the assignment in the syntax of the place: a variable or YAML."""
    return f"{node.where.name}={value}" if node.where.origin == "env" else f"{name}: {value}"


def _quantity(text: str, name: str) -> str | None:
    """Convert `30s` or `256 KB` to the plain number that the setting needs."""
    match = _QUANTITY.match(text)
    factors = _UNITS if name.endswith("_s") else _SIZES if name.endswith("_bytes") else {}
    factor = factors.get(match[2].lower()) if match else None
    return _digits(round(float(match[1]) * factor, 6)) if match and factor else None


def _unquoted(text: str) -> str | None:
    return f"{text} without quotes" if re.fullmatch(r"\d{1,12}(\.\d{1,12})?", text) else None


def _example(default: Any) -> str:
    if isinstance(default, bool):
        return plain_words(default)
    return _digits(default) if isinstance(default, int | float) else str(default)


def _protected(value: Any, *, secret: bool) -> Any:
    """Return a plain value, as a `Secret` if its name says so or it is a URL with a password."""
    if value is None or isinstance(value, bool | Secret):
        return value
    if secret or (isinstance(value, str) and mask_value(value) != value):
        return Secret(str(value))
    return value
