"""What became of dead letters: a line each, or a group each, and the sum."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from .output import Output, dump, iso, plain, safe
from .session import Exit, Session, exit_code, stop

if TYPE_CHECKING:
    from holdfast.admin.causes import Cause, Handled
    from holdfast.core.errors import HoldfastError

_CODES = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}


class Tally:
    """Shows what became of each letter, and ends with the code that the sum means."""

    def __init__(self, session: Session, word: str, total: int) -> None:
        self._session = session
        self._word = word
        self._total = total
        self._begun_us = time.time_ns() // 1000
        self._done = 0
        self._errors: list[HoldfastError] = []

    async def take(self, handled: AsyncIterator[Handled]) -> None:
        """A line each, with progress on a terminal."""
        with self._session.out.progress(self._word, self._total) as advance:
            async for each in handled:
                self._add(each)
                advance(1)

    def _add(self, handled: Handled) -> None:
        out = self._session.out
        letter = handled.letter
        record = {
            "id": letter.id,
            "message_id": letter.message_id,
            "queue": letter.queue,
            "replay_id": handled.replay_id,
            "error": handled.error,
        }
        if handled.error is not None:
            self._errors.append(handled.error)
            out.data(record)
            out.say(f"holdfast: {handled.error}")
            return
        self._done += 1
        as_what = f" as {handled.replay_id}" if handled.replay_id else ""
        out.data(record, f"{letter.id} {self._word}{as_what}")

    def finish(self) -> None:
        """The sum. Whoever was asked to stop says what is left, and how to go on."""
        out, asked_by = self._session.out, self._session.signals.number
        left = self._total - self._done - len(self._errors)
        failed = f", {len(self._errors)} not" if self._errors else ""
        if asked_by is not None and left > 0:
            out.say(
                f"stopped: {self._done} {self._word}{failed}, {left} left as they were. To go on, "
                f"repeat the command with --before {iso(self._begun_us)}: nothing is done twice, "
                "and what failed anew meanwhile stays out"
            )
            stop(_CODES[asked_by])
        if not self._total:
            out.say("no dead letter fits")
        elif self._total > 1:
            out.say(f"{self._done} {self._word}{failed}")
        if self._errors:
            stop(Exit.PARTIAL if self._done else exit_code(self._errors[0]))


def show_causes(out: Output, causes: list[Cause], word: str, *, edited: bool = False) -> None:
    """What would happen, by cause. `edited`: with an example of what would be sent."""
    if not causes:
        out.say("no dead letter fits")
        return
    out.table(
        ("count", "queue", "type", "reason", "error", "example", "what"),
        [(_record(cause, word), _cells(cause, word)) for cause in causes],
    )
    for cause in causes:
        if edited and cause.message is not None:
            shown = dump(cause.message.payload)
            out.line(f"  {cause.examples[0]} as {safe(cause.message.type)} {shown}")
    good = sum(cause.count for cause in causes if cause.problem is None)
    bad = sum(cause.count for cause in causes if cause.problem is not None)
    out.say(f"{good} {word}{f', {bad} cannot' if bad else ''}; nothing was changed")


def _record(cause: Cause, word: str) -> dict[str, Any]:
    found: dict[str, Any] = plain(cause)
    message = found.pop("message")
    found["payload"] = None if message is None else message["payload"]
    found["what"] = word if cause.problem is None else "cannot"
    return found


def _cells(cause: Cause, word: str) -> tuple[object, ...]:
    what = word if cause.problem is None else f"cannot: {cause.problem}"
    error = cause.error if len(cause.error) <= 60 else f"{cause.error[:59]}…"
    return (
        cause.count, cause.queue, cause.type or "-", cause.reason, error, cause.examples[0], what,
    )  # fmt: skip
