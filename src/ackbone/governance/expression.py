"""Conditions on a payload: parsed by hand, evaluated without `eval`.

    amount > 1000 and currency in ["EUR", "USD"]
    not exists(order.items[0].approved_by) or order["odd key"] == true

A name is a field of the payload, and `$` is the payload itself. Logic has three values: a missing
field, and a comparison of values that have no order, is unknown (None). `and`, `or` and `not`
follow Kleene: `false and unknown` is false, `true and unknown` is unknown.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import msgspec

LONGEST = 4000
DEEPEST = 32

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "missing"})()
"""The value of a path that leads nowhere."""

Truth = bool | None
"""None: unknown."""


class ExpressionError(ValueError):
    """The text is not a condition. The error says where, and what to write instead."""


class Path(msgspec.Struct, frozen=True):
    """The place of a value in the payload: keys and positions in lists."""

    steps: tuple[str | int, ...]

    def value(self, payload: Any) -> Any:
        found = payload
        for step in self.steps:
            if isinstance(step, str):
                found = found.get(step, MISSING) if isinstance(found, dict) else MISSING
            elif isinstance(found, list) and -len(found) <= step < len(found):
                found = found[step]
            else:
                return MISSING
            if found is MISSING:
                return MISSING
        return found

    def __str__(self) -> str:
        steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.steps)
        return "".join(steps).removeprefix(".") or "$"


class Constant(msgspec.Struct, frozen=True):
    """A number, text, true, false, null, or a list of these."""

    content: Any

    def value(self, payload: Any) -> Any:
        return self.content


Operand = Path | Constant


class Comparison(msgspec.Struct, frozen=True):
    """Two values and a comparison."""

    sign: str
    left: Operand
    right: Operand

    def holds(self, payload: Any) -> Truth:
        left, right = self.left.value(payload), self.right.value(payload)
        if left is MISSING or right is MISSING:
            return None
        return compare(self.sign, left, right)


class Exists(msgspec.Struct, frozen=True):
    """True if the path leads to a value. null is a value."""

    path: Path

    def holds(self, payload: Any) -> Truth:
        return self.path.value(payload) is not MISSING


class Not(msgspec.Struct, frozen=True):
    """`not`: unknown stays unknown."""

    inner: Condition

    def holds(self, payload: Any) -> Truth:
        found = self.inner.holds(payload)
        return None if found is None else not found


class Every(msgspec.Struct, frozen=True):
    """`and`"""

    parts: tuple[Condition, ...]

    def holds(self, payload: Any) -> Truth:
        return all_of(part.holds(payload) for part in self.parts)


class Some(msgspec.Struct, frozen=True):
    """`or`"""

    parts: tuple[Condition, ...]

    def holds(self, payload: Any) -> Truth:
        found = all_of(_opposite(part.holds(payload)) for part in self.parts)
        return _opposite(found)


Condition = Comparison | Exists | Not | Every | Some


def all_of(truths: Iterator[Truth]) -> Truth:
    """False if one is false, else unknown if one is unknown, else true."""
    result: Truth = True
    for truth in truths:
        if truth is False:
            return False
        if truth is None:
            result = None
    return result


def _opposite(truth: Truth) -> Truth:
    return None if truth is None else not truth


_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def compare(sign: str, left: Any, right: Any) -> Truth:
    """Compare two values that exist. None if they have no order."""
    match sign:
        case "==":
            return equal(left, right)
        case "!=":
            return not equal(left, right)
        case "in":
            return any(equal(left, each) for each in right) if isinstance(right, list) else None
        case "not in":
            return _opposite(compare("in", left, right))
    return bool(_ORDERS[sign](left, right)) if _have_order(left, right) else None


def equal(left: Any, right: Any) -> bool:
    """Compare as JSON does: 1 equals 1.0, and neither equals true or "1"."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    return bool(left == right)


def _have_order(left: Any, right: Any) -> bool:
    numbers = all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right)
    )
    return numbers or (isinstance(left, str) and isinstance(right, str))


# ── parsing ──────────────────────────────────────────────────────────────────────────────────────

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?(?![A-Za-z_]))
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<name>[^\W\d][\w-]*)
      | (?P<mark>==|!=|<=|>=|<|>|\(|\)|\[|\]|,|\.|\$)
      | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_WORDS = {"true": True, "false": False, "null": None}
_KEYWORDS = {"and", "or", "not", "in", "exists", *_WORDS}
_COMPARISONS = ("==", "!=", "<=", ">=", "<", ">")
_HABITS = {
    "&": "write 'and'",
    "|": "write 'or'",
    "!": "write 'not'",
    "=": "to compare, write '=='",
}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text[:40])


