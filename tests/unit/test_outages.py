"""An outage is told twice: when it begins, and when nobody waits for it any more."""

import pytest

from ackbone.core.errors import (
    BrokerUnavailable,
    StoreCorrupt,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
)
from ackbone.engine.outages import BROKER, STORE, Outages
from ackbone.testing.clock import FakeClock

AWAY = StoreUnavailable("connection refused")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def outages(clock: FakeClock) -> Outages:
    return Outages(clock)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_many_callers_are_one_outage(
    outages: Outages, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        outages.failed("fetch", AWAY)
        outages.failed("commit", AWAY)
        outages.failed("reaper", AWAY, asks_again=False)
    begun = "the store is unavailable: connection refused; trying until it is back"
    assert said(caplog) == [begun]
    clock.advance(12.5)
    outages.worked("fetch", STORE)
    assert said(caplog) == [begun], "commits still fail: a full disk can be read"
    outages.worked("commit", STORE)
    assert said(caplog) == [begun, "the store is back after 12.5 s"]
    outages.worked("commit", STORE)
    assert len(said(caplog)) == 2
    outages.failed("fetch", AWAY)
    assert len(said(caplog)) == 3, "the next outage is told again"


def test_an_outage_that_only_a_relay_saw_ends_with_the_next_success(
    outages: Outages, caplog: pytest.LogCaptureFixture
) -> None:
    outages.failed("retention", AWAY, asks_again=False)
    outages.worked("receive", BROKER)
    assert len(said(caplog)) == 1, "it has not spoken to the store"
    outages.worked("fetch", STORE)
    assert said(caplog)[1:] == ["the store is back after 0.0 s"]


def test_store_and_broker_are_told_apart(
    outages: Outages, caplog: pytest.LogCaptureFixture
) -> None:
    outages.failed("receive", BrokerUnavailable("gone"))
    outages.failed("commit", StoreFull("no room"))
    outages.worked("commit", STORE)
    assert said(caplog)[2:] == ["the store is back after 0.0 s"]
    outages.worked("receive", BROKER)
    assert said(caplog)[3:] == ["the broker is back after 0.0 s"]


def test_a_caller_that_failed_for_both_clears_both(
    outages: Outages, caplog: pytest.LogCaptureFixture
) -> None:
    """A fetcher of a broker asks the store, too."""
    outages.failed("receive", AWAY)
    outages.failed("receive", BrokerUnavailable("gone"))
    outages.worked("receive", BROKER)
    assert sorted(said(caplog)[2:]) == [
        "the broker is back after 0.0 s",
        "the store is back after 0.0 s",
    ]


def test_a_refused_login_during_an_outage_is_told_once_more(
    outages: Outages, caplog: pytest.LogCaptureFixture
) -> None:
    outages.failed("fetch", AWAY)
    for _ in range(3):
        outages.failed("fetch", StoreDenied("refuses the login"))
    assert len(said(caplog)) == 2
    assert "refuses the login" in said(caplog)[1]


def test_other_errors_are_told_each_time(
    outages: Outages, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        outages.failed("fetch", StoreCorrupt("bytes"))
    assert said(caplog) == ["fetch: bytes", "fetch: bytes"]
