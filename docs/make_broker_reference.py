"""Write docs/reference/brokers.md from the adapters: `python docs/make_broker_reference.py`.

A test renders it, too, and fails if the page is not what comes out here.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ackbone.brokers.registry import KINDS, BrokerKind, make_broker
from ackbone.core import broker as port
from ackbone.core import task_protocol
from ackbone.core.broker import Broker, Capabilities

PAGE = Path(__file__).with_name("reference") / "brokers.md"
YES, NO = "yes", "–"
WITHOUT = {"lease_s": NO, "hold_limit_s": NO, "max_body": "no limit"}
"""What a capability without a value says."""
HEAD = """# Brokers and what they can do

<!-- Written by docs/make_broker_reference.py from the adapters themselves; not edited by hand. -->

Every broker keeps the same promises: what a broker cannot do itself, the engine and the store do.
These tables say what is the broker's own part. The conformance suite checks these claims on the
real servers ([adding a broker](../guides/adding-a-broker.md)).
"""


class Column(NamedTuple):
    """One broker."""

    kind: BrokerKind
    broker: Broker
    source: type[Any]


class Role(NamedTuple):
    """One optional role."""

    name: str
    text: str
    members: frozenset[str]
    of_source: bool

    def is_of(self, column: Column) -> bool:
        owner = column.source if self.of_source else type(column.broker)
        # `publish_within_s` and the like are set in __init__, so the instance is asked, too.
        return all(
            hasattr(owner, name) or (not self.of_source and hasattr(column.broker, name))
            for name in self.members
        )


def render() -> str:
    """Return the whole page."""
    columns = [_column(kind) for kind in KINDS if kind.adapter]
    later = [kind.title for kind in KINDS if not kind.adapter]
    parts = [HEAD, *_kinds(columns)]
    if later:
        parts.append(f"This version has no adapter for {_listed(later)}.\n")
    parts += _capabilities(columns)
    parts += _roles(columns)
    return "\n".join(parts).rstrip() + "\n"


def _column(kind: BrokerKind) -> Column:
    broker = make_broker(kind.example)
    source = inspect.get_annotations(type(broker).subscribe, eval_str=True)["return"]
    return Column(kind, broker, source)


def _kinds(columns: Sequence[Column]) -> Iterator[str]:
    yield "| broker | URL | needs | a server of its own |\n|---|---|---|---|"
    for kind, *_ in columns:
        needs = f"`ackbone[{kind.extra}]`" if kind.extra else "nothing more"
        others = ", ".join(f"`{scheme}:`" for scheme in kind.schemes[1:])
        urls = f"`{kind.example}`" + (f", also {others}" if others else "")
        yield f"| {kind.title} | {urls} | {needs} | {YES if kind.is_server else NO} |"
    yield ""


def _capabilities(columns: Sequence[Column]) -> Iterator[str]:
    yield "## Capabilities\n"
    yield _head("", columns)
    notes: list[str] = []
    for name in Capabilities.__struct_fields__:
        cells = []
        for kind, broker, _ in columns:
            cell = _cell(name, getattr(broker.capabilities, name))
            if name in kind.varies:
                cell += " ¹"
                notes.append(f"- {kind.title}, `{name}`: {kind.varies[name]}")
            cells.append(cell)
        yield f"| `{name}` | {' | '.join(cells)} |"
    yield "\n¹ It depends on the server or on the URL; the table has the default:\n"
    yield from notes
    yield "\nThe meanings:\n"
    texts = _docstrings(Capabilities)
    for name in Capabilities.__struct_fields__:
        yield f"- **`{name}`**: {texts.get(name) or _meaning_of_values(name)}"
    yield ""


def _roles(columns: Sequence[Column]) -> Iterator[str]:
    yield "## Roles\n"
    yield "A broker or its source has a role if it has the role's methods.\n"
    yield _head("role", columns)
    roles = sorted(_all_roles(), key=lambda role: (role.of_source, role.name))
    for role in roles:
        cells = [YES if role.is_of(column) else NO for column in columns]
        yield f"| `{role.name}` | {' | '.join(cells)} |"
    yield ""
    for of_source, whose in ((False, "Of a broker"), (True, "Of a source, which reads one queue")):
        yield f"{whose}:\n"
        yield from (f"- **`{r.name}`**: {r.text}" for r in roles if r.of_source is of_source)
        yield ""


def _all_roles() -> Iterator[Role]:
    """Every protocol whose docstring begins with "Optional role"."""
    for module in (port, task_protocol):
        for name, found in vars(module).items():
            text = inspect.getdoc(found) if inspect.isclass(found) else None
            if text and text.startswith("Optional role") and found.__module__ == module.__name__:
                head, _, what = text.partition("\n\n")[0].partition(": ")
                members = {
                    each
                    for each in (*vars(found), *found.__annotations__)
                    if not each.startswith("_")
                }
                yield Role(name, _line(what), frozenset(members), "source" in head)


def _head(first: str, columns: Sequence[Column]) -> str:
    titles = " | ".join(column.kind.title for column in columns)
    return f"| {first} | {titles} |\n|---|{'---|' * len(columns)}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return WITHOUT[name]
    if isinstance(value, bool):
        return YES if value else NO
    if name.endswith("_s"):
        return f"{value:g} s"
    return f"{value / 2**20:g} MiB" if isinstance(value, int) else str(value)


def _docstrings(kind: type[Any]) -> dict[str, str]:
    """Return the texts below the fields or members of a class, by name."""
    (found,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(found, ast.ClassDef)  # noqa: S101
    texts = {}
    for field, text in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign | ast.Assign) and isinstance(text, ast.Expr):
            target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
            assert isinstance(target, ast.Name)  # noqa: S101
            texts[target.id] = _line(ast.literal_eval(text.value))
    return texts


def _meaning_of_values(name: str) -> str:
    """Return the meanings of the enum that is the field's type, and of its values."""
    kind = {field.name: field.type for field in msgspec.structs.fields(Capabilities)}[name]
    texts = _docstrings(kind)
    values = [f"`{each.value}`: {texts[each.name]}" for each in kind if each.name in texts]
    return " ".join([_line(inspect.getdoc(kind) or ""), *values])


def _line(text: str) -> str:
    """Return a text on one line, with a capital letter."""
    line = " ".join(text.split())
    return line[:1].upper() + line[1:]


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
