"""Load a `Config` from file, environment and arguments, or raise one error with all mistakes."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ackbone.core.errors import ConfigError
from ackbone.triggers.config import QueueTriggerConfig

from .cross_checks import check
from .environment import given_in, graft, node_of, overrides_of
from .nodes import Node, Problems, Where
from .settings import NOT_SETTINGS, Config, Trigger
from .settings_reader import Reader, fields_of, shape_of
from .substitution import parse_dotenv, read_text

T = TypeVar("T")
FILE_NAME = "ackbone.yaml"
_BROKEN_LINE = "expected NAME=value; put a value with quotes or line breaks in quotes"


class _Document(Config, frozen=True, kw_only=True):
    """The content of the file: the settings, and one trigger as `queue_trigger`."""

    queue_trigger: Trigger | None = None

    def __post_init__(self) -> None:
        """Skip the check of `Config`: the reader checks this."""


def load_config(
    path: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Load the configuration: `path`, else `$ACKBONE_CONFIG`, else `./ackbone.yaml`, else defaults.

    `ACKBONE__SECTION__KEY` in the environment or in `.env` wins over the file; `overrides`
    (`{"worker.slots": 4}`) win over both. Raises ConfigError with all mistakes.
    """
    environ = os.environ if environ is None else environ
    cwd = Path(os.path.abspath(cwd or "."))
    problems = Problems()
    if path is None and not environ.get("ACKBONE_CONFIG"):
        file, named = _find(None, variables_of(environ, [cwd], problems), cwd, problems)
    else:
        file, named = _find(path, environ, cwd, problems)
    folder = file.parent if file else cwd
    variables = variables_of(environ, [folder, cwd], problems)
    root = Node(value={}, where=Where(named))
    if file is not None:
        root = tree_of(file, named, variables, problems)
    _unwrap(root)
    for segments, leaf in overrides_of(variables, overrides or {}, problems):
        graft(root, _Document, segments, leaf, problems)
    reader = Reader(
        problems,
        folders={"file": folder, "env": cwd, "argument": cwd},
        elsewhere=settings_by_last_name(),
    )
    document = reader.section(root, _Document, "")
    document = _assemble(document, reader, file, cwd)
    document = check(document, reader, Where(named))
    if problems:
        raise ConfigError(problems.texts())
    return Config(**{name: getattr(document, name) for name in Config.__struct_fields__})


def checked(config: Config) -> dict[str, Any]:
    """Return the fields of a Config that was built in Python, converted and checked like a file.

    Raises ConfigError with all mistakes.
    """
    given = {name: v for name, v in given_in(config).items() if name not in NOT_SETTINGS}
    if not given:
        return {}
    where = Where("Config", origin="argument")
    problems = Problems()
    reader = Reader(problems, folders={"argument": Path.cwd()})
    root = Node(value={name: node_of(value, where) for name, value in given.items()}, where=where)
    found = check(reader.section(root, _Document, ""), reader, where)
    if problems:
        raise ConfigError(problems.texts())
    fields = {name: getattr(found, name) for name in given}
    return fields if config.origins else {**fields, "origins": reader.origins}


def load_queue_trigger_config(
    config_path: Path | str, *, environ: Mapping[str, str] | None = None
) -> QueueTriggerConfig:
    """Load the section `queue_trigger` of a YAML file.

    Raises ConfigError if it cannot be read: no file, no section, an unset variable, an unknown key,
    a wrong type. `validate_config` checks the values.
    """
    file = Path(os.path.abspath(config_path))
    environ = os.environ if environ is None else environ
    problems = Problems()
    variables = variables_of(environ, [file.parent, Path.cwd()], problems)
    root = tree_of(file, str(config_path), variables, problems, only="queue_trigger")
    section = root.value.get("queue_trigger") if isinstance(root.value, dict) else None
    if section is None and not problems:
        text = "the section is missing; write `queue_trigger:` and its settings below it"
        problems.add(Where(str(config_path)), "queue_trigger", text)
    reader = Reader(problems, folders={"file": file.parent})
    trigger = reader.section(section, Trigger, "queue_trigger") if section else Trigger()
    if problems:
        raise ConfigError(problems.texts())
    return trigger.queue_trigger()


