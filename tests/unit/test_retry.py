"""Retry decisions by Hypothesis: pure, bounded, the same for the same input."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import HandlerTimeout, RetryableError, TemporaryError
from holdfast.core.outcome import Dead, Retry
from holdfast.core.retry import LONGEST_S, RetryPolicy, decide, describe, retry_after

seconds = st.floats(0, 1e6)
policies = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 50),
    base_delay=seconds,
    max_delay=seconds,
    backoff_factor=st.floats(1, 100),
    jitter=st.floats(0, 1),
)


@given(policies, st.integers(0, 100_000))
def test_growing_waits_are_capped(policy: RetryPolicy, count: int) -> None:
    wait = policy.get_delay(count)
    assert 0 <= wait <= policy.max_delay
    assert wait <= policy.get_delay(count + 1), "never shorter than the one before"


@given(st.floats(0.001, 100), st.floats(1, 10), st.integers(0, 12))
def test_growing_waits_grow_by_the_factor(base: float, factor: float, count: int) -> None:
    policy = RetryPolicy(base_delay=base, backoff_factor=factor, max_delay=math.inf)
    assert policy.get_delay(count) == pytest.approx(base * factor**count)


@given(st.lists(seconds, min_size=1, max_size=8), st.integers(0, 20))
def test_a_table_of_waits(table: list[float], count: int) -> None:
    policy = RetryPolicy(table=tuple(table), max_delay=0.0, base_delay=99.0)
    assert policy.get_delay(count) == table[min(count, len(table) - 1)]


@given(policies, st.integers(1, 60), st.floats(0, 1))
def test_jitter_only_adds_its_share(policy: RetryPolicy, failures: int, chance: float) -> None:
    outcome = decide(policy, failures=failures, error=ValueError("x"), chance=lambda: chance)
    if failures > policy.max_retries:
        assert outcome == Dead(reason="retries_exhausted", error="ValueError: x")
        return
    assert isinstance(outcome, Retry)
    plain = policy.get_delay(failures - 1)
    assert plain <= outcome.after_s <= plain * (1 + policy.jitter) + 1e-9


@given(st.integers(0, 20))
def test_max_retries_counts_retries_after_the_first_attempt(most: int) -> None:
    policy = RetryPolicy(max_retries=most)
    outcomes = [decide(policy, failures=n, error=OSError()) for n in range(1, most + 3)]
    assert [type(outcome) for outcome in outcomes] == [Retry] * most + [Dead] * 2


@given(seconds, st.floats(0, 1e5))
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


def test_errors_by_type() -> None:
    policy = RetryPolicy(retry_on=(OSError,), final_on=(PermissionError,))
    assert policy.is_retryable(ConnectionError())
    assert not policy.is_retryable(ValueError())
    assert not policy.is_retryable(PermissionError())
    assert policy.is_retryable(TemporaryError()), "who raises it says so"
    assert not policy.is_retryable(HandlerTimeout("late"))


class _Mine(TemporaryError):
    pass


def test_a_policy_per_error_the_most_derived_wins() -> None:
    policy = RetryPolicy(
        max_retries=1,
        per_error={
            TemporaryError: RetryPolicy(max_retries=2, table=(2.0,), jitter=0.0),
            _Mine: RetryPolicy(max_retries=3, table=(3.0,), jitter=0.0),
        },
    )
    for error, most, wait in ((_Mine(), 3, 3.0), (TemporaryError(), 2, 2.0)):
        for failures in range(1, most + 1):
            again = Retry(after_s=wait, reason=type(error).__name__)
            assert decide(policy, failures=failures, error=error) == again
        assert isinstance(decide(policy, failures=most + 1, error=error), Dead)
    assert isinstance(decide(policy, failures=2, error=ValueError()), Dead)


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