def parse(text: str) -> Condition:
    """Parse a condition. Raises ExpressionError."""
    if len(text) > LONGEST:
        raise ExpressionError(f"longer than {LONGEST} characters; split the rule in two")
    return _Parser(text).whole()


class _Parser:
    """Recursive descent: or, and, not, comparison, operand."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._depth = 0

    def whole(self) -> Condition:
        found = self._either()
        if self._next.kind != "end":
            self._fail(f"expected 'and', 'or' or the end, found {self._next}")
        return found

    def _either(self) -> Condition:
        self._depth += 1
        if self._depth > DEEPEST:
            self._fail(f"nested deeper than {DEEPEST} levels")
        parts = [self._both()]
        while self._takes("or"):
            parts.append(self._both())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Some(tuple(parts))

    def _both(self) -> Condition:
        parts = [self._negated()]
        while self._takes("and"):
            parts.append(self._negated())
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def _negated(self) -> Condition:
        nots = 0
        while self._takes("not"):
            nots += 1
        found = self._single()
        return Not(found) if nots % 2 else found

    def _single(self) -> Condition:
        if self._takes("("):
            inner = self._either()
            self._expect(")")
            return inner
        if self._takes("exists"):
            self._expect("(")
            path = self._path()
            self._expect(")")
            return Exists(path)
        return self._comparison()

    def _comparison(self) -> Condition:
        left = self._operand()
        sign = self._next.text.lower()
        if sign in _COMPARISONS and self._next.kind == "mark":
            self._at += 1
        elif self._takes("in"):
            sign = "in"
        elif self._takes("not"):
            self._expect("in")
            sign = "not in"
        else:
            whole = f"{left} == true" if isinstance(left, Path) else "amount > 5"
            self._fail(
                f"expected a comparison ({' '.join(_COMPARISONS)}, in), found {self._next};"
                f" for example {whole}"
            )
        return Comparison(sign, left, self._operand())

    def _operand(self) -> Operand:
        token = self._next
        if token.kind == "number":
            self._at += 1
            return Constant(float(token.text) if re.search("[.eE]", token.text) else _int(token))
        if token.kind == "text":
            self._at += 1
            return Constant(_unquoted(token.text))
        if token.kind == "name" and token.text.lower() in _WORDS:
            self._at += 1
            return Constant(_WORDS[token.text.lower()])
        if self._takes("["):
            return Constant(self._list())
        return self._path()

    def _list(self) -> list[Any]:
        items: list[Any] = []
        while not self._takes("]"):
            if items:
                self._expect(",")
            item = self._operand()
            if not isinstance(item, Constant) or isinstance(item.content, list):
                self._fail(
                    "a list contains numbers, texts, true, false and null; put texts in quotes"
                )
            items.append(item.content)
        return items

    def _path(self) -> Path:
        steps: list[str | int] = []
        if not self._takes("$"):
            steps.append(self._name())
            if steps == ["payload"] and self._next.text in (".", "["):
                self._fail(
                    "paths begin inside the payload: leave 'payload.' out, or write"
                    " '$.payload' for a field of that name"
                )
        while True:
            if self._takes("."):
                steps.append(self._name())
            elif self._takes("["):
                steps.append(self._step())
                self._expect("]")
            else:
                return Path(tuple(steps))

    def _name(self) -> str:
        token = self._next
        if token.kind != "name" or token.text.lower() in _KEYWORDS:
            self._fail(f"expected a field or a value, found {token}")
        self._at += 1
        return token.text

    def _step(self) -> str | int:
        token = self._next
        self._at += 1
        if token.kind == "text":
            return _unquoted(token.text)
        if token.kind == "number" and re.fullmatch(r"-?\d{1,9}", token.text):
            return int(token.text)
        self._at -= 1
        self._fail(f"expected a number or a text in quotes between [ and ], found {token}")

    # -- tokens -----------------------------------------------------------------------------------

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _takes(self, text: str) -> bool:
        token = self._next
        if token.kind in ("mark", "name") and token.text.lower() == text:
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            self._fail(f"expected {text!r}, found {self._next}")

    def _fail(self, why: str) -> NoReturn:
        raise ExpressionError(f"column {self._next.at + 1}: {why}")


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while True:
        found = _TOKEN.match(text, at)
        if found is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            sign = text[at]
            hint = f"; {_HABITS[sign]}" if sign in _HABITS else ""
            if sign in "\"'":
                hint = "; the text has no closing quote"
            raise ExpressionError(f"column {at + 1}: {sign!r} means nothing here{hint}")
        kind = found.lastgroup or "end"
        yield _Token(kind, found[kind], found.start(kind))
        if kind == "end":
            return
        at = found.end()


def _int(token: _Token) -> int:
    if len(token.text) > 400:
        raise ExpressionError(f"column {token.at + 1}: a number with very many digits")
    return int(token.text)


def _unquoted(text: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), text[1:-1])