def _find(
    path: Path | str | None, environ: Mapping[str, str], cwd: Path, problems: Problems
) -> tuple[Path | None, str]:
    """Return the file to read and its name for error messages."""
    asked = path or environ.get("ACKBONE_CONFIG") or None
    if asked is None:
        file = cwd / FILE_NAME
        return (file, FILE_NAME) if os.path.lexists(file) else (None, FILE_NAME)
    file = cwd / asked
    if os.path.exists(file):
        return file, str(asked)
    if path is not None:
        hint = f"give another name, or none to use ./{FILE_NAME} or the defaults"
        problems.add(Where(str(asked)), "", f"there is no such file; {hint}")
    else:
        text = f"there is no file {str(asked)!r}; correct the variable or unset it"
        problems.add(Where("ACKBONE_CONFIG", origin="env"), "", text)
    return None, str(asked)


def tree_of(
    file: Path,
    named: str,
    variables: Mapping[str, str],
    problems: Problems,
    only: str | None = None,
) -> Node:
    """Return the nodes of a YAML file; a broken node if it cannot be read."""
    from .yaml_nodes import parse  # import PyYAML only if there is a file

    try:
        text = read_text(file)
    except ValueError as error:
        problems.add(Where(named), "", f"the file {error}")
        return Node(value={}, where=Where(named), broken=True)
    root = parse(text, named, variables=variables, folder=file.parent, problems=problems, only=only)
    if root.value is None:
        root.value = {}
    if not isinstance(root.value, dict):
        what = "expected settings such as `broker: sqlite`, one per line; found a single value"
        what = what if not isinstance(root.value, list) else what.replace("single value", "list")
        problems.add(root.where, "", what)
        root.value = {}
    return root


def variables_of(
    environ: Mapping[str, str], folders: list[Path], problems: Problems
) -> dict[str, str]:
    """Return the variables of the environment and of the first `.env` file that exists."""
    file = next((f / ".env" for f in folders if os.path.isfile(f / ".env")), None)
    if file is None:
        return dict(environ)
    name = ".env" if file.parent == folders[-1] else str(file)
    try:
        found, bad = parse_dotenv(read_text(file))
    except ValueError as error:
        problems.add(Where(name), "", f"the file {error}")
        return dict(environ)
    for line in bad:
        problems.add(Where(name, line), "", _BROKEN_LINE)
    return {**found, **environ}


def _unwrap(root: Node) -> None:
    """Accept entries of `triggers` that are a whole `queue_trigger:` section."""
    triggers = root.value.get("triggers")
    if triggers is None or not isinstance(triggers.value, list):
        return
    for index, entry in enumerate(triggers.value):
        if isinstance(entry.value, dict) and list(entry.value) == ["queue_trigger"]:
            triggers.value[index] = entry.value["queue_trigger"]


def _assemble(document: _Document, reader: Reader, file: Path | None, cwd: Path) -> _Document:
    """Complete the document: `queue_trigger` becomes the last trigger, `home` absolute."""
    fields: dict[str, Any] = {}
    if document.queue_trigger is not None:
        last = f"triggers[{len(document.triggers)}]"
        fields["triggers"] = (*document.triggers, document.queue_trigger)
        reader.places = _renamed(reader.places, "queue_trigger", last)
        reader.origins = _renamed(reader.origins, "queue_trigger", last)
    if "home" not in reader.places:
        fields["home"] = cwd / ".ackbone"
    return msgspec.structs.replace(document, **fields, file=file, origins=reader.origins)


def _renamed(paths: Mapping[str, T], old: str, new: str) -> dict[str, T]:
    return {
        new + path.removeprefix(old) if path == old or path.startswith(old + ".") else path: value
        for path, value in paths.items()
    }


@functools.cache
def settings_by_last_name() -> Mapping[str, str]:
    """Return the paths of settings by last name, for names that only one setting has."""
    found: dict[str, list[str]] = {}
    for name, declared in fields_of(Config).items():
        found.setdefault(name, []).append(name)
        shape = shape_of(declared)
        if shape.kind == "section":
            for field in fields_of(shape.inner):
                found.setdefault(field, []).append(f"{name}.{field}")
    return {name: paths[0] for name, paths in found.items() if len(paths) == 1}
