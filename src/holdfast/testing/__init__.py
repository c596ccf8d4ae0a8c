"""Tools for testing what is built on holdfast, and brokers of your own.

`BrokerConformance` is the suite that every broker passes, `StoreConformance` and
`GovernanceConformance` those of every store, `DeliveriesConformance` that of every queue of
replies; `FaultyBroker` fails on purpose; `FakeClock` stands still until it is moved; a `Signal` is
waited for instead of a time. The mocks are what a queue trigger is tested with: agent runtime,
governance, ledger, dedup memory.
"""

from .agents import (
    GovernanceResult,
    MockAgentRuntime,
    MockGovernanceLayer,
    MockIdempotencyStore,
    MockLedger,
    TriggeredEvent,
)
from .checks.delivery_desk import Desk
from .checks.store_governance import Office
from .clock import FakeClock
from .conformance import BrokerConformance
from .delivery_harness import DeliveryCheck, DeliveryHarness, DeliveryTrial, run_delivery_check
from .delivery_suite import DeliveriesConformance, DeliveryDeskConformance
from .faulty import Fault, FaultyBroker, Plan, chaos
from .governance_suite import GovernanceConformance
from .harness import BrokerHarness, Check, Trial, run_check
from .signals import Signal, SignalTimeout
from .store_harness import StoreCheck, StoreHarness, StoreTrial, run_store_check
from .store_suite import StoreConformance

__all__ = [
    "BrokerConformance",
    "BrokerHarness",
    "Check",
    "DeliveriesConformance",
    "DeliveryCheck",
    "DeliveryDeskConformance",
    "DeliveryHarness",
    "DeliveryTrial",
    "Desk",
    "FakeClock",
    "Fault",
    "FaultyBroker",
    "GovernanceConformance",
    "GovernanceResult",
    "MockAgentRuntime",
    "MockGovernanceLayer",
    "MockIdempotencyStore",
    "MockLedger",
    "Office",
    "Plan",
    "Signal",
    "SignalTimeout",
    "StoreCheck",
    "StoreConformance",
    "StoreHarness",
    "StoreTrial",
    "Trial",
    "TriggeredEvent",
    "chaos",
    "run_check",
    "run_delivery_check",
    "run_store_check",
]
