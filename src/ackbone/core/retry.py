"""Retries: whether and when a failed message runs again, decided from attempt, error and policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from .errors import FinalError, RetryableError
from .outcome import Dead, Retry

LONGEST_S = 31_536_000.0
"""Longest wait that an upstream can ask for: one year, in seconds."""


class _Backoff(msgspec.Struct, frozen=True):
    """The settings that can be given by position."""

    max_retries: int = 3
    base_delay: float = 1.0
    max_delay: float = 60.0
    backoff_factor: float = 2.0


class RetryPolicy(_Backoff, frozen=True, kw_only=True):
    """How often a failed message is retried, and how long it waits before each retry.

    `max_retries` counts the retries after the first attempt. `RetryPolicy(3, 1.0, 60.0, 2.0)` gives
    max_retries, base_delay, max_delay and backoff_factor by position. All waits are in seconds.
    """

    table: tuple[float, ...] = ()
    """Waits in seconds that replace the exponential ones. The last one repeats."""
    jitter: float = 0.1
    """Adds up to this share of the wait, so that messages that failed together do not all return at
    the same time."""
    retry_on: tuple[type[BaseException], ...] = ()
    """If set, only these errors are retried."""
    final_on: tuple[type[BaseException], ...] = ()
    """Errors that are never retried, in addition to `FinalError`."""
    per_error: dict[type[BaseException], "RetryPolicy"] = {}  # noqa: UP037 - needed before the class exists
    """Policies for single error types. The most derived type wins."""

    def get_delay(self, retry_count: int) -> float:
        """Return the seconds before retry number `retry_count`, without jitter. The first is 0."""
        if self.table:
            return self.table[min(retry_count, len(self.table) - 1)]
        try:
            delay = self.base_delay * self.backoff_factor**retry_count
        except OverflowError:
            delay = self.max_delay
        return min(delay, self.max_delay)

    def for_error(self, error: BaseException) -> RetryPolicy:
        """Return the policy that applies to this error."""
        for kind in type(error).__mro__:
            if kind in self.per_error:
                return self.per_error[kind]
        return self

    def is_retryable(self, error: BaseException) -> bool:
        """Return True if this error is retried.

        Final errors never are. All others are, unless `retry_on` is set and does not list them.
        """
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
    """Decide what follows a failed attempt: a retry or a dead letter.

    `failures` counts this failure, too: 1 after the first one. `chance` returns the share of the
    jitter to use, from 0 to 1. `mask` removes secrets from the reason, which is stored.
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
    """Return the wait that the error asks for (`retry_after_s` or `retry_after`), at most a
    year."""
    value: Any = getattr(error, "retry_after_s", None)
    if value is None:
        value = getattr(error, "retry_after", None)
    try:
        return None if value is None else min(max(0.0, float(value)), LONGEST_S)
    except (TypeError, ValueError, OverflowError):
        return None


def describe(error: BaseException, mask: Callable[[str], str] = str) -> str:
    """Return the error's type and text, for the ledger and for people.

    The text is masked before it is shortened, so that no part of a secret is left.
    """
    name = type(error).__name__
    try:
        text = str(error).strip()
    except Exception:  # its __str__ raised
        text = ""
    return f"{name}: {mask(text[:20_000])}"[:2000] if text else name
