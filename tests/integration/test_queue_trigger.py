"""A queue trigger's life: starting and stopping, what it is given, and what fails around it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ackbone import (
    Config,
    ConfigError,
    IdempotencyStore,
    MockQueueAdapter,
    QueueTrigger,
    QueueTriggerConfig,
    RawMessage,
)
from ackbone.config import Worker
from ackbone.core.errors import StoreUnavailable
from ackbone.core.events import RETRIED, Entry
from ackbone.engine.worker import EngineWorker
from ackbone.queue_trigger import LONGEST_WAIT_S
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore
from ackbone.testing import (
    FakeClock,
    GovernanceResult,
    MockAgentRuntime,
    MockGovernanceLayer,
    MockIdempotencyStore,
    MockLedger,
    Signal,
)
from ackbone.triggers import broker
from tests.faults.waiting import until

PATIENCE_S = 60.0


def raw(message_id: str, body: bytes = b"{}", **headers: str) -> RawMessage:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RawMessage(message_id, body, named, datetime(2026, 1, 1, tzinfo=UTC), {})


class Kit:
    """Everything that a trigger needs."""

    def __init__(self, **config: Any) -> None:
        self.adapter = MockQueueAdapter()
        self.runtime = MockAgentRuntime()
        self.governance = MockGovernanceLayer()
        self.ledger = MockLedger()
        self.keys: Any = MockIdempotencyStore()
        settings = {"queue_name": "orders", "consumer_group": "agents", **config}
        self.config = QueueTriggerConfig(**{"retry_backoff_base": 0.001, **settings})

    def trigger(self, **options: Any) -> QueueTrigger:
        parts = (self.adapter, self.runtime, self.governance, self.ledger, self.keys)
        return QueueTrigger(self.config, *parts, **options)

    async def settled(self, count: int) -> None:
        await self.adapter.wait_settled(count, timeout=PATIENCE_S)


def file_store(trigger: QueueTrigger) -> SqliteStore:
    assert isinstance(trigger.store, SqliteStore)
    return trigger.store


async def test_a_second_start_is_refused_and_a_second_stop_is_nothing() -> None:
    trigger = Kit().trigger()
    await trigger.start()
    with pytest.raises(RuntimeError, match="Trigger is already running"):
        await trigger.start()
    await trigger.pause()
    with pytest.raises(RuntimeError, match="Trigger is already running"):
        await trigger.start()
    await trigger.stop()
    await trigger.stop()
    assert (await trigger.health_check())["status"] == "unhealthy"


async def test_a_caller_that_does_not_wait_for_its_stop_leaves_nothing_behind() -> None:
    kit = Kit()
    kit.runtime.block()
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger(shutdown_timeout_s=0.2)
    await trigger.start()
    await kit.runtime.events.wait(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(trigger.stop(), 0.01)
    await trigger.stop()
    assert kit.adapter.get_nacked() == ["a"]
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("ackbone")]


async def test_it_can_be_started_again_and_remembers() -> None:
    kit = Kit()
    trigger = kit.trigger()
    kit.adapter.enqueue(raw("a"))
    for round_ in (1, 2, 3):
        await trigger.start()
        await kit.settled(round_)
        await trigger.stop()
        kit.adapter.enqueue(raw("a"))
    assert kit.adapter.get_acked() == ["a", "a", "a"]
    assert len(kit.runtime.get_triggered_events()) == 1


async def test_a_queue_that_cannot_be_reached_is_named_without_its_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(MockQueueAdapter):
        tries = 0

        async def connect(self) -> None:
            self.tries += 1
            if self.tries == 1:
                raise OSError("amqp://agent:hunter2@queue.example:5672 refused")
            await super().connect()

    kit = Kit()
    kit.adapter = Away()
    trigger = kit.trigger()
    with pytest.raises(ConnectionError) as refused:
        await trigger.start()
    assert str(refused.value) == ("Cannot connect to orders: amqp://***@queue.example:5672 refused")
    assert refused.value.__suppress_context__
    assert "queue.example:5672" in caplog.text
    assert "hunter2" not in caplog.text
    kit.adapter.enqueue(raw("a"))
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()


async def test_messages_without_an_id_are_no_copies_of_one_another() -> None:
    kit = Kit()
    kit.keys = ClaimingStore()
    trigger = kit.trigger()
    await trigger.start()
    for body in (b"1", b"2", b"3"):
        kit.adapter.enqueue(raw("", body))
    await kit.settled(3)
    await trigger.stop()
    assert sorted(e.context["message"] for e in kit.runtime.get_triggered_events()) == [1, 2, 3]
    assert not await kit.keys.exists("")


async def test_what_was_read_before_the_adapter_failed_runs() -> None:
    class Breaks(MockQueueAdapter):
        async def consume(self) -> AsyncIterator[RawMessage]:
            yield raw("a")
            yield raw("b")
            raise ConnectionError("the connection is gone")

    kit = Kit(concurrency=5)
    kit.adapter = Breaks()
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(2)
    await trigger.stop()
    assert {"a", "b"} <= set(kit.adapter.get_acked())


@pytest.mark.parametrize("path", ["var/orders.db", "orders.db"])
async def test_the_path_of_its_store_is_taken_as_it_is(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/var exists, and a folder of that name here is meant, which does not exist yet."""
    monkeypatch.chdir(tmp_path)
    trigger = Kit().trigger(store=Path(path))
    await trigger.start()
    await trigger.stop()
    assert Path(path).exists()


