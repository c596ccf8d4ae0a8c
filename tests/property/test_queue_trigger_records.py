"""Properties 18, 19, 21 and 23: ledger, metrics, logs, and what must never be in them."""

import contextlib
import io
import json
import logging
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import strategies as st

from ackbone import MockQueueAdapter, RawMessage
from ackbone.observe.logs import make_handler
from ackbone.testing import FakeClock
from ackbone.testing.agents import TriggeredEvent
from tests.property.trigger_lab import (
    START,
    Lines,
    World,
    ids,
    message,
    printable,
    queue_property,
    tenants,
    words,
)

RECORD = {
    "trace_id",
    "message_id",
    "queue",
    "event_name",
    "tenant_id",
    "status",
    "duration_ms",
    "agent_run_id",
}
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@queue_property(
    18,
    "for any processed message its context (trace_id, message_id, queue, event_name, tenant_id,"
    " status, duration_ms, agent_run_id) is written to the ledger, complete",
    queue=words,
    batch=st.lists(
        st.tuples(
            ids,
            st.none() | printable,
            st.none() | tenants,
            st.sampled_from(["success", "failed", "rejected"]),
            st.none() | printable,
            st.booleans(),
        ),
        max_size=6,
        unique_by=lambda m: m[0],
    ),
)
async def test_property_18_ledger(queue: str, batch: list[Any]) -> None:
    world = World(queue_name=queue, max_retries=0)
    expected: dict[str, dict[str, Any]] = {}
    for i, event, tenant, status, run_id, traced in batch:
        headers = {
            name: value
            for name, value in (
                ("x-event-name", event),
                ("x-tenant-id", tenant),
                ("traceparent", TRACEPARENT if traced else None),
            )
            if value is not None
        }
        world.put(message(i, headers=headers))
        if status == "failed":
            world.runtime.fail(RuntimeError("no"), message_id=i)
        elif status == "rejected":
            world.governance.deny("not you", ["quota"], message_id=i)
        else:
            world.runtime.answer({} if run_id is None else {"run_id": run_id}, message_id=i)
        expected[i] = {
            "message_id": i,
            "queue": queue,
            "event_name": event,
            "tenant_id": tenant,
            "status": status,
            "agent_run_id": run_id if status == "success" else None,
        }
        if traced:
            expected[i]["trace_id"] = TRACEPARENT[3:35]
        if status == "rejected":
            expected[i].update(reason="not you", policies=["quota"])
    async with world:
        await world.settled(len(batch))
        finals = world.rows(
            "SELECT data FROM event_log WHERE event_type IN"
            " ('task.succeeded', 'task.failed', 'task.rejected')"
        )
    records = {r["message_id"]: r for r in world.ledger.get_records()}
    assert len(records) == len(world.ledger.get_records()) == len(batch)
    for i, record in records.items():
        rejected = expected[i]["status"] == "rejected"
        assert set(record) == (RECORD | {"reason", "policies"} if rejected else RECORD)
        assert record["trace_id"]
        assert record["duration_ms"] >= 0
        assert {name: record[name] for name in expected[i]} == expected[i]
    assert len(finals) == len(batch)  # the store's own ledger has them, too
    assert all(set(json.loads(data)) >= RECORD for (data,) in finals)


@queue_property(
    19,
    "for any processed message its metrics (delay of consumption, duration of the run, calls of"
    " language models) are recorded, and asking for them returns exact figures",
    batch=st.lists(
        st.tuples(
            st.sampled_from(["success", "failed", "rejected"]),
            st.integers(0, 3600),
            st.integers(0, 50),
            st.integers(0, 5),
            st.integers(0, 9000),
        ),
        max_size=6,
    ),
)
async def test_property_19_metrics(batch: list[tuple[str, int, int, int, int]]) -> None:
    clock = FakeClock(START)

    async def behaviour(event: TriggeredEvent) -> dict[str, Any]:
        status, _, duration, calls, tokens = batch[int(event.message_id)]
        clock.advance(duration)
        if status == "failed":
            raise RuntimeError("no")
        return {"run_id": "r", "usage": {"llm_calls": calls, "tokens": tokens}}

    world = World(clock=clock, concurrency=1, max_retries=0)
    world.runtime._behaviour = behaviour
    delays = 0.0
    async with world:
        for n, (status, delay, *_) in enumerate(batch):
            if status == "rejected":
                world.governance.deny("no", message_id=str(n))
            sent = START + timedelta(microseconds=clock.now_us() - FakeClock(START).now_us())
            world.put(message(str(n), at=sent - timedelta(seconds=delay)))
            delays += delay
            await world.settled(n + 1)
        read = world.trigger.metrics.read
        assert read("queue_active_workers", queue="orders") == 1
    for status in ("success", "failed", "rejected"):
        count = read("queue_messages_consumed_total", queue="orders", status=status)
        assert count == sum(1 for item in batch if item[0] == status)
    ran = [item for item in batch if item[0] != "rejected"]
    done = [item for item in batch if item[0] == "success"]
    assert read("queue_processing_duration_seconds_count", queue="orders") == len(ran)
    assert read("queue_processing_duration_seconds_sum", queue="orders") == sum(i[2] for i in ran)
    assert read("queue_consume_delay_seconds_count", queue="orders") == len(batch)
    assert read("queue_consume_delay_seconds_sum", queue="orders") == pytest.approx(delays)
    assert read("queue_llm_calls_total", queue="orders") == sum(i[3] for i in done)
    assert read("queue_llm_tokens_total", queue="orders") == sum(i[4] for i in done)
    assert read("queue_active_workers", queue="orders") == 0


