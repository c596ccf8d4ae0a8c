"""The rules in force: a guard that answers by them, and the file that they are read from again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ackbone.core.errors import ConfigError
from ackbone.core.guard import Ask, Decision, Guard
from ackbone.core.quota import Quota
from ackbone.core.store import Run

from .rules import Action, Rules, Ruling, changes, decide, facts_in, facts_of, quotas_for

log = logging.getLogger("ackbone.governance")

Stamp = tuple[int, int, int]
"""Which file it is, how long, and when it was written."""


class RuleBook:
    """Rules that may be exchanged while they are in force. What was decided stays decided."""

    def __init__(self, rules: Rules) -> None:
        self.put_in_force(rules)

    def put_in_force(self, rules: Rules) -> None:
        self.rules = rules
        counted = tuple(rule for rule in rules.rules if rule.quota is not None)
        self._counted = Rules(rules=counted)

    async def __call__(self, context: Mapping[str, Any]) -> Decision:
        """The guard."""
        return self.decision(context)

    async def check_permission(self, context: Mapping[str, Any]) -> Decision:
        """The governance port of queue triggers. What needs a person is not permitted there."""
        return self.decision(context)

    def decision(self, context: Mapping[str, Any]) -> Decision:
        ruling = decide(self.rules, facts_in(context), approved=context.get("approved", ()))
        return _decision(ruling)

    def quotas_of(self, run: Run) -> Sequence[Quota]:
        """For the store, at the claim: what the rules allow is counted, and nothing else."""
        rules, counted = self.rules, self._counted
        if not counted.rules:
            return ()
        facts = facts_of(run.message, queue=run.queue, attempt=run.attempt)
        quotas = quotas_for(counted, facts)
        if not quotas:
            return ()
        approved = {each.rule for each in run.approvals}
        allowed = decide(rules, facts, approved=approved).action is Action.ALLOW
        return quotas if allowed else ()


async def ask_in_turn(guards: Sequence[Guard], context: dict[str, Any]) -> Decision:
    """Every guard must say yes; the first that does not is the answer."""
    decision = Decision(allowed=False, reason="there is no guard to say yes")
    for guard in guards:
        decision = await guard(context)
        if decision.allowed is not True:
            break
    return decision


def _decision(ruling: Ruling) -> Decision:
    rule = ruling.rule
    policies = (*ruling.passed, *((rule.name,) if rule is not None else ()))
    reason = ruling.reason
    if ruling.unsure:
        reason += " (what it asks for cannot be known of this message)"
    if ruling.action is Action.ALLOW:
        return Decision(allowed=True, reason=reason, policies=policies)
    ask = None
    if ruling.action is Action.APPROVE and rule is not None:
        ask = Ask(rule=rule.name, expires_s=rule.expires_s, four_eyes=rule.four_eyes)
    return Decision(allowed=False, reason=reason, policies=policies, ask=ask)


class RuleFile:
    """Keeps a rule book at what its file says.

    `step` is called again and again. A file that has changed is read once it has stood still from
    one step to the next: half of it, while somebody writes it, may be good rules, too. One that is
    broken or gone is refused, and the rules stay.
    """

    def __init__(self, path: Path, load: Callable[[], Rules]) -> None:
        """Reads it. Raises ConfigError."""
        self.path = path
        self._load = load
        self._read = self._stamp()
        self._seen = self._read
        self.book = RuleBook(load())

    async def step(self) -> bool:
        """True: other rules are in force now."""
        stamp = self._stamp()
        stands_still, self._seen = stamp == self._seen, stamp
        if stamp == self._read or not stands_still:
            return False
        try:
            rules = await asyncio.to_thread(self._load)
        except ConfigError as error:
            self._read = stamp
            log.error(
                "the changed rules of %s are refused, the ones before stay in force: %s",
                self.path,
                "; ".join(error.problems),
            )
            return False
        if self._stamp() != stamp:
            return False  # written to meanwhile: next time
        self._read = stamp
        said = changes(self.book.rules, rules)
        if not said:
            return False
        self.book.put_in_force(rules)
        log.warning("the rules of %s have changed: %s", self.path, "; ".join(said))
        return True

    def _stamp(self) -> Stamp | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
