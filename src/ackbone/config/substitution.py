"""`${VAR}`, `${VAR:-default}`, `${file:/path}` and `$$` in texts, and the `.env` file.

Inserted values are not expanded again: a value that contains `${…}` stays as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

MAX_BYTES = 1_048_576
MAX_NESTING = 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FORMS = "${NAME}, ${NAME:-default} or ${file:/path}; a literal $ before { is written $${"


class Substituted(msgspec.Struct, frozen=True):
    """The text after substitution, and its mistakes."""

    text: str
    used: bool
    problems: tuple[str, ...] = ()


def substitute(text: str, variables: Mapping[str, str], folder: Path) -> Substituted:
    """Replace every reference in `text`; relative `${file:…}` paths are relative to `folder`."""
    if "$" not in text:
        return Substituted(text, used=False)
    scan = _Scan(text, variables, folder)
    try:
        result, _ = scan.text_from(0, depth=0, live=True)
    except _Malformed as error:
        return Substituted("", used=True, problems=(*scan.problems, str(error)))
    return Substituted(result, scan.used, tuple(scan.problems))


class _Malformed(Exception):
    pass


class _Scan:
    """One pass over one text."""

    def __init__(self, text: str, variables: Mapping[str, str], folder: Path) -> None:
        self.text = text
        self.variables = variables
        self.folder = folder
        self.problems: list[str] = []
        self.used = False

    def text_from(self, at: int, *, depth: int, live: bool) -> tuple[str, int]:
        """Return the text from `at` to the end or, inside a reference, to its closing brace."""
        out: list[str] = []
        text = self.text
        while at < len(text):
            if text.startswith("$$", at):
                out.append("$")
                at += 2
            elif text.startswith("${", at):
                piece, at = self.reference(at + 2, depth=depth + 1, live=live)
                out.append(piece)
            elif depth and text[at] == "}":
                return "".join(out), at
            else:
                out.append(text[at])
                at += 1
        if depth:
            raise _Malformed(f"a `${{` has no closing brace: write {_FORMS}")
        return "".join(out), at

    def reference(self, at: int, *, depth: int, live: bool) -> tuple[str, int]:
        """Return the value of the reference whose content begins at `at`, and where it ends.

        `live` is False inside a default that is not needed; nothing is looked up there.
        """
        if depth > MAX_NESTING:
            raise _Malformed(f"references are nested deeper than {MAX_NESTING} levels")
        self.used = True
        name = _NAME.match(self.text, at)
        if name is None:
            raise _Malformed(f"a `${{` is not followed by a name: write {_FORMS}")
        variable, at = name[0], name.end()
        if self.text.startswith("}", at):
            return self.variable(variable, live=live), at + 1
        if self.text.startswith(":-", at):
            value = self.variables.get(variable, "")
            default, at = self.text_from(at + 2, depth=depth, live=live and not value)
            return value or default, at + 1
        if variable == "file" and self.text.startswith(":", at):
            path, at = self.text_from(at + 1, depth=depth, live=live)
            return self.file(path) if live else "", at + 1
        raise _Malformed(f"a `${{` reference cannot be read: write {_FORMS}")

    def variable(self, name: str, *, live: bool) -> str:
        if not live:
            return ""
        if name not in self.variables:
            self.problems.append(
                f"the variable {name} is not set; set it in the environment or in .env, "
                f"or give a default: ${{{name}:-default}}"
            )
        return self.variables.get(name, "")

    def file(self, name: str) -> str:
        if not name:
            self.problems.append("${file:} names no file; write ${file:/path}")
            return ""
        try:
            path = self.folder / name
            if not os.path.exists(path):
                raise ValueError("does not exist")
            return read_text(path).strip()
        except ValueError as error:
            self.problems.append(f"${{file:{name}}}: the file {name} {error}")
            return ""


def read_text(path: Path) -> str:
    """Return the text of a small UTF-8 file. The text of a ValueError continues "the file …"."""
    try:
        if not os.path.isfile(path):
            raise ValueError("is not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ValueError("is larger than 1 MB, the limit for a configuration")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"is not UTF-8 text (line {line})") from None


# ── .env ─────────────────────────────────────────────────────────────────────────────────────────

_START = re.compile(r"[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*=[ \t]*")
_REST = re.compile(r"[ \t]*(?:#[^\n]*)?(?=\n|\Z)")
_PLAIN = re.compile(r"[^\n]*?(?=[ \t]+#|[ \t]*(?:\n|\Z))")
_SINGLE = re.compile(r"'([^']*)'")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def parse_dotenv(text: str) -> tuple[dict[str, str], list[int]]:
    """Return the variables of a `.env` text, and the numbers of invalid lines.

    `NAME=value`, with or without `export`; `'…'` is taken literally, `"…"` knows `\\n`, `\\t`,
    `\\"` and `\\\\`, both may span lines; ` #` begins a comment. Nothing is substituted.
    """
    found: dict[str, str] = {}
    bad: list[int] = []
    text = text.replace("\r\n", "\n")
    at = 0
    while at < len(text):
        start = _START.match(text, at)
        value = _value(text, start.end()) if start else None
        if start and value and (rest := _REST.match(text, value[1])):
            found[start[1]] = value[0]
            at = rest.end() + 1
            continue
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end].strip()
        if line and not line.startswith("#"):
            bad.append(text.count("\n", 0, at) + 1)
        at = end + 1
    return found, bad


def _value(text: str, at: int) -> tuple[str, int] | None:
    if quoted := _SINGLE.match(text, at):
        return quoted[1], quoted.end()
    if quoted := _DOUBLE.match(text, at):
        return _ESCAPE.sub(lambda m: _ESCAPES.get(m[1], m[1]), quoted[1]), quoted.end()
    if text[at : at + 1] in ("'", '"'):
        return None
    if text[at : at + 1] == "#":
        return "", at
    plain = _PLAIN.match(text, at)
    return (plain[0], plain.end()) if plain else None
