"""A rule file, read as the settings are: every mistake at once, with its line and a hint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ackbone.core.errors import ConfigError
from ackbone.governance.reading import RuleDocument, rules_of
from ackbone.governance.rules import Rules

from .load import tree_of, variables_of
from .reader import Reader
from .tree import Node, Problems, Where


def load_rules(path: Path | str, *, environ: Mapping[str, str] | None = None) -> Rules:
    """The rules of a file. Raises ConfigError with every mistake there is."""
    file = Path(os.path.abspath(path))
    environ = os.environ if environ is None else environ
    problems = Problems()
    if not file.exists():
        problems.add(Where(str(path)), "", "there is no such rule file; `rules:` names it")
        raise ConfigError(problems.texts())
    variables = variables_of(environ, [file.parent, Path.cwd()], problems)
    root = tree_of(file, str(path), variables, problems)
    if root.broken:
        raise ConfigError(problems.texts())
    reader = Reader(problems, folders={"file": file.parent})
    document = reader.section(root, RuleDocument, "")
    fallback = Where(str(path))

    def say(at: str, text: str) -> None:
        if at not in problems.paths:  # it is known that something is wrong there
            reader.say(at, text, fallback)

    for at in _empty_matches(root):
        say(at, "says nothing; name what the rule is about, or write `match: {}` for everything")
    rules = rules_of(document, say)
    if problems:
        raise ConfigError(problems.texts())
    return rules


def _empty_matches(root: Node) -> Iterator[str]:
    """`match:` with nothing below it: lines that were commented out would mean everything."""
    rules = root.value.get("rules")
    entries = rules.value if rules is not None and isinstance(rules.value, list) else ()
    for number, entry in enumerate(entries):
        match = entry.value.get("match") if isinstance(entry.value, dict) else None
        if match is not None and match.value is None and not match.broken:
            yield f"rules[{number}].match"
