"""The breaker as a state machine: Hypothesis walks it in every way."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ackbone.core.breaker import Breaker, BreakerPolicy, Passage
from ackbone.testing import FakeClock


class BreakerMachine(RuleBasedStateMachine):
    """Messages ask, run and end in any order, while time goes on."""

    @initialize(failures=st.integers(1, 4), probe_s=st.floats(0.5, 60))
    def make(self, failures: int, probe_s: float) -> None:
        self.clock = FakeClock()
        self.policy = BreakerPolicy(failures=failures, probe_s=probe_s)
        self.breaker = Breaker(self.policy, self.clock.monotonic)
        self.in_a_row = 0
        self.opened_at = 0.0
        self.probe = False
        self.running = 0

    @property
    def open(self) -> bool:
        return self.in_a_row >= self.policy.failures

    @rule()
    def ask(self) -> None:
        passage = self.breaker.ask()
        if not self.open:
            assert passage is Passage.GO
            self.running += 1
        elif self.probe or self.clock.monotonic() < self.opened_at + self.policy.probe_s:
            assert passage is Passage.WAIT
        else:
            assert passage is Passage.PROBE
            self.probe = True

    @precondition(lambda self: self.running > 0)
    @rule(end=st.sampled_from(["succeeded", "failed", "cancelled"]))
    def one_that_was_let_through_ends(self, end: str) -> None:
        self.running -= 1
        self._end(end)

    @precondition(lambda self: self.probe)
    @rule(end=st.sampled_from(["succeeded", "failed", "cancelled"]))
    def the_probe_ends(self, end: str) -> None:
        self._end(end)

    def _end(self, end: str) -> None:
        was_open = self.open
        match end:
            case "succeeded":
                self.in_a_row = 0
                assert self.breaker.succeeded() is was_open
            case "failed":
                self.in_a_row += 1
                if self.open:
                    self.opened_at = self.clock.monotonic()
                assert self.breaker.failed() is (self.open and not was_open)
            case _:
                self.breaker.cancelled()
        self.probe = False

    @rule(seconds=st.floats(0, 100))
    def time_goes_on(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def it_says_what_it_is(self) -> None:
        if not hasattr(self, "breaker"):
            return
        assert self.breaker.is_open is self.open
        assert self.breaker.wait_s > 0
        due = self.clock.monotonic() >= self.opened_at + self.policy.probe_s
        assert self.breaker.may_probe is (self.open and not self.probe and due)


TestBreaker = BreakerMachine.TestCase


def test_it_never_stays_shut_for_good() -> None:
    """However probes end, another one is let through after the wait."""
    clock = FakeClock()
    breaker = Breaker(BreakerPolicy(failures=1, probe_s=10), clock.monotonic)
    breaker.failed()
    for end in (breaker.failed, breaker.cancelled, breaker.failed, breaker.cancelled):
        clock.advance(10)
        assert breaker.ask() is Passage.PROBE
        assert breaker.ask() is Passage.WAIT
        end()
    clock.advance(10)
    assert breaker.ask() is Passage.PROBE
    assert breaker.succeeded()
    assert breaker.ask() is Passage.GO


def test_while_a_probe_is_under_way_the_next_one_is_an_interval_away() -> None:
    clock = FakeClock()
    breaker = Breaker(BreakerPolicy(failures=1, probe_s=10), clock.monotonic)
    breaker.failed()
    clock.advance(4)
    assert breaker.next_probe_s == 6
    clock.advance(6)
    assert breaker.ask() is Passage.PROBE
    assert breaker.next_probe_s == 10
    breaker.failed()
    assert breaker.next_probe_s == 10
