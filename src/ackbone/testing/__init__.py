"""Tools for testing what is built on ackbone, and brokers of your own.

`BrokerConformance` is the suite that every broker passes; `FaultyBroker` fails on purpose;
`FakeClock` stands still until it is moved; a `Signal` is waited for instead of a time. The mocks
are what a queue trigger is tested with: agent runtime, governance, ledger, dedup memory.
"""

from .agents import (
    GovernanceResult,
    MockAgentRuntime,
    MockGovernanceLayer,
    MockIdempotencyStore,
    MockLedger,
    TriggeredEvent,
)
from .clock import FakeClock
from .conformance import BrokerConformance
from .faulty import Fault, FaultyBroker, Plan, chaos
from .harness import BrokerHarness, Check, Trial, run_check
from .signals import Signal, SignalTimeout

__all__ = [
    "BrokerConformance",
    "BrokerHarness",
    "Check",
    "FakeClock",
    "Fault",
    "FaultyBroker",
    "GovernanceResult",
    "MockAgentRuntime",
    "MockGovernanceLayer",
    "MockIdempotencyStore",
    "MockLedger",
    "Plan",
    "Signal",
    "SignalTimeout",
    "Trial",
    "TriggeredEvent",
    "chaos",
    "run_check",
]
