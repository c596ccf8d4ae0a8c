"""Tracebacks of failed attempts, shortened to the frames of the user's code."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from ackbone.core.origin import is_ours, is_users
from ackbone.core.retry import describe

LONGEST = 4000
"""Characters that are kept of one traceback."""
UNMASKED = 10 * LONGEST
"""Characters that are masked. The text is shortened to `LONGEST` after that, because a cut through
a secret would leave a part of it."""
_CARRIED = "_ackbone_trace"
"""Attribute of an error that came from a child process: the traceback it had there."""


def user_trace(error: BaseException) -> str:
    """Return the traceback of an error with the frames of the user's code, not masked yet.

    Frames of ackbone are left out. Frames of libraries are left out as well, except for the one
    that raised. If there are no frames of the user, all frames of libraries are shown.
    """
    carried = getattr(error, _CARRIED, None)
    if isinstance(carried, str):
        return carried
    try:
        found = traceback.TracebackException.from_exception(error, lookup_lines=False, compact=True)
        _keep_user_frames(found)
        return bounded("".join(found.format()).rstrip(), UNMASKED)
    except Exception:  # an error that cannot be formatted must not become another failure
        return describe(error)


def carry(error: BaseException, trace: str) -> None:
    """Attach the traceback that an error had in another process."""
    setattr(error, _CARRIED, trace)


def bounded(text: str, longest: int = LONGEST) -> str:
    """Shorten a text in the middle: its end names the error."""
    if len(text) <= longest:
        return text
    cut, head = "\n  [...]\n", longest // 4
    return f"{text[:head]}{cut}{text[head + len(cut) - longest :]}"


def user_line(frame: FrameType | None) -> str:
    """Return file, line and function of the innermost frame of the user's code, or nothing."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f'"{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'
        frame = frame.f_back
    return ""


def warn(log: logging.Logger, text: str, *args: object, trace: str, trace_id: str) -> None:
    """Log a warning with a traceback that is already text."""
    if not log.isEnabledFor(logging.WARNING):
        return
    code = sys._getframe(1)
    record = log.makeRecord(
        log.name,
        logging.WARNING,
        code.f_code.co_filename,
        code.f_lineno,
        text,
        args,
        None,
        extra={"trace_id": trace_id},
    )
    record.exc_text = trace or None
    log.handle(record)


def _keep_user_frames(found: traceback.TracebackException) -> None:
    seen: set[int] = set()
    waiting = [found]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        each.stack[:] = _chosen(each.stack)
        linked = (each.__cause__, each.__context__, *(each.exceptions or ()))
        waiting.extend(other for other in linked if other is not None)


def _chosen(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    foreign = [frame for frame in stack if not is_ours(frame.filename)]
    users = [frame for frame in foreign if is_users(frame.filename)]
    if not users:
        return foreign
    last = stack[-1]
    raised_in_library = not is_ours(last.filename) and not is_users(last.filename)
    return [*users, last] if raised_in_library else users


Mask = Callable[[str], str]
"""Removes secrets from a text."""
