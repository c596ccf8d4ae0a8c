"""Ask the guard before a run. Its decision lets the run go on or ends the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ackbone.core.codecs.values import hash_payload
from ackbone.core.errors import HandlerFailed
from ackbone.core.guard import Ask, Decision, Guard, PromptGuard
from ackbone.core.outcome import Outcome, Park, ParkKind, Question, Rejected
from ackbone.core.store import Run

__all__ = ["Ask", "AskGuard", "Decision", "Guard", "asking"]

AskGuard = Callable[[Run], Awaitable[Outcome | None]]
"""Returns None if the run is allowed. Raises if the guard raises or hangs: that never allows."""


def asking(guard: Guard, *, timeout_s: float) -> AskGuard:
    """Return the function that asks this guard about a run."""
    prompt: object = guard
    if isinstance(prompt, PromptGuard):
        decide = prompt.decision

        # Without a time limit, which would cost more than the rules.
        async def ask_at_once(run: Run) -> Outcome | None:
            return _outcome(decide(_context(run)), run)

        return ask_at_once

    async def ask_in_time(run: Run) -> Outcome | None:
        async with asyncio.timeout(timeout_s):
            decision = await guard(_context(run))
        return _outcome(decision, run)

    return ask_in_time


def _outcome(decision: Decision, run: Run) -> Outcome | None:
    if decision.allowed is True:  # only True itself, nothing that is merely truthy
        return None
    if decision.ask is None:
        return Rejected(reason=decision.reason, policies=tuple(decision.policies))
    return _asked(decision.ask, decision.reason, run)


def _context(run: Run) -> dict[str, Any]:
    message = run.message
    user = message.metadata.get("user_id")
    return {
        "source": "queue_trigger",
        "queue": run.queue,
        "message_id": message.id,
        "tenant_id": message.tenant_id,
        "type": message.type,
        "channel": message.channel,
        "user": "" if user is None else str(user),
        "priority": message.priority,
        "payload": message.payload,
        "attempt": run.attempt,
        "approved": _approved(run),
    }


def _approved(run: Run) -> frozenset[str]:
    """Return the rules that a person approved for exactly this payload. Another payload needs
    another approval."""
    if not run.approvals:
        return frozenset()
    digest = hash_payload(run.message.payload)
    return frozenset(each.rule for each in run.approvals if each.payload_sha256 == digest)


def _asked(ask: Ask, reason: str, run: Run) -> Outcome:
    if ask.rule in _approved(run):  # it would ask again after each approval
        raise HandlerFailed(
            f"the guard asks for an approval of {ask.rule!r}, which this message has: "
            "a guard finds the approved rules in context['approved']"
        )
    question = Question(
        rule=ask.rule,
        payload_sha256=hash_payload(run.message.payload),
        expires_s=ask.expires_s,
        four_eyes=ask.four_eyes,
    )
    return Park(kind=ParkKind.WAITING_APPROVAL, reason=reason, question=question)
