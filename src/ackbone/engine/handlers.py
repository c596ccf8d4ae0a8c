"""Who handles what: the registry of handlers by queue and message type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from ackbone.core.errors import ConfigError
from ackbone.core.retry import RetryPolicy

ANY_TYPE = "*"


class Handler(msgspec.Struct, frozen=True, kw_only=True):
    """One registered handler and how it is run."""

    type: str
    queue: str
    call: Callable[..., Any]
    retry: RetryPolicy = RetryPolicy()
    timeout_s: float | None = None
    isolation: str = "none"
    """`none`: in this process (sync ones in a thread); `process`: in a child that can be killed."""
    on_parked: str = "wait"
    focus: str | None = None
    """Of its queue's trigger, if there is one: the skills that the run is limited to."""

    @property
    def is_async(self) -> bool:
        try:
            return _is_async(self.call)
        except TypeError:  # an object that cannot be hashed, as most dataclasses
            return _is_async.__wrapped__(self.call)

    @property
    def name(self) -> str:
        return getattr(self.call, "__qualname__", repr(self.call))


@functools.lru_cache(maxsize=1024)
def _is_async(call: Callable[..., Any]) -> bool:
    """Asked for every run, and looking costs more than running."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - an object whose call is async
    )


def _check_call(handler: Handler) -> None:
    """Found here, and not by the first message."""
    try:
        # As it is called: a decorator may fill in arguments of the function that it wraps.
        signature = inspect.signature(handler.call, follow_wrapped=False)
    except (TypeError, ValueError):  # some built-in callables do not tell
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
    """Handlers by (queue, type); `*` takes every type of its queue that has no other handler."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Handler] = {}

    def add(self, handler: Handler) -> None:
        """Raises ConfigError if it cannot be called with a context."""
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
        """Types that have a handler here; `*` among them means all."""
        return [t for q, t in self._by_key if q == queue]

    @property
    def queues(self) -> list[str]:
        return sorted({queue for queue, _ in self._by_key})

    def __iter__(self) -> Any:
        return iter(self._by_key.values())
