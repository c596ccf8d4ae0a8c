"""Rules as values, and the decision that they make.

Order of evaluation:
1. `allow`, `deny` and `approve` rules are evaluated from top to bottom. The first one that matches
   decides. If none matches, `default` decides.
2. An `approve` rule is skipped if a person has approved exactly this payload. If no rule below it
   decides, the approval counts, whatever the default is.
3. `quota` rules decide nothing. All quotas that match apply to messages that are allowed.

A condition that cannot be evaluated (a missing field, a number compared with a text) counts against
the message: `deny`, `approve` and `quota` match, `allow` does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from ackbone.core.guard import EXPIRES_S
from ackbone.core.message import Message
from ackbone.core.quota import Quota

from .expression import MISSING, Condition, Truth, all_of, compare


class Action(StrEnum):
    """The action of a rule for messages that it matches."""

    ALLOW = "allow"
    DENY = "deny"
    APPROVE = "approve"
    QUOTA = "quota"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that rules can use. MISSING: the caller did not give the fact."""

    tenant: Any = MISSING
    queue: Any = MISSING
    type: Any = MISSING
    channel: Any = MISSING
    user: Any = MISSING
    priority: Any = MISSING
    attempt: Any = MISSING
    payload: Any = MISSING


def facts_of(message: Message, *, queue: str, attempt: int) -> Facts:
    """Return the facts of a message. A missing channel or user is the empty text."""
    user = message.metadata.get("user_id")
    return Facts(
        tenant=message.tenant_id,
        queue=queue,
        type=message.type,
        channel=message.channel,
        user="" if user is None else str(user),
        priority=message.priority,
        attempt=attempt,
        payload=message.payload,
    )


class Names(msgspec.Struct, frozen=True):
    """Names and globs (`*`: any characters, `?`: one). One match is enough."""

    exact: frozenset[str]
    globs: tuple[str, ...]

    @classmethod
    def of(cls, *patterns: str) -> Names:
        globs = tuple(each for each in patterns if "*" in each or "?" in each)
        return cls(frozenset(patterns) - set(globs), globs)

    def holds(self, fact: Any) -> Truth:
        if not isinstance(fact, str):
            return None
        return fact in self.exact or any(fits(glob, fact) for glob in self.globs)


def fits(glob: str, text: str) -> bool:
    """Return True if the text matches. Only the last `*` is extended, so no text makes this
    slow."""
    at = here = 0
    star, mark = -1, 0
    while at < len(text):
        if here < len(glob) and glob[here] == "*":
            star, mark, here = here, at, here + 1
        elif here < len(glob) and glob[here] in ("?", text[at]):
            at, here = at + 1, here + 1
        elif star >= 0:
            mark, at, here = mark + 1, mark + 1, star + 1
        else:
            return False
    return not glob[here:].strip("*")


class Numbers(msgspec.Struct, frozen=True):
    """A set of numbers, or all numbers on one side of a limit (`>= 2`)."""

    sign: str
    values: tuple[int, ...]

    def holds(self, fact: Any) -> Truth:
        if not isinstance(fact, int):
            return None
        if self.sign == "in":
            return fact in self.values
        return compare(self.sign, int(fact), self.values[0])


Matcher = Names | Numbers | Condition


