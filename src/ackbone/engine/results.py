"""What a handler's call came to: a result, an outcome, or an ordinary error."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import msgspec

from ackbone.core.errors import HandlerFailed
from ackbone.core.json_text import is_model
from ackbone.core.outcome import (
    Dead,
    Done,
    Duplicate,
    Outcome,
    Park,
    Rejected,
    Released,
    Retry,
)
from ackbone.core.retry import describe

from .context import SyncContext
from .handlers import Handler


class _Lost(msgspec.Struct, frozen=True):
    """No outcome: the claim is gone, nothing may be written."""


LOST: Any = _Lost()
_OUTCOMES = (Done, Retry, Dead, Park, Rejected, Duplicate, Released)
_DONE = Done()


def outcome_of(result: Any) -> Outcome:
    """A handler may return an outcome itself; anything else is its result."""
    if result is None:  # most often; and not to be any of those costs as much as the call
        return _DONE
    return result if isinstance(result, _OUTCOMES) else Done(result)


def run_id_of(result: Any) -> str | None:
    """The id of the agent's run, if the result names one."""
    if isinstance(result, dict):
        found = result.get("run_id")
    else:
        found = getattr(result, "run_id", None) if is_model(result) else None
    return None if found is None else str(found)


def as_failure(error: BaseException) -> Exception:
    """What a handler raised as an ordinary error: none of them may end the worker."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, asyncio.CancelledError):
        return HandlerFailed("the handler cancelled itself")
    return HandlerFailed(f"the handler raised {describe(error)}")


def call_plain(handler: Handler, context: SyncContext) -> Any:
    """Runs in a thread."""
    try:
        result = handler.call(context)
    except StopIteration as error:  # no future can carry it: whoever waits would wait for ever
        raise RuntimeError(f"{handler.name} raised StopIteration") from error
    except BaseException as error:  # a future would throw it into the engine's own coroutines
        raise as_failure(error) from error.__cause__
    if inspect.iscoroutine(result):
        result.close()
        raise HandlerFailed(f"{handler.name} returned a coroutine: define it with 'async def'")
    return result
