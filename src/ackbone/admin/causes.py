"""Dead letters grouped by cause, with what an action on them would do."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from ackbone.core.errors import AckboneError
from ackbone.core.message import Message
from ackbone.core.records import DeadLetter

EXAMPLES = 3
_MOST = 160
_VARYING = re.compile(
    r"'[^']*'|\"[^\"]*\""  # quoted values
    r"|\b[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}\b|\b0x[0-9a-fA-F]+\b"  # ids and addresses
    r"|\b(?=[a-f]*\d)[0-9a-f]{12,}\b"  # hashes
    r"|\d+(?:[.,:]\d+)*"
)


class Handled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an action on one dead letter, or of the dry run."""

    letter: DeadLetter
    replay_id: str | None = None
    message: Message | None = None
    """The message that is sent in its place."""
    error: AckboneError | None = None


class Cause(msgspec.Struct, kw_only=True):
    """Dead letters with the same error, on which the action would have the same result."""

    queue: str
    type: str | None
    reason: str
    error: str
    """The common part of their errors: numbers, ids and quoted values are left out."""
    problem: str | None
    """Why the action would fail, or None."""
    count: int = 0
    examples: list[str]
    """Ids of some of the dead letters."""
    message: Message | None = None
    """The message that would be sent in the place of the first one."""


def by_cause(found: Iterable[Handled]) -> list[Cause]:
    """Group by cause, the most frequent first."""
    causes: dict[tuple[str | None, ...], Cause] = {}
    for handled in found:
        letter = handled.letter
        error = common(letter.error)
        problem = None if handled.error is None else common(str(handled.error))
        key = (letter.queue, letter.type, letter.reason, error, problem)
        cause = causes.get(key)
        if cause is None:
            shown = None if handled.error is None else str(handled.error)
            cause = causes[key] = Cause(
                queue=letter.queue,
                type=letter.type,
                reason=letter.reason,
                error=error,
                problem=shown,
                examples=[],
                message=handled.message,
            )
        cause.count += 1
        if len(cause.examples) < EXAMPLES:
            cause.examples.append(letter.id)
    return sorted(causes.values(), key=lambda cause: -cause.count)


def common(error: str) -> str:
    """Return an error without the values that differ each time: numbers, ids, quoted text."""
    text = _VARYING.sub("…", error)
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
