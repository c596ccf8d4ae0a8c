"""Load a rules file like the settings: all mistakes at once, with lines and hints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ackbone.core.errors import ConfigError
from ackbone.governance.reading import RuleDocument, rules_of
from ackbone.governance.rules import Rules

from .load import tree_of, variables_of
from .nodes import Node, Problems, Where
from .settings_reader import Reader


def load_rules(path: Path | str, *, environ: Mapping[str, str] | None = None) -> Rules:
    """Load the rules of a file. Raises ConfigError with all mistakes."""
    file = Path(os.path.abspath(path))
    environ = os.environ if environ is None else environ
    problems = Problems()
    if not file.exists():
        problems.add(Where(str(path)), "", "there is no such rules file; correct `rules:`")
        raise ConfigError(problems.texts())
    variables = variables_of(environ, [file.parent, Path.cwd()], problems)
    root = tree_of(file, str(path), variables, problems)
    if root.broken:
        raise ConfigError(problems.texts())
    reader = Reader(problems, folders={"file": file.parent})
    document = reader.section(root, RuleDocument, "")
    fallback = Where(str(path))

    def say(at: str, text: str) -> None:
        if at not in problems.paths:  # report one mistake per setting
            reader.say(at, text, fallback)

    for at in _empty_matches(root):
        say(at, "is empty; write what the rule matches, or `match: {}` for every message")
    rules = rules_of(document, say)
    if problems:
        raise ConfigError(problems.texts())
    return rules


def _empty_matches(root: Node) -> Iterator[str]:
    """Find `match:` without a value: with its lines commented out it would match everything."""
    rules = root.value.get("rules")
    entries = rules.value if rules is not None and isinstance(rules.value, list) else ()
    for number, entry in enumerate(entries):
        match = entry.value.get("match") if isinstance(entry.value, dict) else None
        if match is not None and match.value is None and not match.broken:
            yield f"rules[{number}].match"
