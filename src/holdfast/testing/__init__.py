"""Tools for testing what is built on holdfast, and brokers of your own.

`BrokerConformance` is the suite that every broker passes; `FaultyBroker` fails on purpose;
`FakeClock` stands still until it is moved; a `Signal` is waited for instead of a time.
"""

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
    "Plan",
    "Signal",
    "SignalTimeout",
    "Trial",
    "chaos",
    "run_check",
]
