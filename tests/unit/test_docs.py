"""The documents say what the code does: every table that can drift is compared with its source."""

import ast
import functools
import importlib.util
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import msgspec
import pytest
from msgspec import Meta

import ackbone
from ackbone.cli.root import cli
from ackbone.config.queues import Queue
from ackbone.config.settings import NOT_SETTINGS, Channel, Config, Subscriber, Trigger
from ackbone.core import errors, events
from ackbone.observe import metrics

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CODE = re.compile(r"`([^`]+)`")


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows_of(name: str) -> Iterator[list[str]]:
    """The cells of every row of every table, heads and rulers left out."""
    for line in text_of(name).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if line.startswith("| `") and len(cells) > 1:
            yield cells


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def number(value: float) -> str:
    return f"{value:.10g}"


def default_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return number(value)
        case tuple():
            return f"[{', '.join(map(default_of, value))}]"
        case dict():
            return "{}"
        case "":
            return '""'
        case _:
            return str(value)


def allowed(declared: Any) -> str:
    """What a setting of this type may be, in the words of the reference."""
    origin = get_origin(declared)
    if origin in (Union, UnionType):
        inner = [allowed(each) for each in get_args(declared) if each is not NoneType]
        return f"{', '.join(inner)} or null"
    if origin is Annotated:
        kind, *notes = get_args(declared)
        meta = next(note for note in notes if isinstance(note, Meta))
        assert kind in (int, float)
        assert meta.le is not None
        if meta.gt is not None:
            return f"over {number(meta.gt)}, up to {number(meta.le)}"
        assert meta.ge is not None
        return f"{number(meta.ge)} to {number(meta.le)}"
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in get_args(declared))
    if origin is tuple:
        return f"list of {allowed(get_args(declared)[0])}"
    if origin is dict:
        return "section"
    words = {bool: "true, false", str: "text", Path: "path", int: "whole number", float: "number"}
    return words[declared]


_MANY: dict[str, tuple[type[msgspec.Struct], str]] = {
    "queues": (Queue, "queues.<name>"),
    "channels": (Channel, "channels.<name>"),
    "subscribers": (Subscriber, "subscribers.<name>"),
    "triggers": (Trigger, "triggers[n]"),
}


