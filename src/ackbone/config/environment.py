"""Put settings from variables (`ACKBONE__WORKER__SLOTS=4`) and arguments over those of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ackbone.core.secret import Secret

from .nodes import Node, Problems, Where, join
from .settings_reader import fields_of, shape_of

PREFIX = "ACKBONE__"
_STEP = re.compile(r'\.?([^.\[\]]+)|\[(\d+)\]|\["([^"]*)"\]')


def overrides_of(
    variables: Mapping[str, str], arguments: Mapping[str, Any], problems: Problems
) -> list[tuple[list[str], Node]]:
    """Return the paths and values that override the file, in order: later ones win."""
    found: list[tuple[list[str], Node]] = []
    for name in sorted(variables, key=_by_number):
        if not name.startswith(PREFIX):
            continue
        segments = name.removeprefix(PREFIX).split("__")
        if not all(segments):
            text = "is not the name of a setting; write ACKBONE__SECTION__KEY"
            problems.add(Where(name, origin="env"), "", text)
            continue
        found.append((segments, _variable(name, variables[name], problems)))
    found += _home(variables, problems)
    found += _protocol(variables)
    for path, value in arguments.items():
        segments = ["".join(step) for step in _STEP.findall(path)]
        found.append((segments, node_of(value, Where(f"argument {path}", origin="argument"))))
    return found


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `…__2__…` before `…__10__…`, so that a list grows in order."""
    return [(int(part), "") if _digits(part) else (-1, part) for part in name.split("__")]


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7


def _home(variables: Mapping[str, str], problems: Problems) -> list[tuple[list[str], Node]]:
    """`ACKBONE_HOME`, the short name of `ACKBONE__HOME`."""
    home = variables.get("ACKBONE_HOME")
    if not home:
        return []
    where = Where("ACKBONE_HOME", origin="env")
    if variables.get(PREFIX + "HOME", home) != home:
        problems.add(where, "home", f"{PREFIX}HOME names another folder; unset one of the two")
    return [(["HOME"], Node(value=home, text=home, where=where))]


def _protocol(variables: Mapping[str, str]) -> list[tuple[list[str], Node]]:
    """Return settings from the variables of the task protocol. Variables of ours win over them."""
    found = []
    for name in ("MAX_RETRIES", "HEARTBEAT_INTERVAL_S", "VISIBILITY_TIMEOUT_S"):
        text = variables.get(name)
        if text and f"{PREFIX}TASKS__{name}" not in variables:
            found.append((["TASKS", name], _variable(name, text, Problems())))
    return found


def _variable(name: str, text: str, problems: Problems) -> Node:
    """Return the value of a variable, read as YAML; `[…]` and `{…}` are lists and sections."""
    from .yaml_nodes import parse, resolve

    where = Where(name, origin="env")
    if text.lstrip()[:1] not in ("[", "{"):
        return Node(value=resolve(text), text=text, where=where)
    inner = Problems()
    escaped = text.replace("$", "$$")
    node = parse(escaped, name, variables={}, folder=Path(), problems=inner)
    for problem in inner.texts():
        problems.add(where, "", problem.partition(": ")[2])
    return _placed(node, where)


def _placed(node: Node, where: Where) -> Node:
    """Return the node with the same place for all its values."""
    value = node.value
    if isinstance(value, dict):
        value = {key: _placed(child, where) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_placed(child, where) for child in value]
    return Node(value=value, where=where, broken=node.broken)


def node_of(value: Any, where: Where) -> Node:
    """Return the node of an argument: a plain Python value, or a struct of settings."""
    if isinstance(value, msgspec.Struct):
        value = {name: node_of(item, where) for name, item in given_in(value).items()}
    elif isinstance(value, Mapping):
        value = {str(key): node_of(item, where) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        value = [node_of(item, where) for item in value]
    elif value is not None and not isinstance(value, bool | int | float | str | Secret):
        value = str(value)
    return Node(value=value, where=where)


def given_in(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct that differ from their defaults."""
    defaults = type(struct).__struct_defaults__
    names = struct.__struct_fields__[-len(defaults) :]
    found = {name: getattr(struct, name) for name in struct.__struct_fields__}
    for name, default in zip(names, defaults, strict=True):
        usual = default.factory() if hasattr(default, "factory") else default
        if type(found[name]) is type(usual) and found[name] == usual:
            del found[name]
    return found


def graft(root: Node, struct: Any, segments: list[str], leaf: Node, problems: Problems) -> None:
    """Put `leaf` below `root`, at the path that the segments give."""
    node, declared, path = root, struct, ""
    for number, segment in enumerate(segments):
        shape = shape_of(declared)
        last = number == len(segments) - 1
        empty: Any = [] if shape.kind == "list" else {}
        if node.value is None or node.broken:
            node.value, node.broken = empty, False
        if type(node.value) is not type(empty):
            return  # the reader reports this mistake of the file
        key = _key(node.value, segment, shape.kind, leaf.where.origin)
        path = join(path, key)
        if isinstance(key, int):
            if key > len(node.value):
                text = f"entries are numbered without gaps: the next one is {len(node.value)}"
                problems.add(leaf.where, path, text)
                return
            if key == len(node.value):
                node.value.append(Node(value=None, where=leaf.where))
        elif shape.kind == "list":
            problems.add(leaf.where, path, "an entry of a list has a number, from 0")
            return
        if shape.kind == "section":
            declared = fields_of(shape.inner).get(str(key), Any)
        else:
            declared = shape.inner
        if last:
            node.value[key] = leaf
            return
        if shape_of(declared).kind in ("path", "value"):
            problems.add(leaf.where, path, "is a single value without keys")
            return
        if not isinstance(key, int):
            node.value.setdefault(key, Node(value=None, where=leaf.where))
        node = node.value[key]


def _key(value: Any, segment: str, kind: str, origin: str) -> str | int:
    """Return the key for a segment: `MY_QUEUE` is `my-queue` if the file has this key."""
    if isinstance(value, list):
        return int(segment) if _digits(segment) else segment
    if kind == "section":
        return segment.lower()
    if segment in value or origin == "argument":
        return segment
    wanted = _folded(segment)
    near = [key for key in value if _folded(key) == wanted]
    return near[0] if near else segment.lower()


def _folded(name: str) -> str:
    return re.sub(r"[-.: ]", "_", name).lower()