def test_wrong_settings_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        Kit(concurrency=0, parser_type="xml", ack_policy="maybe").trigger()
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize("running", [1, 2, 4])
async def test_the_unfinished_are_counted_and_handed_back(
    running: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that run and those that wait for a retry, not those that ended or were never begun."""
    kit = Kit(concurrency=running, retry_backoff_base=3600.0)
    kit.runtime.fail(RuntimeError("later"), message_id="again")
    trigger = kit.trigger(shutdown_timeout_s=0.0)
    await trigger.start()
    retried = retries(trigger)
    kit.adapter.enqueue(raw("done"))
    await kit.settled(1)
    kit.adapter.enqueue(raw("again"))
    await retried.wait(timeout=PATIENCE_S)
    kit.runtime.block()
    for n in range(running + 1):
        kit.adapter.enqueue(raw(f"m{n}"))
    await kit.runtime.events.wait(2 + running, timeout=PATIENCE_S)
    await trigger.stop()
    assert kit.adapter.waiting == running + 2
    assert kit.adapter.get_acked() == ["done"]
    said = [r.getMessage() for r in caplog.records if r.name == "ackbone.trigger"]
    assert (
        f"Stopped orders with {running + 1} unfinished messages; the queue has them again" in said
    )
    assert not await kit.adapter.health_check()


async def test_a_stop_with_nothing_unfinished_says_nothing_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kit = Kit()
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert "unfinished" not in caplog.text


async def test_a_stop_waits_thirty_seconds_for_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    gate = kit.runtime.block()
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.runtime.events.wait(timeout=PATIENCE_S)
    drain, limits = EngineWorker.drain, []

    async def drained(self: EngineWorker, timeout_s: float | None = None) -> Any:
        limits.append(timeout_s)
        asyncio.get_running_loop().call_later(0.05, gate.set)  # it ends while the stop waits
        return await drain(self, timeout_s)

    monkeypatch.setattr(EngineWorker, "drain", drained)
    await trigger.stop()
    assert limits == [30.0]
    assert (kit.adapter.get_acked(), kit.adapter.waiting) == (["a"], 0)


async def test_a_retry_that_waits_at_the_stop_is_not_lost(home: Path) -> None:
    """Its copy stays with the queue until the message has ended, wherever it is waiting."""
    kit = Kit(retry_backoff_base=3600.0)
    kit.runtime.fail(RuntimeError("later"))
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger()
    await trigger.start()
    await retries(trigger).wait(timeout=PATIENCE_S)
    assert kit.adapter.get_acked() == []
    await trigger.stop()
    assert kit.adapter.waiting == 1

    again = Kit()
    again.adapter = kit.adapter
    fresh = again.trigger(store=home / "other.db")  # the first one's memory is gone
    await fresh.start()
    await again.settled(2)
    await fresh.stop()
    assert again.runtime.events.count == 1
    assert kit.adapter.get_acked() == ["a"]


def retries(trigger: QueueTrigger) -> Signal[str]:
    """Told of each retry from now on."""
    signal: Signal[str] = Signal("retries")

    def hear(entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry[3] == RETRIED:
                signal.emit(entry[2])

    trigger.store.on_events(hear)
    return signal


@pytest.mark.parametrize("form", ["path", "text", "config", "store"])
async def test_the_store_may_be_given_in_any_form(home: Path, form: str) -> None:
    path = home / "trigger.db"
    ensure_schema(path)
    store: Any = {
        "path": path,
        "text": str(path),
        "config": Config(home=home, store=f"sqlite:///{path}"),
        "store": SqliteStore(path),
    }[form]
    kit = Kit()
    for round_ in (1, 2):  # the second one finds what the first one knew
        kit.adapter.enqueue(raw("a"))
        trigger = kit.trigger(store=store)
        await trigger.start()
        await kit.settled(round_)
        await trigger.stop()
    if isinstance(store, SqliteStore):
        assert not await store.paused()  # given open, left open
        await store.close()
    assert kit.runtime.events.count == 1
    assert path.exists()


async def test_a_temporary_store_goes_with_its_trigger() -> None:
    trigger = Kit().trigger()
    await trigger.start()
    folder = file_store(trigger).path.parent
    await trigger.stop()
    assert folder.exists()
    del trigger
    assert not folder.exists()


async def test_without_governance_ledger_and_memory_it_runs_too() -> None:
    kit = Kit()
    kit.adapter.enqueue(raw("a"))
    trigger = QueueTrigger(kit.config, kit.adapter, kit.runtime, None, None, None)
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert kit.adapter.get_acked() == ["a"]


async def test_a_memory_that_fails_is_warned_of_counted_and_done_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kit = Kit()
    kit.keys.error = OSError("redis is away")
    for copy in ("a", "a", "b"):
        kit.adapter.enqueue(raw(copy))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(3)
    await trigger.stop()
    assert "redis is away, continuing without dedup" in caplog.text
    assert sorted(kit.adapter.get_acked()) == ["a", "a", "b"]
    assert kit.runtime.events.count == 2  # the store's own memory still holds
    assert trigger.metrics.read("queue_dedup_unavailable_total") == 4  # asked and told, for each


def configured(home: Path, **settings: Any) -> Config:
    return Config(home=home, store=f"sqlite:///{home / 'trigger.db'}", **settings)


@pytest.mark.parametrize("said_by", ["configuration", "argument"])
async def test_where_dedup_must_not_be_missed_messages_wait_for_it(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, said_by: str
) -> None:
    monkeypatch.setattr("ackbone.triggers.runner.DEDUP_AWAY_S", 0.01)
    kit = Kit(max_retries=0)
    kit.keys.error = OSError("redis://:hunter2@cache is away")
    kit.adapter.enqueue(raw("a"))
    if said_by == "configuration":  # it is the default there
        trigger = kit.trigger(store=configured(home))
    else:
        trigger = kit.trigger(on_dedup_unavailable="stop")
    await trigger.start()
    await until(
        lambda: trigger.metrics.read("queue_dedup_unavailable_total") >= 5, "it is asked again"
    )
    assert (await trigger.health_check())["status"] == "degraded"
    assert kit.runtime.events.count == 0
    assert kit.adapter.get_acked() == []
    assert "message a waits" in caplog.text
    assert "continuing without dedup" not in caplog.text
    assert "hunter2" not in caplog.text
    kit.keys.error = None
    await kit.settled(1)
    assert (await trigger.health_check())["status"] == "healthy"
    await trigger.stop()
    assert kit.adapter.get_acked() == ["a"]
    assert kit.runtime.events.count == 1
    assert trigger.metrics.read("queue_retries_total") == 0


@pytest.mark.parametrize("said_by", ["configuration", "argument"])
async def test_going_on_without_dedup_can_be_said(
    home: Path, caplog: pytest.LogCaptureFixture, said_by: str
) -> None:
    kit = Kit()
    kit.keys.error = OSError("redis is away")
    kit.adapter.enqueue(raw("a"))
    if said_by == "configuration":
        trigger = kit.trigger(store=configured(home, on_dedup_unavailable="continue"))
    else:
        trigger = kit.trigger(store=configured(home), on_dedup_unavailable="continue")
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert kit.runtime.events.count == 1
    assert "redis is away, continuing without dedup" in caplog.text


async def test_a_run_stands_though_its_result_cannot_be_recorded(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the setting: running it again would be worse than a memory that lacks it."""

    class Full(MockIdempotencyStore):
        async def set(self, key: str, value: Any, ttl: int) -> None:
            raise OSError("no room left")

    kit = Kit()
    kit.keys = Full()
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger(store=configured(home))
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert kit.adapter.get_acked() == ["a"]
    assert kit.runtime.events.count == 1
    assert "no room left, the run stands" in caplog.text


async def test_a_result_in_the_foreign_memory_makes_a_duplicate() -> None:
    kit = Kit()
    await kit.keys.set("a", {"run_id": "elsewhere"}, 60)
    kit.adapter.enqueue(raw("a"))
    kit.adapter.enqueue(raw("b"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(2)
    await trigger.stop()
    assert [e.message_id for e in kit.runtime.get_triggered_events()] == ["b"]
    assert sorted(kit.adapter.get_acked()) == ["a", "b"]
    assert trigger.metrics.read("queue_dedup_hits_total") == 1
    assert await kit.keys.get("b") == {"run_id": "run-1"}


class ClaimingStore(MockIdempotencyStore):
    """Atomic, as one in Redis would be."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[str, str] = {}

    async def claim(self, key: str, owner: str, ttl: int) -> bool | None:
        if await self.exists(key):
            return False
        return self.owners.setdefault(key, owner) == owner

    async def release(self, key: str, owner: str) -> None:
        if self.owners.get(key) == owner:
            del self.owners[key]


async def test_a_key_claimed_elsewhere_is_waited_for_and_a_failed_run_frees_its_own() -> None:
    kit = Kit(max_retries=3)
    kit.keys = keys = ClaimingStore()
    keys.owners["taken"] = "another process"
    kit.runtime.fail(RuntimeError("once"), message_id="mine")
    kit.adapter.enqueue(raw("x", x_dedup_key="taken"))
    kit.adapter.enqueue(raw("mine"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(1)
    assert kit.adapter.get_acked() == ["mine"]
    del keys.owners["taken"]
    await kit.settled(2)
    await trigger.stop()
    assert [e.message_id for e in kit.runtime.get_triggered_events()].count("x") == 1


async def test_a_memory_with_only_the_three_simple_methods_will_do() -> None:
    class Simple:
        def __init__(self) -> None:
            self.values: dict[str, Any] = {}

        async def exists(self, key: str) -> bool:
            return key in self.values

        async def get(self, key: str) -> Any:
            return self.values.get(key)

        async def set(self, key: str, value: Any, ttl: int) -> None:
            self.values[key] = value

    kit = Kit()
    kit.keys = Simple()
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert not isinstance(kit.keys, IdempotencyStore)
    assert kit.keys.values == {"a": {"run_id": "run-1"}}
    assert trigger.metrics.read("queue_dedup_unavailable_total") == 0


async def test_a_ledger_that_fails_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit()
    kit.ledger.error = OSError("disk full")
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert kit.adapter.get_acked() == ["a"]
    assert "your ledger refused the record" in caplog.text


async def test_governance_that_breaks_never_means_yes() -> None:
    kit = Kit(max_retries=1, ack_policy="dlq")
    kit.governance.error = OSError("policy server is away")
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert kit.runtime.events.count == 0
    assert len(kit.governance.checks) == 2
    ((dead, reason),) = kit.adapter.get_dlq()
    assert (dead.message_id, reason) == ("a", "OSError: policy server is away")


async def test_governance_that_hangs_never_means_yes() -> None:
    class Silent(MockGovernanceLayer):
        async def check_permission(self, context: dict[str, Any]) -> Any:
            await asyncio.Event().wait()

    kit = Kit(max_retries=1, ack_policy="dlq")
    kit.governance = Silent()
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger(worker=Worker(guard_timeout_s=0.05))
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert kit.runtime.events.count == 0
    ((dead, reason),) = kit.adapter.get_dlq()
    assert (dead.message_id, reason) == ("a", "TimeoutError")


async def test_governance_is_asked_for_as_long_as_the_settings_say() -> None:
    waited: list[float] = []

    class Silent(MockGovernanceLayer):
        async def check_permission(self, context: dict[str, Any]) -> Any:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            try:
                await asyncio.Event().wait()
            finally:
                waited.append(loop.time() - begun)

    kit = Kit(max_retries=2, ack_policy="dlq")
    kit.governance = Silent()
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger(worker=Worker(guard_timeout_s=0.3))
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert len(waited) == 3
    assert 0.29 <= min(waited) < 2.5  # the quickest of three, on a machine that is busy


@pytest.mark.parametrize("answer", ["no", "yes", 1, ["allowed"], None])
async def test_only_true_is_a_yes_of_governance(answer: Any) -> None:
    class Vague(MockGovernanceLayer):
        async def check_permission(self, context: dict[str, Any]) -> GovernanceResult:
            return GovernanceResult(allowed=answer)

    kit = Kit(max_retries=0, ack_policy="dlq")
    kit.governance = Vague()
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert kit.runtime.events.count == 0
    ((dead, reason),) = kit.adapter.get_dlq()
    assert (dead.message_id, reason) == ("a", "rejected by governance")


async def test_a_runtime_that_returns_nothing_is_not_run_again() -> None:
    async def behaviour(event: object) -> Mapping[str, Any]:
        return None  # type: ignore[return-value]

    kit = Kit()
    kit.runtime = MockAgentRuntime(behaviour)
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert (kit.adapter.get_acked(), kit.runtime.events.count) == (["a"], 1)


async def test_a_stream_that_breaks_off_is_taken_up_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Flaky(MockQueueAdapter):
        breaks = 2

        async def consume(self) -> AsyncIterator[RawMessage]:
            async for message in super().consume():
                yield message
                if self.breaks:
                    self.breaks -= 1
                    if self.breaks:
                        raise OSError("amqp://a:hunter2@h reset")
                    return

    kit = Kit()
    kit.adapter = Flaky()
    for n in range(4):
        kit.adapter.enqueue(raw(f"m{n}"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(4)
    await trigger.stop()
    assert sorted(kit.adapter.get_acked()) == ["m0", "m1", "m2", "m3"]
    assert "hunter2" not in caplog.text


async def test_an_id_that_was_used_for_something_else_is_buried() -> None:
    kit = Kit()
    kit.adapter.enqueue(raw("a", b"1"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(1)
    kit.adapter.enqueue(raw("a", b"2"))
    await kit.settled(2)
    await trigger.stop()
    assert kit.runtime.events.count == 1
    ((dead, reason),) = kit.adapter.get_dlq()
    assert (dead.body, reason) == (
        b"2",
        "message id a was used before, with another payload or type",
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (raw("a", x_tenant_id="no such/name"), "is not a valid name"),
        (raw("a", x_event_name="bell\a"), "control characters"),
        (RawMessage("a", None, {}, datetime.now(UTC), {}), "not a message"),  # type: ignore[arg-type]
        (RawMessage("a", b"{}", {}, "noon", {}), "not a message"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_message_is_buried_and_stops_nobody(
    message: RawMessage, reason: str
) -> None:
    kit = Kit()
    kit.adapter.enqueue(message)
    kit.adapter.enqueue(raw("b"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(2)
    await trigger.stop()
    assert kit.adapter.get_acked() == ["b"]
    ((dead, why),) = kit.adapter.get_dlq()
    assert dead.message_id == "a"
    assert reason in why


@pytest.mark.parametrize("odd", ["x" * 300, "nul\0", "lone \ud800"])
async def test_an_odd_id_or_key_is_kept_and_known_again(odd: str) -> None:
    kit = Kit()
    for message in (raw(odd), raw(odd), raw("k1", x_dedup_key=odd), raw("k2", x_dedup_key=odd)):
        kit.adapter.enqueue(message)
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(4)
    await trigger.stop()
    ran = [event.message_id for event in kit.runtime.get_triggered_events()]
    assert odd in ran
    assert len(ran) <= 2
    assert sorted(kit.adapter.get_acked()) == sorted([odd, odd, "k1", "k2"])
    assert kit.adapter.get_dlq() == []


async def test_waits_grow_without_a_limit_that_anybody_would_notice() -> None:
    kit = Kit(retry_backoff_base=1e300, retry_backoff_multiplier=1e300)
    kit.runtime.fail(RuntimeError("later"))
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger()
    await trigger.start()
    await retries(trigger).wait(timeout=PATIENCE_S)
    due = file_store(trigger).file.read_sync(
        lambda conn: conn.execute("SELECT due_at - started_at FROM queue_executions").fetchone()[0]
    )
    await trigger.stop()
    assert due == pytest.approx(LONGEST_WAIT_S * 1e6, rel=0.01)


async def test_a_paused_trigger_does_not_take_up_retries(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ackbone.trigger")
    kit = Kit(retry_backoff_base=5.0)
    clock = FakeClock()
    gate = kit.runtime.block()
    kit.runtime.fail(RuntimeError("later"))
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger(clock=clock, worker=Worker(lease_s=3600.0))
    await trigger.start()
    retried = retries(trigger)
    await kit.runtime.events.wait(1, timeout=PATIENCE_S)
    await trigger.pause()
    gate.set()
    await retried.wait(timeout=PATIENCE_S)
    clock.advance(10.0)
    for _ in range(5):  # room for the retry to begin, which it must not use
        await trigger.store.next_due_s(trigger._subscription)
        await file_store(trigger).file.write(lambda conn: None)
    assert kit.runtime.events.count == 1
    await trigger.resume()
    await kit.settled(1)
    await trigger.stop()
    assert kit.runtime.events.count == 2
    assert "Paused consumption" in caplog.text


async def test_a_queue_that_does_not_answer_holds_up_neither_others_nor_the_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Deaf(MockQueueAdapter):
        async def ack(self, message: RawMessage) -> None:
            if message.message_id == "m0":
                await asyncio.Event().wait()
            await super().ack(message)

    monkeypatch.setattr(broker, "TELL_WITHIN_S", 0.05)
    kit = Kit()
    kit.adapter = Deaf()
    for n in range(3):
        kit.adapter.enqueue(raw(f"m{n}"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(2)
    await trigger.stop()
    assert sorted(kit.adapter.get_acked()) == ["m1", "m2"]
    assert "message m0: the queue could not settle it: TimeoutError" in caplog.text


async def test_the_store_may_be_away_when_the_queue_is_to_be_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kit = Kit()
    trigger = kit.trigger()
    ask = trigger._endings
    errors = [StoreUnavailable("busy"), RuntimeError("a slip of ours")]

    async def endings(*args: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return await ask(*args)

    monkeypatch.setattr(trigger, "_endings", endings)
    kit.adapter.enqueue(raw("a"))
    kit.adapter.enqueue(raw("b", b"{"))
    await trigger.start()
    await kit.settled(2)
    await trigger.stop()
    assert (kit.adapter.get_acked(), len(kit.adapter.get_dlq())) == (["a"], 1)
    assert "messages of the queue stay unsettled: busy" in caplog.text
    assert "a slip of ours" in caplog.text
