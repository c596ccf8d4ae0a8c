"""Whether and when to try again: a pure decision over attempt, error and policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from .errors import FinalError, RetryableError
from .outcome import Dead, Retry

LONGEST_S = 31_536_000.0
"""No wait is longer than a year, whatever an upstream asks for."""


class _Backoff(msgspec.Struct, frozen=True):
    """The settings that may be given by position."""

    max_retries: int = 3
    base_delay: float = 1.0
    max_delay: float = 60.0
    backoff_factor: float = 2.0


class RetryPolicy(_Backoff, frozen=True, kw_only=True):
    """How often and how long to wait. `max_retries` counts retries after the first attempt.

    `RetryPolicy(3, 1.0, 60.0, 2.0)` names the first four by position: max_retries, base_delay,
    max_delay, backoff_factor.
    """

    table: tuple[float, ...] = ()
    """Waits in seconds, used instead of the exponential ones; the last one repeats."""
    jitter: float = 0.1
    """Adds up to this share of the wait, so that what failed together does not return together."""
    retry_on: tuple[type[BaseException], ...] = ()
    """If set, only these are retried."""
    final_on: tuple[type[BaseException], ...] = ()
    """Never retried, beside `FinalError`."""
    per_error: dict[type[BaseException], "RetryPolicy"] = {}  # noqa: UP037 - needed before the class exists
    """A policy of its own for an error type (the most derived one wins)."""

    def get_delay(self, retry_count: int) -> float:
        """Seconds before retry number `retry_count` (the first retry is 0), without jitter."""
        if self.table:
            return self.table[min(retry_count, len(self.table) - 1)]
        try:
            delay = self.base_delay * self.backoff_factor**retry_count
        except OverflowError:
            delay = self.max_delay
        return min(delay, self.max_delay)

    def for_error(self, error: BaseException) -> RetryPolicy:
        """The policy that applies to this error."""
        for kind in type(error).__mro__:
            if kind in self.per_error:
                return self.per_error[kind]
        return self

    def is_retryable(self, error: BaseException) -> bool:
        """Final errors are never retried; everything else is, unless `retry_on` narrows it."""
        if isinstance(error, RetryableError):
            return True
        if isinstance(error, (FinalError, *self.final_on)):
            return False
        return not self.retry_on or isinstance(error, self.retry_on)


def decide(
    policy: RetryPolicy,
    *,
    failures: int,
    error: BaseException,
    chance: Callable[[], float] = random.random,
    mask: Callable[[str], str] = str,
) -> Retry | Dead:
    """What follows a failed attempt. `failures` counts this one (1 after the first failure).

    `mask` takes secrets out of the reason, which is kept.
    """
    applied = policy.for_error(error)
    reason = describe(error, mask)
    if not applied.is_retryable(error):
        return Dead(reason="final_error", error=reason)
    if failures > applied.max_retries:
        return Dead(reason="retries_exhausted", error=reason)
    delay = applied.get_delay(failures - 1)
    delay += delay * applied.jitter * chance()
    return Retry(after_s=max(delay, retry_after(error) or 0.0), reason=reason)


def retry_after(error: BaseException) -> float | None:
    """Seconds that the upstream asked us to wait, if the error says so; at most a year."""
    value: Any = getattr(error, "retry_after_s", None)
    if value is None:
        value = getattr(error, "retry_after", None)
    try:
        return None if value is None else min(max(0.0, float(value)), LONGEST_S)
    except (TypeError, ValueError, OverflowError):
        return None


def describe(error: BaseException, mask: Callable[[str], str] = str) -> str:
    """One line for ledgers and people: the type and what it said, masked before it is cut."""
    name = type(error).__name__
    try:
        text = str(error).strip()
    except Exception:  # an error that cannot even say what it is
        text = ""
    return f"{name}: {mask(text[:20_000])}"[:2000] if text else name
