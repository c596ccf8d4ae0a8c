"""Parse YAML text into nodes with line numbers.

Only the node tree of the safe loader is used, so no tag builds an object. Aliases are expanded up
to a limit, duplicate keys are mistakes, and `${…}` references are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ackbone.core.secret import is_secret_name

from .nodes import BROKEN_TEXT, Node, Problems, Where, is_broken_text, join, last_name
from .substitution import substitute

MAX_DEPTH = 32
MAX_VALUES = 50_000
_TAG = "tag:yaml.org,2002:"
_MAKERS = {
    _TAG + "null": yaml.SafeLoader.construct_yaml_null,
    _TAG + "bool": yaml.SafeLoader.construct_yaml_bool,
    _TAG + "int": yaml.SafeLoader.construct_yaml_int,
    _TAG + "float": yaml.SafeLoader.construct_yaml_float,
}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
"""Quoted pieces of the file in PyYAML's messages, which could be part of a password."""
_TEXT_TAGS = {_TAG + "str", _TAG + "timestamp", _TAG + "value"}
"""Tags of scalars that stay text. No setting is a date."""


def resolve(text: str) -> Any:
    """Return the YAML value of an unquoted scalar: a number, true, false, null, or the text."""
    loader = yaml.SafeLoader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return _construct(loader, yaml.ScalarNode(tag, text)) if tag in _MAKERS else text


def parse(
    text: str,
    name: str,
    *,
    variables: Mapping[str, str],
    folder: Path,
    problems: Problems,
    only: str | None = None,
) -> Node:
    """Parse a YAML text; with `only`, just that section of it."""
    try:
        root = _compose(text)
        if root is None:
            return Node(value=None, where=Where(name))
        return _Builder(name, variables, folder, problems, only).build(root, "", 0)
    except _Unreadable as error:
        problems.add(Where(name, error.line), "", str(error))
        return Node(value={}, where=Where(name), broken=True)


class _Unreadable(Exception):
    def __init__(self, what: str, line: int | None) -> None:
        super().__init__(what)
        self.line = line


class _Loader(yaml.SafeLoader):
    """Limits the depth, because the composer is recursive."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise _Unreadable(f"nested deeper than {MAX_DEPTH} levels", line)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _compose(text: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except _Unreadable:
        raise
    except Exception as error:  # also a ValueError, for "\UFFFFFFFF"
        raise _syntax(error) from error


def _syntax(error: Exception) -> _Unreadable:
    """Return line and message for invalid YAML, without the text, which may contain a secret."""
    if isinstance(error, yaml.reader.ReaderError):
        what = (
            f"not valid YAML: character number {error.position + 1} is a control character "
            "or another character that YAML forbids; remove it"
        )
        return _Unreadable(what, None)
    hint = "check the indentation, the colons and the quotes around there"
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        what = _QUOTED.sub(_hide, error.problem or error.context or "cannot be read")
        begin = error.context_mark
        if mark and begin and begin.line != mark.line:
            what += f", in the part that begins on line {begin.line + 1}"
        if "'{'" in what or "'}'" in what:
            hint = "inside { } and [ ], put a value with ${…} in quotes"
        return _Unreadable(f"not valid YAML: {what}; {hint}", mark.line + 1 if mark else None)
    return _Unreadable(f"not valid YAML ({type(error).__name__}); {hint}", None)


def _hide(quoted: re.Match[str]) -> str:
    """Hide a quoted piece, unless it is a single character or the name of a token."""
    inner = quoted[0][1:-1]
    return quoted[0] if len(inner) < 2 or inner.startswith("<") else "(not shown)"


def _construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """Return the value of a scalar, or the text if it does not fit the tag."""
    try:
        return _MAKERS[node.tag](loader, node)
    except (ValueError, KeyError, OverflowError, IndexError):
        return node.value


class _Builder:
    """Converts YAML nodes into our nodes."""

    def __init__(
        self,
        name: str,
        variables: Mapping[str, str],
        folder: Path,
        problems: Problems,
        only: str | None,
    ) -> None:
        self.name = name
        self.variables = variables
        self.folder = folder
        self.problems = problems
        self.only = only
        self.count = 0
        self.loader = yaml.SafeLoader("")

    def build(self, node: yaml.Node, path: str, depth: int, line: int | None = None) -> Node:
        """Convert a node; `line` is the line of the key, which error messages name."""
        where = Where(self.name, line or node.start_mark.line + 1)
        self.count += 1
        if self.count > MAX_VALUES:
            raise _Unreadable(
                f"holds more than {MAX_VALUES} values, aliases counted", where.line or 0
            )
        if depth > MAX_DEPTH:
            what = f"nested deeper than {MAX_DEPTH} levels; does an alias contain itself?"
            raise _Unreadable(what, where.line or 0)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Node(value=self.section(node, path, depth), where=where)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items = [self.build(n, join(path, i), depth + 1) for i, n in enumerate(node.value)]
            return Node(value=items, where=where)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path, where)
        return self.foreign_tag(node, path, where)

    def section(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                self.merge(value_node, path, depth, line, merged)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.add(Where(self.name, line), path, "a key must be text")
                continue
            key = str(key_node.value)
            if is_broken_text(key):
                self.problems.add(Where(self.name, line), path, f"a key {BROKEN_TEXT}")
                continue
            if not path and self.only not in (None, key):
                continue
            if key in own:
                first = own[key].where.line
                text = f"is set twice, first on line {first}; remove one of the two"
                self.problems.add(Where(self.name, line), join(path, key), text)
                continue
            own[key] = self.build(value_node, join(path, key), depth + 1, line)
        return {**merged, **own}

    def merge(
        self, node: yaml.Node, path: str, depth: int, line: int, into: dict[str, Node]
    ) -> None:
        """Add the keys of other sections (`<<: *base`) that are not set here."""
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                what = "`<<` takes a section, or a list of sections, such as `<<: *base`"
                self.problems.add(Where(self.name, line), path, what)
                continue
            if depth >= MAX_DEPTH:
                raise _Unreadable(f"nested deeper than {MAX_DEPTH} levels", line)
            for key, value in self.section(part, path, depth + 1).items():
                into.setdefault(key, value)

    def scalar(self, node: yaml.ScalarNode, path: str, where: Where) -> Node:
        if node.tag in _MAKERS:
            return Node(value=_construct(self.loader, node), where=where)
        if node.tag not in _TEXT_TAGS:
            return self.foreign_tag(node, path, where)
        done = substitute(node.value, self.variables, self.folder)
        problems = done.problems or ([BROKEN_TEXT] if is_broken_text(done.text) else [])
        for problem in problems:
            self.problems.add(where, path, problem)
        if problems:
            return Node(value=None, where=where, broken=True)
        if done.used:
            return Node(value=resolve(done.text), text=done.text, where=where)
        return Node(value=done.text, where=where)

    def foreign_tag(self, node: yaml.Node, path: str, where: Where) -> Node:
        hidden = is_secret_name(last_name(path))
        tag = "a tag (!…)" if hidden else f"the tag {node.tag.replace(_TAG, '!!')[:60]}"
        text = f"{tag} is not supported; remove it, or put text that begins with ! in quotes"
        self.problems.add(where, path, text)
        return Node(value=None, where=where, broken=True)
