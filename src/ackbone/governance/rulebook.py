"""The rules in force: a guard that applies them, and a watcher that reloads their file."""

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
"""Identity, size and modification time of a file."""


class RuleBook:
    """Rules that can be replaced while they are in force. Earlier decisions stay."""

    def __init__(self, rules: Rules) -> None:
        self.put_in_force(rules)

    def put_in_force(self, rules: Rules) -> None:
        self.rules = rules
        counted = tuple(rule for rule in rules.rules if rule.quota is not None)
        self._counted = Rules(rules=counted)

    async def __call__(self, context: Mapping[str, Any]) -> Decision:
        """Decide about a run, as a guard."""
        return self.decision(context)

    async def check_permission(self, context: Mapping[str, Any]) -> Decision:
        """Decide for a queue trigger. A message that needs a person's approval is refused there."""
        return self.decision(context)

    def decision(self, context: Mapping[str, Any]) -> Decision:
        ruling = decide(self.rules, facts_in(context), approved=context.get("approved", ()))
        return _decision(ruling)

    def quotas_of(self, run: Run) -> Sequence[Quota]:
        """Return the quotas of a run, for the store. Only allowed runs have any."""
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
    """Combine guards: all must allow the run. The first refusal is the answer."""
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
        reason += " (its condition cannot be evaluated for this message)"
    if ruling.action is Action.ALLOW:
        return Decision(allowed=True, reason=reason, policies=policies)
    ask = None
    if ruling.action is Action.APPROVE and rule is not None:
        ask = Ask(rule=rule.name, expires_s=rule.expires_s, four_eyes=rule.four_eyes)
    return Decision(allowed=False, reason=reason, policies=policies, ask=ask)


class RuleFile:
    """Keeps a rule book up to date with its file.

    `step` is called periodically. A changed file is read when it did not change from one step to
    the next, because a half-written file may contain valid rules. A broken or missing file is
    refused, and the old rules stay in force.
    """

    def __init__(self, path: Path, load: Callable[[], Rules]) -> None:
        """Reads the file. Raises ConfigError."""
        self.path = path
        self._load = load
        self._read = self._stamp()
        self._seen = self._read
        self.book = RuleBook(load())

    async def step(self) -> bool:
        """Look at the file. Returns True if other rules are in force now."""
        stamp = self._stamp()
        stands_still, self._seen = stamp == self._seen, stamp
        if stamp == self._read or not stands_still:
            return False
        try:
            rules = await asyncio.to_thread(self._load)
        except ConfigError as error:
            self._read = stamp
            log.error(
                "refused the changed rules of %s; the old ones stay in force: %s",
                self.path,
                "; ".join(error.problems),
            )
            return False
        if self._stamp() != stamp:
            return False  # it changed meanwhile: wait for the next step
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
