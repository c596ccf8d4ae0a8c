"""Whether and when to try again: a pure decision, bounded, the same for the same input."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ackbone.core.errors import (
    AuthorizationError,
    FinalError,
    HandlerTimeout,
    NotFoundError,
    RetryableError,
    TemporaryError,
    ValidationError,
)
from ackbone.core.outcome import Dead, Retry
from ackbone.core.retry import LONGEST_S, RetryPolicy, decide, describe, retry_after

seconds = st.floats(0, 1e6)
policies = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 50),
    base_delay=seconds,
    max_delay=seconds,
    backoff_factor=st.floats(1, 100),
    jitter=st.floats(0, 1),
)


def never() -> float:
    """No jitter."""
    return 0.0


# ── how long ─────────────────────────────────────────────────────────────────────────────────────


def test_waits_grow_by_the_factor_up_to_the_limit() -> None:
    policy = RetryPolicy(max_retries=3, base_delay=1.0, max_delay=60.0, backoff_factor=2.0)
    assert policy == RetryPolicy(3, 1.0, 60.0, 2.0), "the order of the constructor's parameters"
    assert RetryPolicy(4, 1.5, 50.0, 3.0) == RetryPolicy(
        max_retries=4, base_delay=1.5, max_delay=50.0, backoff_factor=3.0
    )
    assert [policy.get_delay(n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert policy.get_delay(100_000) == 60, "a power too large for a number is the limit"


@given(policies, st.integers(0, 100_000))
def test_growing_waits_are_capped(policy: RetryPolicy, count: int) -> None:
    wait = policy.get_delay(count)
    assert 0 <= wait <= policy.max_delay
    assert wait <= policy.get_delay(count + 1), "never shorter than the one before"


@given(st.floats(0.001, 100), st.floats(1, 10), st.integers(0, 12))
def test_growing_waits_grow_by_the_factor(base: float, factor: float, count: int) -> None:
    policy = RetryPolicy(base_delay=base, backoff_factor=factor, max_delay=math.inf)
    assert policy.get_delay(count) == pytest.approx(base * factor**count)


def test_a_table_takes_the_place_of_growing_waits_and_its_last_one_repeats() -> None:
    policy = RetryPolicy(table=(60.0, 300.0, 900.0))
    assert [policy.get_delay(n) for n in range(5)] == [60, 300, 900, 900, 900]


@given(st.lists(seconds, min_size=1, max_size=8), st.integers(0, 20))
def test_a_table_knows_no_limit_but_its_own(table: list[float], count: int) -> None:
    policy = RetryPolicy(table=tuple(table), max_delay=0.0, base_delay=99.0)
    assert policy.get_delay(count) == table[min(count, len(table) - 1)]


@given(policies, st.integers(1, 60), st.floats(0, 1))
@example(RetryPolicy(base_delay=10.0, jitter=0.1), 1, 0.0)
@example(RetryPolicy(base_delay=10.0, jitter=0.1), 1, 0.5)
@example(RetryPolicy(base_delay=10.0, jitter=0.1), 1, 1.0)
def test_jitter_only_adds_its_share(policy: RetryPolicy, failures: int, chance: float) -> None:
    outcome = decide(policy, failures=failures, error=ValueError("x"), chance=lambda: chance)
    if failures > policy.max_retries:
        assert outcome == Dead(reason="retries_exhausted", error="ValueError: x")
        return
    assert isinstance(outcome, Retry)
    plain = policy.get_delay(failures - 1)
    assert outcome.after_s == pytest.approx(plain * (1 + policy.jitter * chance))
    assert outcome.after_s >= plain


# ── how often ────────────────────────────────────────────────────────────────────────────────────


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


@given(st.integers(0, 20))
def test_max_retries_is_how_many_there_are(most: int) -> None:
    policy = RetryPolicy(max_retries=most)
    outcomes = [decide(policy, failures=n, error=OSError()) for n in range(1, most + 3)]
    assert [type(outcome) for outcome in outcomes] == [Retry] * most + [Dead] * 2


# ── which errors ─────────────────────────────────────────────────────────────────────────────────


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


ONLY = RetryPolicy(retry_on=(ConnectionError,))
NEVER_THOSE = RetryPolicy(final_on=(LookupError,))
BOTH = RetryPolicy(retry_on=(OSError,), final_on=(PermissionError,))


@pytest.mark.parametrize(
    ("policy", "error", "retried"),
    [
        (ONLY, ConnectionResetError(), True),
        (ONLY, ValueError(), False),
        (NEVER_THOSE, KeyError("x"), False),
        (NEVER_THOSE, ValueError(), True),
        (BOTH, ConnectionError(), True),
        (BOTH, ValueError(), False),
        (BOTH, PermissionError(), False),
        (BOTH, TemporaryError(), True),  # who raises it says so
        (BOTH, HandlerTimeout("late"), False),
    ],
)
def test_lists_narrow_what_is_retried(policy: RetryPolicy, error: Exception, retried: bool) -> None:
    assert policy.is_retryable(error) is retried
    assert isinstance(decide(policy, failures=1, error=error), Retry) is retried


class _Mine(TemporaryError):
    pass


PER_ERROR = RetryPolicy(
    max_retries=1,
    per_error={
        TemporaryError: RetryPolicy(max_retries=2, table=(2.0,), jitter=0.0),
        _Mine: RetryPolicy(max_retries=3, table=(3.0,), jitter=0.0),
        OSError: RetryPolicy(max_retries=1, base_delay=5.0, jitter=0.0),
        ConnectionError: RetryPolicy(max_retries=1, base_delay=7.0, jitter=0.0),
    },
)


@pytest.mark.parametrize(
    ("error", "most", "wait"),
    [
        (_Mine(), 3, 3.0),
        (TemporaryError(), 2, 2.0),
        (TimeoutError(), 1, 5.0),
        (ConnectionResetError(), 1, 7.0),
        (ValueError(), 1, 1.0),
    ],
)
def test_the_most_derived_error_has_its_own_policy(
    error: Exception, most: int, wait: float
) -> None:
    for failures in range(1, most + 1):
        again = Retry(after_s=wait, reason=type(error).__name__)
        assert decide(PER_ERROR, failures=failures, error=error, chance=never) == again
    assert isinstance(decide(PER_ERROR, failures=most + 1, error=error), Dead)


def test_an_error_without_a_policy_of_its_own_may_have_no_retry_at_all() -> None:
    policy = RetryPolicy(max_retries=0, per_error={OSError: RetryPolicy(max_retries=1)})
    assert isinstance(decide(policy, failures=1, error=ValueError()), Dead)
    assert isinstance(decide(policy, failures=1, error=OSError()), Retry)


# ── what the upstream asks for ───────────────────────────────────────────────────────────────────


@given(seconds, st.floats(0, 1e5))
@example(30.0, 2.0)
@example(0.5, 2.0)
@example(0.0, 2.0)
def test_the_upstream_may_ask_for_more_never_for_less(asked: float, own: float) -> None:
    policy = RetryPolicy(base_delay=own, max_delay=own, jitter=0.0)
    outcome = decide(policy, failures=1, error=TemporaryError("busy", retry_after_s=asked))
    assert isinstance(outcome, Retry)
    assert outcome.after_s == max(own, asked)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (5, 5.0),
        ("7.5", 7.5),
        (0, 0.0),
        (-3, 0.0),
        (float("nan"), 0.0),
        (float("inf"), LONGEST_S),
        (10**400, None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
        ([], None),
    ],
)
def test_what_an_error_may_say_about_waiting(value: Any, seconds: float | None) -> None:
    assert retry_after(RetryableError("x", retry_after_s=value)) == seconds

    class Foreign(Exception):
        retry_after = value

    assert retry_after(Foreign()) == seconds


@given(st.one_of(st.floats(), st.integers(), st.text(max_size=20), st.none(), st.binary()))
def test_no_wait_is_ever_unstorable(value: Any) -> None:
    outcome = decide(RetryPolicy(), failures=1, error=RetryableError(retry_after_s=value))
    assert isinstance(outcome, Retry)
    assert 0 <= outcome.after_s <= LONGEST_S


# ── its words ────────────────────────────────────────────────────────────────────────────────────


@given(st.text(alphabet=st.characters(), max_size=50))
def test_an_error_in_one_line(text: str) -> None:
    said = describe(ValueError(text))
    assert said.startswith("ValueError")
    assert len(said) <= 2000


def test_an_error_that_cannot_say_what_it_is() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert describe(Silent()) == "Silent"
