"""Values with the place where they were written, and the list of mistakes in them."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from ackbone.core.secret import is_secret_name, mask_value

Origin = Literal["file", "env", "argument"]


class Where(msgspec.Struct, frozen=True):
    """The place where a value was written."""

    name: str
    """The name of the file or the variable."""
    line: int | None = None
    origin: Origin = "file"

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


class Problems:
    """The mistakes found so far."""

    def __init__(self) -> None:
        self._found: list[tuple[str, int, str]] = []
        self.paths: set[str] = set()
        """The paths of the settings that have a mistake."""

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, where: Where, path: str, text: str) -> None:
        self.paths.add(path)
        at = f"{where}: {path}" if path else str(where)
        self._found.append((where.name, where.line or 0, f"{at}: {text}"))

    def texts(self) -> list[str]:
        """Return the mistakes by source, in the order in which sources were read, then by line."""
        sources = {name: number for number, (name, _, _) in reversed([*enumerate(self._found)])}
        ordered = sorted(self._found, key=lambda found: (sources[found[0]], found[1]))
        return list(dict.fromkeys(text for _, _, text in ordered))


class Node(msgspec.Struct, kw_only=True):
    """A value and its place. Sections are dicts of nodes, lists are lists of nodes."""

    value: Any
    where: Where
    text: str | None = None
    """The text of a loose value; `value` is what YAML makes of it."""
    broken: bool = False
    """A mistake was reported; the value must not be used."""

    @property
    def loose(self) -> bool:
        """True for a value from a variable, which may be read as a number or as text."""
        return self.text is not None


BROKEN_TEXT = "contains half of a character (a lone surrogate, such as \\ud800); remove it"


def is_broken_text(value: Any) -> bool:
    """Return True for text that cannot be encoded."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def join(path: str, key: str | int) -> str:
    """Return the path of a value below `path`: `a.b`, `a[0]`, `a["odd key"]`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if not key.replace("-", "_").isidentifier():
        return f'{path}["{key[:80]}"]'
    return f"{path}.{key}" if path else key


def last_name(path: str) -> str:
    """Return the name of a value: `waits_s` for `queues.a.waits_s[3]`."""
    return re.sub(r"(\[\d+\])+\Z", "", path).rpartition(".")[2]


def shown(node: Node, path: str) -> str:
    """Describe a value for an error message, without secrets and values of variables."""
    value = node.value
    if isinstance(value, dict):
        return "a section with keys"
    if isinstance(value, list):
        return "a list"
    if is_secret_name(last_name(path)):
        return "a value that is not shown here"
    if node.loose and node.where.origin == "file":
        return "the value of the ${…} (not shown: it may be secret)"
    return plain_words(value)


def plain_words(value: Any) -> str:
    """Describe a plain value."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        if isinstance(value, int) and abs(value) > 10**30:
            return "a number with very many digits"
        return f"the number {value!r}"
    text = mask_value(str(value))
    return f"the text {text if len(text) <= 60 else text[:57] + '...'!r}"
