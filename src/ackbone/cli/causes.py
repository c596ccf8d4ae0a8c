"""What a dry run shows of dead letters: a group for each cause, and the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .output import Output, dump, plain, safe

if TYPE_CHECKING:
    from ackbone.admin.causes import Cause


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