class Match(msgspec.Struct, frozen=True):
    """The conditions of a rule: a matcher for each fact that it names. All must match."""

    wanted: tuple[tuple[str, Matcher], ...] = ()

    def holds(self, facts: Facts) -> Truth:
        known = ((matcher, getattr(facts, name)) for name, matcher in self.wanted)
        return all_of(None if fact is MISSING else matcher.holds(fact) for matcher, fact in known)

    @property
    def is_everything(self) -> bool:
        return not self.wanted


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of the file."""

    name: str
    action: Action
    match: Match = Match()
    reason: str = ""
    expires_s: float = EXPIRES_S
    """For approve: after this many seconds, no answer means no."""
    four_eyes: bool = False
    """For approve: two different people must approve."""
    quota: Quota | None = None
    """For quota: the limits and their window."""

    def matches(self, facts: Facts) -> Truth:
        """Return whether the rule matches. None: unknown."""
        return self.match.holds(facts)

    def applies(self, facts: Facts) -> bool:
        """Return whether the rule applies. An unknown match counts against the message."""
        matched = self.matches(facts)
        return self.action is not Action.ALLOW if matched is None else matched


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """All rules of a file, in its order."""

    rules: tuple[Rule, ...] = ()
    default: Action = Action.ALLOW


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about one message."""

    action: Action
    """allow, deny or approve"""
    rule: Rule | None = None
    """The rule that decided. None: the default, or a person's approval."""
    reason: str = ""
    unsure: bool = False
    """True if the rule decided because its condition is unknown."""
    passed: tuple[str, ...] = ()
    """The approve rules that a person has approved."""


def decide(rules: Rules, facts: Facts, *, approved: Collection[str] = ()) -> Ruling:
    """Decide about a message. `approved`: names of rules that a person has approved."""
    passed: list[str] = []
    for rule in rules.rules:
        if rule.action is Action.QUOTA:
            continue
        matched = rule.matches(facts)
        if matched is False or (matched is None and rule.action is Action.ALLOW):
            continue
        if rule.action is Action.APPROVE and rule.name in approved:
            passed.append(rule.name)
            continue
        return Ruling(
            action=rule.action,
            rule=rule,
            reason=rule.reason or f"rule {rule.name}",
            unsure=matched is None,
            passed=tuple(passed),
        )
    if passed:
        names = ", ".join(passed)
        return Ruling(action=Action.ALLOW, reason=f"approved: {names}", passed=tuple(passed))
    return Ruling(action=rules.default, reason="no rule says otherwise: the default")


def quotas_for(rules: Rules, facts: Facts) -> tuple[Quota, ...]:
    """Return the quotas of all rules that match."""
    return tuple(
        rule.quota for rule in rules.rules if rule.quota is not None and rule.applies(facts)
    )


def changes(before: Rules, after: Rules) -> list[str]:
    """Describe the differences, rule by rule."""
    old = {rule.name: rule for rule in before.rules}
    new = {rule.name: rule for rule in after.rules}
    said = [f"{name} is new ({new[name].action})" for name in new if name not in old]
    said += [f"{name} is gone ({old[name].action})" for name in old if name not in new]
    for name, rule in new.items():
        if name in old and old[name] != rule:
            said.append(f"{name}: {', '.join(_differences(old[name], rule))}")
    kept = [name for name in old if name in new]
    if kept != [name for name in new if name in old]:
        said.append("the order has changed")
    if before.default is not after.default:
        said.append(f"default: {before.default} → {after.default}")
    return said


def _differences(old: Rule, new: Rule) -> list[str]:
    found = []
    for field in Rule.__struct_fields__:
        was, now = getattr(old, field), getattr(new, field)
        if was == now:
            continue
        if isinstance(was, Match):
            sides = dict(was.wanted), dict(now.wanted)
            names = [
                name for name in Facts.__struct_fields__ if sides[0].get(name) != sides[1].get(name)
            ]
            found.append(f"match of {', '.join(names)} changed")
        elif field == "quota":
            found.append(f"quota {_in_words(was)} → {_in_words(now)}")
        else:
            found.append(f"{field} {was} → {now}")
    return found


def _in_words(quota: Quota | None) -> str:
    if quota is None:
        return "none"
    limits = msgspec.structs.asdict(quota.limits).items()
    named = ", ".join(f"{limit:g} {unit}" for unit, limit in limits if limit is not None)
    return f"{named} in {quota.window_s:g} s"


def facts_in(context: Mapping[str, Any]) -> Facts:
    """Return the facts of a guard's context. Facts that it does not contain are MISSING."""
    given = {name: context[name] for name in Facts.__struct_fields__ if name in context}
    return Facts(**{**given, "tenant": context.get("tenant_id", MISSING)})
