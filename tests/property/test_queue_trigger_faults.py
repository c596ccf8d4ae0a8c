"""The properties can fail: each planted fault is found by the property that speaks of it."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from ackbone import QueueTrigger
from ackbone import queue_trigger as root
from ackbone.core.codecs.codec import TextCodec
from ackbone.core.retry import RetryPolicy
from ackbone.core.store import Answer
from ackbone.engine import failures, flow, tracebacks
from ackbone.engine.flow import Slots
from ackbone.engine.worker import EngineWorker
from ackbone.observe.metrics import Metrics
from ackbone.testing import MockIdempotencyStore
from ackbone.triggers import announcer, broker, mapping, messages, runner
from ackbone.triggers.adapters import BrokerQueueAdapter
from ackbone.triggers.announcer import Announcer
from ackbone.triggers.broker import AdapterBroker, AdapterSource
from ackbone.triggers.messages import DEDUP_HEADER, JSONParser
from ackbone.triggers.runner import AgentRunner
from tests.property import (
    test_queue_trigger_dedup,
    test_queue_trigger_lifecycle,
    test_queue_trigger_messages,
    test_queue_trigger_outcomes,
    test_queue_trigger_records,
)
from tests.property.trigger_lab import PROPERTIES, QUICK

FILES = (
    test_queue_trigger_dedup,
    test_queue_trigger_lifecycle,
    test_queue_trigger_messages,
    test_queue_trigger_outcomes,
    test_queue_trigger_records,
)
Patch = pytest.MonkeyPatch
FAULTS: list[tuple[int, Callable[[Patch], None]]] = []


def fault(number: int) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Breaks one thing, which this property must notice."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS.append((number, plant))
        return plant

    return register


async def nothing(*args: Any, **options: Any) -> None:
    return None


@fault(1)
def one_kind_of_adapter_forgets_to_acknowledge(patch: Patch) -> None:
    patch.setattr(BrokerQueueAdapter, "ack", nothing)


@fault(2)
def the_time_of_reading_is_given_for_the_queues_own(patch: Patch) -> None:
    described = mapping._described
    late = datetime(2031, 1, 1, tzinfo=UTC)
    patch.setattr(mapping, "_described", lambda raw: described(replace(raw, timestamp=late)))


@fault(2)
def an_envelope_loses_its_dedup_key(patch: Patch) -> None:
    real = messages.header
    patch.setattr(messages, "header", lambda h, name: real(h, name) if name != DEDUP_HEADER else "")


@fault(3)
def a_parser_returns_nothing(patch: Patch) -> None:
    patch.setattr(JSONParser, "parse", lambda self, body: None)


@fault(3)
def the_engine_drops_white_space_of_texts(patch: Patch) -> None:
    real = TextCodec.payload
    patch.setattr(TextCodec, "payload", lambda self, body: real(self, body).strip())


@fault(4)
def what_cannot_be_parsed_is_acknowledged(patch: Patch) -> None:
    async def acknowledge(self: Announcer, copy: Any) -> None:
        await self._broker.tell(copy.raw, self._adapter.ack)

    patch.setattr(Announcer, "_dead_on_arrival", acknowledge)


@fault(5)
def one_slot_too_many(patch: Patch) -> None:
    real = Slots.__init__
    patch.setattr(Slots, "__init__", lambda self, size: real(self, size + 1))


@fault(6)
def pause_is_not_heard(patch: Patch) -> None:
    patch.setattr(AdapterBroker, "pause", lambda self: None)
    patch.setattr(EngineWorker, "pause", lambda self: None)


@fault(7)
def a_failed_message_takes_the_next_ones_along(patch: Patch) -> None:
    real, broken = AgentRunner.run, []

    async def run(self: AgentRunner, ctx: Any) -> Any:
        if self in broken:
            raise RuntimeError("the one before failed")
        try:
            return await real(self, ctx)
        except BaseException:
            broken.append(self)
            raise

    patch.setattr(AgentRunner, "run", run)


@fault(8)
def headers_are_lost_on_the_way(patch: Patch) -> None:
    described = mapping._described
    patch.setattr(mapping, "_described", lambda raw: described(replace(raw, headers={})))


@fault(9)
def the_configured_header_is_not_asked_for(patch: Patch) -> None:
    real = mapping.envelope_of
    patch.setattr(
        runner,
        "envelope_of",
        lambda m, config: real(m, replace(config, event_name_header="x-event-name")),
    )


@fault(10)
def governance_is_asked_and_not_obeyed(patch: Patch) -> None:
    real = AgentRunner._ask_governance

    async def ask(self: AgentRunner, envelope: Any) -> None:
        await real(self, envelope)

    patch.setattr(AgentRunner, "_ask_governance", ask)


@fault(11)
def the_policy_acts_on_every_copy(patch: Patch) -> None:
    real = AdapterSource.settle

    async def settle(self: AdapterSource, batch: Any) -> Any:
        again = [
            msgspec.structs.replace(s, reason="") if s.reason == Answer.FINAL else s for s in batch
        ]
        return await real(self, again)

    patch.setattr(AdapterSource, "settle", settle)


@fault(12)
def waits_are_a_little_too_long(patch: Patch) -> None:
    real = RetryPolicy.get_delay
    patch.setattr(RetryPolicy, "get_delay", lambda self, n: real(self, n) * 1.01)


@fault(13)
def the_history_is_left_behind(patch: Patch) -> None:
    real = Announcer._bury

    async def bury(self: Announcer, copy: Any, reason: str, history: Any) -> None:
        await real(self, copy, reason, ())

    patch.setattr(Announcer, "_bury", bury)


@fault(14)
def the_last_attempt_is_not_logged(patch: Patch) -> None:
    real = tracebacks.warn

    def warn(log: Any, text: str, *values: Any, **more: Any) -> None:
        if not any("to dead letters" in str(value) for value in values):
            real(log, text, *values, **more)

    patch.setattr(failures, "warn", warn)


@fault(15)
def the_dedup_key_is_not_read(patch: Patch) -> None:
    real = mapping.delivery_of

    def without(copy: Any) -> Any:
        delivery = real(copy)
        headers = {k: v for k, v in delivery.headers.items() if k != DEDUP_HEADER}
        return msgspec.structs.replace(delivery, headers=headers)

    patch.setattr(broker, "delivery_of", without)
    patch.setattr(MockIdempotencyStore, "exists", nothing)


@fault(16)
def the_window_never_ends(patch: Patch) -> None:
    real = mapping.subscription_of
    patch.setattr(
        root,
        "subscription_of",
        lambda config: msgspec.structs.replace(real(config), dedup_window_s=1e9),
    )


@fault(17)
def further_copies_are_not_counted(patch: Patch) -> None:
    patch.setattr(Metrics, "recognized", lambda self, queue, copies: None)


@fault(18)
def the_ledger_is_not_told_of_failures(patch: Patch) -> None:
    patch.setattr(announcer, "_RECORDED", announcer._RECORDED[:1])


@fault(19)
def usage_is_not_counted(patch: Patch) -> None:
    patch.setattr(runner, "_count_usage", lambda ctx, result: None)


@fault(20)
def the_tenant_is_forgotten(patch: Patch) -> None:
    real = mapping.envelope_of
    patch.setattr(runner, "envelope_of", lambda m, c: replace(real(m, c), tenant_id=None))


@fault(21)
def one_stage_is_not_logged(patch: Patch) -> None:
    real = flow._log_stage
    patch.setattr(
        flow,
        "_log_stage",
        lambda stage, run: None if stage == "message.parsed" else real(stage, run),
    )


@fault(22)
def every_slot_is_always_active(patch: Patch) -> None:
    real = QueueTrigger.health_check

    async def check(self: QueueTrigger) -> dict[str, Any]:
        return {**await real(self), "active_workers": self.config.concurrency}

    patch.setattr(QueueTrigger, "health_check", check)


@fault(23)
def errors_are_logged_as_they_are(patch: Patch) -> None:
    patch.setattr(runner, "mask_line", str)


@fault(24)
def what_is_unfinished_is_not_handed_back(patch: Patch) -> None:
    patch.setattr(AdapterBroker, "hand_back", nothing)


@pytest.mark.parametrize(
    ("number", "plant"), FAULTS, ids=[f"{n:02}-{plant.__name__}" for n, plant in FAULTS]
)
def test_a_planted_fault_is_found(
    number: int, plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        PROPERTIES[number](QUICK)


def test_a_fault_is_planted_for_each_of_the_24_properties() -> None:
    assert sorted({number for number, _ in FAULTS}) == list(range(1, 25))


def test_each_of_the_24_properties_has_its_label() -> None:
    labels = [
        re.match(r"Feature: triggers-queue, Property (\d+): \S", test.__doc__ or "")
        for file in FILES
        for name, test in vars(file).items()
        if name.startswith("test_property_")
    ]
    numbers = [int(label[1]) for label in labels if label is not None]
    assert len(numbers) == len(labels)
    assert sorted(numbers) == list(range(1, 25)) == sorted(PROPERTIES)
