"""A queue trigger whose truth is in PostgreSQL."""

from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ackbone import (
    Config,
    ConfigError,
    MockQueueAdapter,
    QueueTrigger,
    QueueTriggerConfig,
    RawMessage,
)
from ackbone.config import Retention
from ackbone.store.ledger import ledger_key
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.postgres.verify import verify_ledger
from ackbone.testing import (
    MockAgentRuntime,
    MockGovernanceLayer,
    MockIdempotencyStore,
    MockLedger,
)
from tests.faults.waiting import until
from tests.integration.test_queue_trigger import Kit, raw
from tests.servers.postgres_clock import ServerClock

pytestmark = pytest.mark.xdist_group("postgres")


def rows(url: str, sql: str) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as conn:
        return conn.execute(sql).fetchall()


async def test_the_sample_of_the_specification(home: Path, postgres_url: str) -> None:
    """As it is printed there, but that it waits for the end and not for half a second."""
    mock_adapter = MockQueueAdapter()
    mock_runtime = MockAgentRuntime()
    mock_ledger = MockLedger()
    trigger = QueueTrigger(
        config=QueueTriggerConfig(
            queue_name="test-queue", consumer_group="test-group", concurrency=1
        ),
        adapter=mock_adapter,
        agent_runtime=mock_runtime,
        governance=MockGovernanceLayer(),
        ledger=mock_ledger,
        idempotency_store=MockIdempotencyStore(),
        store=postgres_url,
    )
    mock_adapter.enqueue(
        RawMessage(
            message_id="test-001",
            body=b'{"action": "test"}',
            headers={"x-event-name": "test_event"},
            timestamp=datetime.now(),  # noqa: DTZ005 - as printed
            metadata={},
        )
    )
    await trigger.start()
    await mock_adapter.wait_settled(1, timeout=60)
    await trigger.stop()

    assert "test-001" in mock_adapter.get_acked()
    assert len(mock_runtime.get_triggered_events()) == 1
    assert len(mock_ledger.get_records()) == 1
    ended = "SELECT message_id, event_name, status FROM queue_executions"
    assert rows(postgres_url, ended) == [("test-001", "test_event", "succeeded")]
    report = verify_ledger(postgres_url, ledger_key(home / "ledger.key"), home / "ledger.anchors")
    assert report.ok, report.findings
    assert report.anchors > 0
    assert not (home / "ackbone.db").exists(), "no broker of ours is needed"


@pytest.mark.parametrize("form", ["url", "config", "store"])
async def test_the_store_may_be_given_in_any_form(home: Path, postgres_url: str, form: str) -> None:
    store: Any = {
        "url": postgres_url,
        "config": Config(home=home, store=postgres_url),
        "store": PostgresStore(postgres_url),
    }[form]
    kit = Kit()
    for round_ in (1, 2):  # the second one finds what the first one knew
        kit.adapter.enqueue(raw("a"))
        trigger = kit.trigger(store=store)
        await trigger.start()
        await kit.settled(round_)
        await trigger.stop()
    if isinstance(store, PostgresStore):
        assert not await store.paused()  # given open, left open
        await store.close()
        assert not (home / "ledger.key").exists(), "its owner's to keep"
    assert kit.runtime.events.count == 1


async def test_a_failure_is_told_with_its_attempts(home: Path, postgres_url: str) -> None:
    kit = Kit(max_retries=2, ack_policy="dlq")
    kit.runtime.fail(RuntimeError("no luck"), times=3, message_id="a")
    kit.governance.deny("not today", policies=["quiet-hours"], message_id="b")
    for message in (raw("a"), raw("b"), raw("c", b"{")):
        kit.adapter.enqueue(message)
    trigger = kit.trigger(store=postgres_url)
    await trigger.start()
    await kit.settled(3)
    await trigger.stop()
    told = {message.message_id: (message, reason) for message, reason in kit.adapter.get_dlq()}
    assert set(told) == {"a", "b", "c"}
    assert "no luck" in told["a"][1]
    assert told["b"][1] == "not today"
    statuses = {entry["message_id"]: entry["status"] for entry in kit.ledger.get_records()}
    assert statuses["a"] == "failed"
    assert statuses["b"] == "rejected"
    found = rows(postgres_url, "SELECT json_array_length(history) FROM dead_letters WHERE"
                 " message_id = 'a'")  # fmt: skip
    assert found == [(3,)]


async def test_a_wait_goes_by_the_clock_of_the_server(home: Path, postgres_url: str) -> None:
    clock = ServerClock(postgres_url)
    kit = Kit(retry_backoff_base=3600.0)
    kit.runtime.fail(RuntimeError("later"))
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger(store=Config(home=home, store=postgres_url), clock=clock)
    try:
        await trigger.start()
        waits = "SELECT count(*) FROM queue_executions WHERE status = 'ready'"
        await until(lambda: rows(postgres_url, waits) == [(1,)], "it waits for its retry")
        assert kit.runtime.events.count == 1
        clock.advance(3601.0)
        await kit.settled(1)
        await trigger.stop()
    finally:
        clock.close()
    assert kit.runtime.events.count == 2
    assert kit.adapter.get_acked() == ["a"]


async def test_what_is_old_goes_by_the_configuration(home: Path, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as conn:
        conn.execute(
            "INSERT INTO queue_metrics (id, tenant_id, queue_name, metric_name, metric_value,"
            " timestamp) VALUES (gen_random_uuid(), 'acme', 'q', 'm', 1, 'epoch')"
        )
    keep = Retention(events_days=90.0)
    trigger = Kit().trigger(store=Config(home=home, store=postgres_url, retention=keep))
    await trigger.start()
    try:
        left = "SELECT count(*) FROM queue_metrics WHERE timestamp = 'epoch'"
        await until(lambda: rows(postgres_url, left) == [(0,)], "the old count is gone")
    finally:
        await trigger.stop()


async def test_rows_of_its_metrics_have_their_tenant(home: Path, postgres_url: str) -> None:
    kit = Kit(metrics_export_interval=0.05)
    for n, tenant in enumerate(["acme", "acme", "globex"]):
        kit.adapter.enqueue(raw(f"m{n}", x_tenant_id=tenant))
    trigger = kit.trigger(store=Config(home=home, store=postgres_url))
    await trigger.start()
    try:
        sums = (
            "SELECT queue_name, tenant_id, sum(metric_value) FROM queue_metrics"
            " WHERE metric_name = 'queue_messages_consumed_total' GROUP BY 1, 2 ORDER BY 2"
        )
        expected = [("orders", "acme", 2.0), ("orders", "globex", 1.0)]
        await until(lambda: rows(postgres_url, sums) == expected, "rows", patience_s=40.0)
    finally:
        await trigger.stop()


async def test_a_url_of_another_kind_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean postgresql"):
        await Kit().trigger(store="postgrsql://h/db").start()
