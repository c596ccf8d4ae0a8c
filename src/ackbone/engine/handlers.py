"""Handlers: the registry by queue and message type, and the meaning of what a handler returns."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ackbone.core.codecs.values import is_model
from ackbone.core.errors import ConfigError, HandlerFailed
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
from ackbone.core.retry import RetryPolicy, describe

if TYPE_CHECKING:
    from .context import SyncContext

ANY_TYPE = "*"
"""The type of a handler for the messages of a queue that no other handler takes."""
_OUTCOMES = (Done, Retry, Dead, Park, Rejected, Duplicate, Released)
_DONE = Done()


class _Lost(msgspec.Struct, frozen=True):
    """No outcome: the claim is lost, and nothing of this run may be written."""


LOST: Any = _Lost()


class Handler(msgspec.Struct, frozen=True, kw_only=True):
    """One registered handler and how it is run."""

    type: str
    queue: str
    call: Callable[..., Any]
    retry: RetryPolicy = RetryPolicy()
    timeout_s: float | None = None
    isolation: str = "none"
    """`none`: in this process, plain functions in a thread. `process`: in a child process that can
    be killed."""
    on_parked: str = "wait"
    focus: str | None = None
    """The skills that the run is limited to, if the trigger of the queue names some."""

    @property
    def is_async(self) -> bool:
        try:
            return _is_async(self.call)
        except TypeError:  # an object that cannot be hashed, as most dataclasses cannot
            return _is_async.__wrapped__(self.call)

    @property
    def name(self) -> str:
        return getattr(self.call, "__qualname__", repr(self.call))


@functools.lru_cache(maxsize=1024)
def _is_async(call: Callable[..., Any]) -> bool:
    """Cached because every run asks, and inspecting costs more than running."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - an object whose call is async
    )


def _check_call(handler: Handler) -> None:
    """Refuse a handler that cannot be called, before the first message finds out."""
    try:
        # Not the wrapped function: a decorator may fill in arguments of the one that it wraps.
        signature = inspect.signature(handler.call, follow_wrapped=False)
    except (TypeError, ValueError):  # some built-in callables have no signature
        if callable(handler.call):
            return
        raise ConfigError([f"the handler for {handler.type!r} is not a function"]) from None
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            [
                f"{_place(handler.call)}: {handler.name}{signature} cannot be a handler for "
                f"{handler.type!r}: {error}. A handler is called with one argument, the context: "
                f"def {handler.name.rpartition('.')[2]}(ctx)"
            ]
        ) from None


def _place(call: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(call), "__code__", None)
    return "?" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


class Handlers:
    """The handlers of an app, by queue and type."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Handler] = {}

    def add(self, handler: Handler) -> None:
        """Raises ConfigError if it cannot be called with a context, and ValueError if its queue has
        a handler for its type already."""
        _check_call(handler)
        key = (handler.queue, handler.type)
        if key in self._by_key:
            raise ValueError(
                f"queue {handler.queue or 'default'!r} has two handlers for type {handler.type!r}: "
                f"{self._by_key[key].name} and {handler.name}"
            )
        self._by_key[key] = handler

    def find(self, queue: str, message_type: str) -> Handler | None:
        found = self._by_key.get((queue, message_type))
        return found if found is not None else self._by_key.get((queue, ANY_TYPE))

    def types(self, queue: str) -> list[str]:
        """The types of a queue that have a handler. `*` among them means all."""
        return [t for q, t in self._by_key if q == queue]

    @property
    def queues(self) -> list[str]:
        return sorted({queue for queue, _ in self._by_key})

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._by_key.values())


def outcome_of(result: Any) -> Outcome:
    """A handler may return an outcome itself. Anything else is its result."""
    if result is None:  # the usual case, and `isinstance` costs as much as the handler's call
        return _DONE
    return result if isinstance(result, _OUTCOMES) else Done(result)


def run_id_of(result: Any) -> str | None:
    """Return the id of the agent's run, if the result names one."""
    if isinstance(result, dict):
        found = result.get("run_id")
    else:
        found = getattr(result, "run_id", None) if is_model(result) else None
    return None if found is None else str(found)


def as_failure(error: BaseException) -> Exception:
    """Return what a handler raised as an ordinary error, so that it cannot end the worker."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, asyncio.CancelledError):
        return HandlerFailed("the handler cancelled itself")
    return HandlerFailed(f"the handler raised {describe(error)}")


def call_plain(handler: Handler, context: SyncContext) -> Any:
    """Call a plain handler. Runs in a thread."""
    try:
        result = handler.call(context)
    except StopIteration as error:  # a future cannot carry it, and its caller would never wake up
        raise RuntimeError(f"{handler.name} raised StopIteration") from error
    except BaseException as error:  # a future would raise it in the engine's own coroutines
        raise as_failure(error) from error.__cause__
    if inspect.iscoroutine(result):
        result.close()
        raise HandlerFailed(f"{handler.name} returned a coroutine: define it with 'async def'")
    return result