STAGES = ("message.consumed", "message.parsed", "message.executed", "message.acked")


@queue_property(
    21,
    "for any processed message every stage is logged (consumed, parsed, executed, acknowledged),"
    " and each line has the trace_id",
    batch=st.lists(st.tuples(ids, st.booleans()), max_size=6, unique_by=lambda m: m[0]),
    fails=st.booleans(),
)
async def test_property_21_stages_are_logged(batch: list[tuple[str, bool]], fails: bool) -> None:
    world = World(max_retries=0)
    if fails:
        world.runtime.fail(RuntimeError("no"))
    for i, traced in batch:
        world.put(message(i, headers={"traceparent": TRACEPARENT} if traced else {}))
    with Lines() as lines:
        async with world:
            await world.settled(len(batch))
    stages: dict[str, list[str]] = {}
    for record in lines.records:
        if getattr(record, "event", "").startswith("message."):
            assert record.levelno == logging.DEBUG
            stages.setdefault(record.trace_id, []).append(record.event)  # type: ignore[attr-defined]
    traced_messages = sum(traced for _, traced in batch)
    traces = {r["message_id"]: r["trace_id"] for r in world.ledger.get_records()}
    for i, traced in batch:
        found = stages.get(traces[i], [])
        times = traced_messages if traced else 1
        assert sorted(found) == sorted(STAGES * times)
        if not traced:
            assert found == list(STAGES)
            assert traces[i].startswith("queue-")


class LeakyAdapter(MockQueueAdapter):
    """Every error that it can raise holds its password."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self.url = f"amqps://agent:{secret}@queue.example/prod"
        self.lost = True

    async def connect(self) -> None:
        if self.lost:
            self.lost = False
            raise OSError(f"cannot open {self.url}")
        await super().connect()

    async def ack(self, message: RawMessage) -> None:
        await super().ack(message)
        raise OSError(f"lost {self.url}")

    async def close(self) -> None:
        await super().close()
        raise OSError(f"closing {self.url}")


secrets = st.text(
    "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghjkmnpqrstuvwxyz23456789", min_size=16, max_size=32
)
leaks = st.lists(
    st.sampled_from(
        [
            "postgresql://app:{}@db/agents is away",
            "401 from https://api.example/v1?api_key={}",
            "Authorization: Bearer {}",
            "login failed: password={}",
            '{{"token": "{}"}}',
            "sasl_password: {}",
        ]
    ),
    min_size=1,
    max_size=4,
)


@queue_property(
    23,
    "no log line holds a credential (password, API key, token), not even when debugging: it is"
    " masked or left out",
    secret=secrets,
    leaks=leaks,
)
async def test_property_23_no_credentials_in_logs(secret: str, leaks: list[str]) -> None:
    adapter = LeakyAdapter(secret)
    world = World(adapter=adapter, max_retries=1, retry_backoff_base=0.001)
    payload = json.dumps({"password": secret, "text": f"key {secret}"}).encode()
    for n, leak in enumerate(leaks):
        world.put(message(f"m{n}", payload, {"authorization": f"Bearer {secret}"}))
        world.runtime.fail(RuntimeError(leak.format(secret)), times=n % 3, message_id=f"m{n}")
    world.put(message("broken", b"{" + payload))
    world.keys.error = OSError(leaks[0].format(secret))
    world.ledger.error = OSError(leaks[-1].format(secret))
    written = io.StringIO()
    handler = make_handler(written, "json")
    with Lines() as lines:
        logging.getLogger("ackbone").addHandler(handler)
        try:
            with pytest.raises(ConnectionError, match="Cannot connect to orders: ") as refused:
                await world.trigger.start()
            assert secret not in str(refused.value)
            assert refused.value.__cause__ is None
            async with world:
                await world.settled(len(leaks) + 1)
                adapter.lost = True
                letters = world.rows("SELECT error, history FROM dead_letters")
                events = world.rows("SELECT data FROM event_log")
        finally:
            logging.getLogger("ackbone").removeHandler(handler)
    assert lines.records
    assert "continuing without dedup" in lines.text()
    assert secret not in lines.text()  # as they were logged, before any handler masked them
    assert secret not in written.getvalue()
    assert secret not in repr(letters)
    assert secret not in repr(events)
    count = world.trigger.metrics.read("queue_dedup_unavailable_total", queue="orders")
    assert count >= len(leaks)
    with contextlib.suppress(OSError):
        await adapter.close()
