"""Times as whole microseconds and back: nothing is lost on the way."""

from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ackbone.core.clock import from_us, to_us


@given(st.datetimes(timezones=st.just(UTC)))
@example(datetime(2099, 12, 30, 23, 59, 59, 999_999, tzinfo=UTC))
@example(datetime.max.replace(tzinfo=UTC))
def test_a_moment_is_the_same_after_both_ways(moment: datetime):
    assert from_us(to_us(moment)) == moment


@pytest.mark.parametrize("us", [4_100_000_000_000_001, 4_102_358_399_999_999, 1, 0, -1])
def test_microseconds_are_exact(us: int):
    assert to_us(from_us(us)) == us