def settings_of(struct: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Path, default and allowed values of every setting."""
    for field in msgspec.structs.fields(struct):
        if not path and field.name in NOT_SETTINGS:
            continue
        here = f"{path}.{field.name}" if path else field.name
        if here in _MANY:
            yield from settings_of(*_MANY[here])
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings_of(field.type, here)
        else:
            made = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if made else field.default
            yield here, default_of(default), allowed(field.type)


def test_every_setting_stands_in_the_reference() -> None:
    declared = {path: (default, kind) for path, default, kind in settings_of(Config)}
    documented: dict[str, tuple[str, str]] = {}
    for cells in rows_of("reference/config.md"):
        if len(cells) == 4:
            path = cells[0].strip("`")
            assert path not in documented, f"{path} stands there twice"
            assert len(cells[3]) > 5, f"{path}: its meaning is missing"
            documented[path] = (cells[1].strip("`"), cells[2])
    assert documented == declared


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def test_the_tree_of_errors_is_the_one_of_the_module() -> None:
    assert errors.__doc__ is not None
    tree = errors.__doc__[errors.__doc__.index("AckboneError\n") :].strip()
    assert f"```\n{tree}\n```" in text_of("reference/errors.md")
    names = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.AckboneError)
    }
    assert set(re.findall(r"\b[A-Z]\w+", _drawn_names(tree))) == names


def _drawn_names(tree: str) -> str:
    """The name at the end of each branch."""
    found = (
        re.match(r"[│ ]*(?:[├└]── )?([A-Z]\w+)(?:\s{2,}|$)", line) for line in tree.split("\n")
    )
    return " ".join(match[1] for match in found if match)


def test_drawn_parents_are_real_ones() -> None:
    """Depth in the drawing is inheritance in the code; the last branch is a remark, not a class."""
    assert errors.__doc__ is not None
    lines = errors.__doc__[errors.__doc__.index("AckboneError\n") :].strip().split("\n")
    parents: dict[int, type] = {}
    for line in lines:
        branch = re.match(r"([│ ]*(?:[├└]── )?)(.*)", line)
        assert branch is not None
        depth = len(branch[1]) // 4
        name = branch[2].split()[0]
        if not name[0].isupper():
            parents[depth] = errors.AckboneError
            continue
        error = getattr(errors, name)
        if depth:
            assert parents[depth - 1] in error.__bases__, f"{name} is drawn below another parent"
        parents[depth] = error


# ── events ───────────────────────────────────────────────────────────────────────────────────────


def test_every_event_stands_in_the_reference() -> None:
    named = {
        value
        for name, value in vars(events).items()
        if name.isupper() and isinstance(value, str) and "." in value
    }
    documented = {cells[0].strip("`") for cells in rows_of("reference/events.md")}
    assert documented == named
    final = text_of("reference/events.md").partition("## Final events")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z.]+)`", final, re.MULTILINE)) == events.FINAL_EVENTS


# ── the interface ────────────────────────────────────────────────────────────────────────────────


def test_every_public_name_stands_in_the_reference() -> None:
    words = set(CODE.findall(text_of("reference/api.md")))
    named = {word.split("(")[0] for word in words}
    missing = [name for name in ackbone.__all__ if name not in named]
    assert missing == []


@pytest.mark.parametrize(
    "name", ["App", "Context", "Message", "RetryPolicy", "Receipt", "Decision"]
)
def test_every_member_stands_in_the_reference(name: str) -> None:
    section = text_of("reference/api.md").partition(f"\n## `{name}`")[2].partition("\n## ")[0]
    assert section, f"there is no section about {name}"
    words = {re.split(r"[(\[ =:]", word)[0] for word in CODE.findall(section)}
    kind = getattr(ackbone, name)
    members = {member for member in vars(kind) if not member.startswith("_")}
    if issubclass(kind, msgspec.Struct):
        members |= set(kind.__struct_fields__)
    members -= {"struct_config", "struct_fields"}
    assert sorted(members - words) == []


# ── pages that are written from the code ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("page", "writer"),
    [("cli.md", "make_cli_reference.py"), ("brokers.md", "make_broker_reference.py")],
)
def test_a_page_that_is_written_from_the_code_is_current(page: str, writer: str) -> None:
    script = DOCS / writer
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hint = f"run: .venv/bin/python docs/{writer}"
    assert text_of(f"reference/{page}") == module.render(), hint


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────


def test_every_metric_stands_in_the_reference() -> None:
    documented = {
        cells[0].strip("`"): cells[1].split(", ")
        for cells in rows_of("reference/metrics.md")
        if len(cells) == 4
    }
    assert set(documented) == set(metrics.HELP)
    counted = metrics.Metrics()
    counted.hear([("default", "q", "m", events.SUCCEEDED, {"queue": "q"})])
    counted.hear([("default", "q", "m", events.DELIVERY_SENT, {"channel": "telegram"})])
    counted.watch(lambda: {"q": 1})
    for family in counted.collect():
        (name,) = {each for each in metrics.HELP if each.removesuffix("_total") == family.name}
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert set(documented[name]) == labels, name
    shown = re.search(r"Buckets of the histograms, in seconds: ([^a-zA-Z]+)\.", _flat("metrics.md"))
    assert shown is not None
    assert [float(each) for each in shown[1].split(",")] == list(metrics.BUCKETS)


def _flat(name: str) -> str:
    return " ".join(text_of(f"reference/{name}").split())


# ── command lines ────────────────────────────────────────────────────────────────────────────────

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of every `ackbone …` that a console block shows, from `ackbone` on."""
    for block in CONSOLE.findall(page.read_text(encoding="utf-8")):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if not line.startswith("$ "):
                continue
            lexer = shlex.shlex(line[2:], posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set("|&;<>()"):
                    names = [n for n, w in enumerate(words) if w.rpartition("/")[2] == "ackbone"]
                    if names and all("=" in w for w in words[: names[0]]):
                        yield words[names[0] :]
                    words = []
                else:
                    words.append(word)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shown_commands_can_be_typed(page: Path) -> None:
    """Commands and options that a page shows exist, and their values are of the right kind."""
    for words in commands_of(page):
        command: click.Command = cli
        context = click.Context(cli, info_name="ackbone")
        rest = words[1:]
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            found = command.get_command(context, rest[0])
            assert found is not None, " ".join(words)
            command, rest = found, rest[1:]
        if rest in (["--help"], ["--version"]):
            continue
        try:
            command.make_context(words[0], list(rest), parent=context)
        except click.UsageError as error:
            pytest.fail(f"{' '.join(words)}: {error.format_message()}")


def test_there_are_commands_to_check() -> None:
    assert sum(1 for page in PAGES for _ in commands_of(page)) > 60


# ── the specifications ───────────────────────────────────────────────────────────────────────────


def named_in_spec() -> tuple[set[str], set[str]]:
    """Modules and tests that SPEC.md names."""
    words = CODE.findall(text_of("SPEC.md"))
    modules = {word for word in words if re.fullmatch(r"[\w/]+\.(py|sql)", word)}
    folders = "|".join(p.name for p in (ROOT / "tests").iterdir() if p.is_dir())
    tests = {word for word in words if re.match(rf"(?:{folders})/\w+\.py", word)}
    return modules - tests, tests


def test_every_module_of_the_specifications_exists() -> None:
    modules, _ = named_in_spec()
    assert len(modules) > 40
    assert [each for each in sorted(modules) if not (ROOT / "src/ackbone" / each).is_file()] == []


def test_every_test_of_the_specifications_exists() -> None:
    _, tests = named_in_spec()
    assert len(tests) > 50
    missing = []
    for each in sorted(tests):
        path, _, name = each.partition("::")
        file = ROOT / "tests" / path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if not text or (name and not re.search(rf"def {name}\b", text)):
            missing.append(each)
    assert missing == []


def test_every_property_is_mapped_once_to_a_module_and_a_test() -> None:
    rows = re.findall(r"^\| Property (\d+): .*\|$", text_of("SPEC.md"), re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 25))
    for line in text_of("SPEC.md").splitlines():
        if line.startswith("| Property "):
            _, module, test = (cell.strip() for cell in line.strip("|").split(" | "))
            assert "`" in module, line
            assert "::test_" in test, line


# ── names of the code ────────────────────────────────────────────────────────────────────────────

NAMING_PAGES = [
    "ARCHITECTURE.md",
    *sorted(f"reference/{p.name}" for p in DOCS.glob("reference/*.md")),
]
FOREIGN = frozenset({"failed/"})
"""Names in backticks that are not of the code: a folder of the file queue."""


@functools.cache
def syntax_trees() -> tuple[ast.Module, ...]:
    files = sorted((ROOT / "src").rglob("*.py"))
    return tuple(ast.parse(file.read_text(encoding="utf-8")) for file in files)


@functools.cache
def names_in_code() -> frozenset[str]:
    """Every identifier of the package, every word of its texts (settings, events, SQL)."""
    found: set[str] = set()
    for tree in syntax_trees():
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    found.add(name)
                case ast.AsyncFunctionDef(name=name) | ast.alias(name=name):
                    found.add(name)
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    found.add(name)
                case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                    found.add(name)
                case ast.Constant(value=str(text)):
                    found.update(re.findall(r"\w+", text))
    for file in (ROOT / "src").rglob("*.sql"):
        found.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    return frozenset(found)


@functools.cache
def members_in_code() -> dict[str, set[str]]:
    """Methods and fields of every class of the package, with those of its bases."""
    own: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for tree in syntax_trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            named = own.setdefault(node.name, set())
            bases.setdefault(node.name, []).extend(
                base.id for base in node.bases if isinstance(base, ast.Name)
            )
            for each in ast.walk(node):
                match each:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        named.add(name)
                    case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name):
                        named.add(name)

    def of(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        above = [of(base, seen | {name}) for base in bases.get(name, []) if base not in seen]
        return own.get(name, set()).union(*above)

    return {name: of(name) for name in own}


def is_there(word: str) -> bool:
    """Whether a word that looks like a name of ours exists; True for any other word."""
    if re.fullmatch(r"[\w/]+\.(py|sql)", word):
        if "/" in word:
            return any((ROOT / base / word).is_file() for base in ("src/ackbone", "", "tests"))
        return any((ROOT / "src").rglob(word))
    if re.fullmatch(r"[a-z_]+(/[a-z_]+)*/", word):
        return (ROOT / word).is_dir() or any((ROOT / "src").glob(f"**/{word}"))
    name = re.match(r"_*[A-Za-z]\w*(\.\w+)*", word)
    if name is None or word[name.end() :][:1] not in ("", "("):
        return True
    owner, _, member = name[0].partition(".")
    camel = re.fullmatch(r"[A-Z][a-z]+\w*[A-Z]\w*|[A-Z][a-z]\w+", owner)
    if camel and member:
        return member.partition(".")[0] in members_in_code().get(owner, set())
    snake = re.fullmatch(r"_?[a-z][a-z0-9]*(_[a-z0-9]+)+", owner)
    return not (camel or snake) or owner in names_in_code()


@pytest.mark.parametrize("page", NAMING_PAGES)
def test_names_in_backticks_exist_in_the_code(page: str) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    words = {word for word in re.findall(r"`([^`\n]+)`", text) if word not in FOREIGN}
    assert sorted(word for word in words if not is_there(word)) == []


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("store/sqlite/nonsense.py", "core/broker.py"),
        ("nonsense.py", "broker.py"),
        ("nonsense/", "engine/"),
        ("BrokerNonsense", "BrokerUnavailable"),
        ("App.nonsense", "App.send"),
        ("no_such_function(message)", "load_config(path=None)"),
        ("no_such_function", "queue_executions"),
    ],
)
def test_a_wrong_name_is_found(wrong: str, right: str) -> None:
    assert not is_there(wrong)
    assert is_there(right)


@pytest.mark.parametrize(
    "name", ["App", "Context", "Message", "RetryPolicy", "Receipt", "Decision"]
)
def test_calls_in_the_reference_are_methods(name: str) -> None:
    """`name(…)` at the beginning of an entry below `## Class` is a public member of that class."""
    section = text_of("reference/api.md").partition(f"\n## `{name}`")[2].partition("\n## ")[0]
    called = set(re.findall(r"^- `([a-z]\w*)\(", section, re.MULTILINE))
    called |= set(re.findall(r"[;,] `([a-z]\w*)\([^`]*\)` (?:is|are|returns)\b", section))
    assert sorted(each for each in called if not hasattr(getattr(ackbone, name), each)) == []


# ── code ─────────────────────────────────────────────────────────────────────────────────────────

BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_can_be_pasted_into_a_file(page: Path) -> None:
    """Only what says that it is a fragment may await outside of a function."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        block = textwrap.dedent(found[2])
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if block.startswith("# A fragment") else 0
        compile("\n" * text.count("\n", 0, found.start(2)) + block, str(page), "exec", flags)


def test_there_are_blocks_to_paste() -> None:
    found = [block for page in PAGES for block in BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 40
