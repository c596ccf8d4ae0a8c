"""Whether and when to try again: no clock, no broker, only values."""

import functools
from typing import Any

import pytest

from holdfast.core.errors import (
    AuthorizationError,
    FinalError,
    NotFoundError,
    RetryableError,
    TemporaryError,
    ValidationError,
)
from holdfast.core.outcome import Dead, Retry
from holdfast.core.retry import RetryPolicy, decide


def never() -> float:
    """No jitter."""
    return 0.0


def test_waits_grow_by_the_factor_up_to_the_limit() -> None:
    policy = RetryPolicy(max_retries=3, base_delay=1.0, max_delay=60.0, backoff_factor=2.0)
    assert [policy.get_delay(n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert policy.get_delay(100_000) == 60, "a power too large for a number is the limit"


def test_a_table_takes_the_place_of_growing_waits_and_its_last_one_repeats() -> None:
    policy = RetryPolicy(table=(60.0, 300.0, 900.0))
    assert [policy.get_delay(n) for n in range(5)] == [60, 300, 900, 900, 900]


def test_retries_are_counted_after_the_first_attempt() -> None:
    policy = RetryPolicy(max_retries=2)
    decisions = [
        decide(policy, failures=n, error=RuntimeError("no"), chance=never) for n in (1, 2, 3)
    ]
    assert decisions == [
        Retry(after_s=1.0, reason="RuntimeError: no"),
        Retry(after_s=2.0, reason="RuntimeError: no"),
        Dead(reason="retries_exhausted", error="RuntimeError: no"),
    ]


@pytest.mark.parametrize(
    "error", [FinalError("x"), ValidationError("x"), AuthorizationError("x"), NotFoundError("x")]
)
def test_final_errors_are_dead_at_once(error: Exception) -> None:
    decision = decide(RetryPolicy(max_retries=9), failures=1, error=error)
    assert isinstance(decision, Dead)
    assert decision.reason == "final_error"


@pytest.mark.parametrize("error", [RetryableError("x"), TemporaryError("x")])
def test_errors_that_ask_for_it_are_retried_whatever_the_lists_say(error: Exception) -> None:
    policy = RetryPolicy(retry_on=(KeyError,), final_on=(RetryableError,))
    assert isinstance(decide(policy, failures=1, error=error), Retry)


def test_lists_narrow_what_is_retried() -> None:
    only = RetryPolicy(retry_on=(ConnectionError,))
    assert isinstance(decide(only, failures=1, error=ConnectionResetError()), Retry)
    assert isinstance(decide(only, failures=1, error=ValueError()), Dead)
    never_those = RetryPolicy(final_on=(LookupError,))
    assert isinstance(decide(never_those, failures=1, error=KeyError("x")), Dead)
    assert isinstance(decide(never_those, failures=1, error=ValueError()), Retry)


def test_the_most_derived_error_has_its_own_policy() -> None:
    policy = RetryPolicy(
        max_retries=0,
        per_error={
            OSError: RetryPolicy(max_retries=1, base_delay=5.0),
            ConnectionError: RetryPolicy(max_retries=1, base_delay=7.0),
        },
    )
    waits: dict[Any, float] = {}
    for error in (TimeoutError(), ConnectionResetError()):
        decision = decide(policy, failures=1, error=error, chance=never)
        assert isinstance(decision, Retry)
        waits[type(error)] = decision.after_s
    assert waits == {TimeoutError: 5.0, ConnectionResetError: 7.0}
    assert isinstance(decide(policy, failures=1, error=ValueError()), Dead)


def test_what_the_upstream_asks_for_is_the_least_to_wait() -> None:
    policy = RetryPolicy(base_delay=2.0)
    for asked, waited in ((30.0, 30.0), (0.5, 2.0), (0.0, 2.0)):
        error = TemporaryError("slow down", retry_after_s=asked)
        decision = decide(policy, failures=1, error=error, chance=never)
        assert isinstance(decision, Retry)
        assert decision.after_s == waited


def test_jitter_only_adds_and_not_more_than_its_share() -> None:
    policy = RetryPolicy(base_delay=10.0, jitter=0.1)
    waits = []
    for chance in (0.0, 0.5, 1.0):
        decision = decide(
            policy, failures=1, error=ValueError(), chance=functools.partial(float, chance)
        )
        assert isinstance(decision, Retry)
        waits.append(decision.after_s)
    assert waits == [10.0, 10.5, 11.0]
