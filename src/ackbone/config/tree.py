"""Values that know where they were written, and the list of what is wrong with them."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from .secret import is_secret_name, mask_value

Origin = Literal["file", "env", "argument"]


class Where(msgspec.Struct, frozen=True):
    """The place where a value was written."""

    name: str
    """The file's or the variable's name."""
    line: int | None = None
    origin: Origin = "file"

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


class Problems:
    """Every mistake found so far."""

    def __init__(self) -> None:
        self._found: list[tuple[str, int, str]] = []
        self.paths: set[str] = set()
        """What they are about."""

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, where: Where, path: str, text: str) -> None:
        self.paths.add(path)
        at = f"{where}: {path}" if path else str(where)
        self._found.append((where.name, where.line or 0, f"{at}: {text}"))

    def texts(self) -> list[str]:
        """Grouped by source in the order in which sources spoke up, each in order of lines."""
        sources = {name: number for number, (name, _, _) in reversed([*enumerate(self._found)])}
        ordered = sorted(self._found, key=lambda found: (sources[found[0]], found[1]))
        return list(dict.fromkeys(text for _, _, text in ordered))


class Node(msgspec.Struct, kw_only=True):
    """A value and where it stands. Sections are dicts of nodes, lists are lists of nodes."""

    value: Any
    where: Where
    text: str | None = None
    """A loose value as it was written; `value` is then what YAML makes of it."""
    broken: bool = False
    """A mistake was reported already; the value means nothing."""

    @property
    def loose(self) -> bool:
        """From a variable: a number or a text, as the setting wants it."""
        return self.text is not None


BROKEN_TEXT = (
    "holds half of a character (a lone surrogate, such as \\ud800), which is no text; remove it"
)


def is_broken_text(value: Any) -> bool:
    """Whether this is a text that no file, terminal or database can hold."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def join(path: str, key: str | int) -> str:
    """The path of a value below `path`: `a.b`, `a[0]`, `a["odd key"]`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if not key.replace("-", "_").isidentifier():
        return f'{path}["{key[:80]}"]'
    return f"{path}.{key}" if path else key


def last_name(path: str) -> str:
    """The name that a value goes by: `waits_s` for `queues.a.waits_s[3]`."""
    return re.sub(r"(\[\d+\])+\Z", "", path).rpartition(".")[2]


def shown(node: Node, path: str) -> str:
    """What was found there, in words; secrets and what variables gave are not repeated."""
    value = node.value
    if isinstance(value, dict):
        return "a section with keys of its own"
    if isinstance(value, list):
        return "a list"
    if is_secret_name(last_name(path)):
        return "a value that is not shown here"
    if node.loose and node.where.origin == "file":
        return "what the ${…} there stands for (not shown: it may be secret)"
    return plain_words(value)


def plain_words(value: Any) -> str:
    """A plain value in words."""
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
