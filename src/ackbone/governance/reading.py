"""Reads the entries of a rule file. It reports every mistake, with its path and a hint."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from ackbone.core.guard import EXPIRES_S
from ackbone.core.message import Priority
from ackbone.core.quota import UNITS, Limits, Quota

from .expression import Condition, ExpressionError, parse
from .rules import Action, Match, Matcher, Names, Numbers, Rule, Rules

Say = Callable[[str, str], None]
"""Records a mistake: its path in the file, and what to do about it."""

_YEAR = 31_536_000
WINDOWS = {"minute": 60.0, "hour": 3600.0, "day": 86_400.0}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}\Z")
_SIDE = re.compile(r"(==|!=|<=|>=|<|>)\s*(\S+)\Z")
_ANY_TEXT = ("channel", "user")
"""Facts that a message may lack. An empty text matches then."""


class MatchEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`match:` as the file has it."""

    tenant: Any = UNSET
    queue: Any = UNSET
    type: Any = UNSET
    channel: Any = UNSET
    user: Any = UNSET
    priority: Any = UNSET
    attempt: Any = UNSET
    payload: Any = UNSET


class RuleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A rule as the file has it."""

    name: str = ""
    match: MatchEntry = MatchEntry()
    then: Literal["allow", "deny", "approve", "quota"] | None = None
    reason: str = ""
    expires_s: Annotated[float, Meta(gt=0, le=_YEAR)] | None = None
    four_eyes: bool | None = None
    window: Any = UNSET
    limits: Limits | None = None


class RuleDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a rule file."""

    rules: tuple[RuleEntry, ...] | None = None
    default: Literal["allow", "deny"] = "allow"


def rules_of(document: RuleDocument, say: Say) -> Rules:
    """Return the rules. They must not be used if a mistake was recorded."""
    if document.rules is None:
        say("rules", "there are none; write `rules:` and a list below it, or `rules: []`")
    seen: dict[str, int] = {}
    everything: str | None = None
    rules = []
    for number, entry in enumerate(document.rules or ()):
        path = f"rules[{number}]"
        rule = _Reading(entry, path, say).rule()
        if entry.name in seen:
            say(f"{path}.name", f"rules[{seen[entry.name]}] has this name already; choose another")
        seen.setdefault(entry.name, number)
        if rule is None:
            continue
        if rule.action is not Action.QUOTA:
            if everything is not None:
                say(path, f"is never reached: rule {everything} above matches everything")
            elif rule.match.is_everything:
                everything = rule.name
        rules.append(rule)
    return Rules(rules=tuple(rules), default=Action(document.default))


class _Reading:
    """Reads one entry."""

    def __init__(self, entry: RuleEntry, path: str, say: Say) -> None:
        self._entry = entry
        self._path = path
        self._failed = False
        self._say_to = say

    def rule(self) -> Rule | None:
        entry = self._entry
        if not entry.name:
            self._say("name", "is missing; approvals and quotas are kept under it")
        elif _NAME.match(entry.name) is None:
            self._say("name", "takes letters, digits and . _ : - only, at most 128")
        if entry.then is None:
            self._say("then", "is missing or wrong; write allow, deny, approve or quota")
        match = self._match()
        quota = self._quota()
        self._only("approve", "expires_s", "four_eyes")
        if self._failed or entry.then is None:
            return None
        return Rule(
            name=entry.name,
            action=Action(entry.then),
            match=match,
            reason=entry.reason,
            expires_s=EXPIRES_S if entry.expires_s is None else entry.expires_s,
            four_eyes=bool(entry.four_eyes),
            quota=quota,
        )

    def _say(self, field: str, text: str) -> None:
        self._failed = True
        self._say_to(f"{self._path}.{field}", text)

    def _only(self, action: str, *fields: str) -> None:
        """Report fields that the rule's action does not use, because they are probably a
        mistake."""
        if self._entry.then in (action, None):
            return
        for field in fields:
            if getattr(self._entry, field) not in (None, UNSET):
                self._say(field, f"goes with `then: {action}` only; this is {self._entry.then}")

    # -- match ------------------------------------------------------------------------------------

    def _match(self) -> Match:
        entry = self._entry.match
        found: dict[str, Matcher | None] = {}
        for field in ("tenant", "queue", "type", "channel", "user"):
            found[field] = self._names(field, getattr(entry, field))
        found["priority"] = self._numbers("priority", entry.priority, _priority)
        found["attempt"] = self._numbers("attempt", entry.attempt, _whole)
        found["payload"] = self._condition(entry.payload)
        return Match(tuple((name, each) for name, each in found.items() if each is not None))

    def _names(self, field: str, given: Any) -> Names | None:
        if given is UNSET:
            return None
        each = given if isinstance(given, list) else [given]
        path = f"match.{field}"
        if not each:
            self._say(path, "is an empty list and matches nothing; name one, or remove the key")
        for name in each:
            if not isinstance(name, str):
                shown = "nothing" if name is None else repr(name)[:40]
                self._say(path, f"takes names such as {field}-1 or a*; found {shown}: use quotes")
            elif not name and field not in _ANY_TEXT:
                self._say(path, f"is empty; every message has a {field}")
        return None if self._failed else Names.of(*each)

    def _numbers(self, field: str, given: Any, read: Callable[[Any], int]) -> Numbers | None:
        if given is UNSET:
            return None
        path = f"match.{field}"
        try:
            side = _SIDE.match(given.strip()) if isinstance(given, str) else None
            if side is not None:
                return Numbers(side[1], (read(side[2]),))
            each = given if isinstance(given, list) else [given]
            if not each:
                raise ValueError("an empty list matches nothing")
            return Numbers("in", tuple(read(value) for value in each))
        except ValueError as error:
            self._say(path, f'{error}; write one, a list, or a comparison such as ">= 2"')
            return None

    def _condition(self, given: Any) -> Condition | None:
        if given is UNSET:
            return None
        if not isinstance(given, str) or not given.strip():
            self._say("match.payload", "takes a condition as text, such as: amount > 1000")
            return None
        try:
            return parse(given)
        except ExpressionError as error:
            self._say("match.payload", str(error))
            return None

    # -- quota ------------------------------------------------------------------------------------

    def _quota(self) -> Quota | None:
        entry = self._entry
        if entry.then != "quota":
            self._only("quota", "window", "limits")
            return None
        window_s = self._window(entry.window)
        limits = entry.limits or Limits()
        if limits == Limits():
            self._say("limits", f"are missing; name at least one of {', '.join(UNITS)}")
        return Quota(name=entry.name, window_s=window_s, limits=limits)

    def _window(self, given: Any) -> float:
        if isinstance(given, str) and given.lower() in WINDOWS:
            return WINDOWS[given.lower()]
        if isinstance(given, int | float) and not isinstance(given, bool) and 1 <= given <= _YEAR:
            return float(given)
        near = difflib.get_close_matches(str(given).lower(), WINDOWS, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        self._say("window", f"takes minute, hour, day or a number of seconds from 1 on{hint}")
        return 1.0


def _whole(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, found {value!r:.40}")
    return value


def _priority(value: Any) -> int:
    if isinstance(value, str) and value.upper() in Priority.__members__:
        return int(Priority[value.upper()])
    try:
        return int(Priority(_whole(value)))
    except ValueError:
        known = ", ".join(each.name.lower() for each in Priority)
        raise ValueError(f"expected {known} or 0 to 3, found {value!r:.40}") from None
