"""Tools for testing what you build on ackbone, and brokers of your own.

`BrokerConformance` is the suite that every broker passes. A `FakeClock` stands still until a test
moves it. A `Signal` lets a test wait for an event instead of a time. A `PretendingBroker` is a
memory broker with the limits of Kafka, SQS or Service Bus. The mocks replace the parts around a
queue trigger: agent runtime, governance, ledger and dedup store.
"""

from ackbone.brokers.pretending import PretendingBroker

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
from .harness import BrokerHarness, Check, Trial, run_check
from .signals import Signal, SignalTimeout

__all__ = [
    "BrokerConformance",
    "BrokerHarness",
    "Check",
    "FakeClock",
    "GovernanceResult",
    "MockAgentRuntime",
    "MockGovernanceLayer",
    "MockIdempotencyStore",
    "MockLedger",
    "PretendingBroker",
    "Signal",
    "SignalTimeout",
    "Trial",
    "TriggeredEvent",
    "run_check",
]
