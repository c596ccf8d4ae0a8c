"""Counts: each message once, under the names that dashboards know, in process and in rows."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone import App, Context, Message, RetryPolicy
from ackbone.composition.background import relays_of
from ackbone.config import Config, load_config
from ackbone.core import events
from ackbone.core.errors import FinalError, RetryableError, StoreUnavailable
from ackbone.core.events import FINAL_EVENTS, Event
from ackbone.core.meter import MetricRow
from ackbone.core.outcome import Done
from ackbone.core.store import Finished, Run, Token, Usage, Worker
from ackbone.engine.guard import Decision
from ackbone.engine.worker import EngineWorker
from ackbone.observe.export import Exporter
from ackbone.observe.metrics import BUCKETS, HELP, NAMES, Metrics, QueueCounts
from tests.servers.stores import sqlite_store

NOW = RetryPolicy(max_retries=1, base_delay=0.0, jitter=0.0)


def config(home: Path, **overrides: Any) -> Config:
    return load_config(
        environ={}, cwd=home, overrides={"home": str(home), "worker.lease_s": 30, **overrides}
    )


@asynccontextmanager
async def running(app: App, *, relays: bool = False) -> AsyncIterator[EngineWorker]:
    async with app:
        worker = app.worker(relays=relays_of(app, spawn_solo=False) if relays else ())
        await worker.begin()
        try:
            yield worker
        finally:
            await worker.drain(1.0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - a count says nothing when it moves
            await asyncio.sleep(0.005)


def counted(app: App) -> Callable[..., float]:
    assert app.metrics is not None
    return app.metrics.read


# ── through the engine ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("broker", ["sqlite", "memory://"])
async def test_every_end_is_counted_once_under_its_status(home, broker):
    app = App(config(home, broker=broker))
    seen: list[Event] = []
    app.observe(seen.append)
    release = asyncio.Event()

    @app.on("*", queue="q", retry=NOW)
    async def handle(ctx: Context) -> None:
        ctx.usage(llm_calls=2, tokens=10)
        if ctx.message.type == "dead":
            raise FinalError("no")
        if ctx.message.type == "flaky" and ctx.attempt == 1:
            raise RetryableError("later")
        if ctx.message.type == "slow":
            await release.wait()

    @app.guard
    async def guard(context: Any) -> Decision:
        return Decision(allowed=context["type"] != "denied", reason="no", policies=())

    async with running(app) as worker:
        for kind in ("ok", "ok", "dead", "flaky", "denied"):
            await app.send(kind, {}, queue="q")
        over = datetime.now(UTC) - timedelta(seconds=1)
        await app.send_message(Message(type="ok", payload={}, expires_at=over), queue="q")
        await app.send("slow", {}, queue="q", idempotency_key="k")
        await app.send("ok", {}, queue="q", idempotency_key="k")  # waits for the slow one
        read = counted(app)
        await until(
            lambda: (
                worker.running == 1 and read("queue_messages_consumed_total", status="success") == 3
            )
        )
        release.set()
        await asyncio.wait_for(app.idle(worker), 30)
    by_status = {
        status: read("queue_messages_consumed_total", queue="q", status=status)
        for status in ("success", "failed", "rejected", "duplicate", "expired", "discarded")
    }
    assert by_status == {
        "success": 4,  # ok, ok, flaky, slow
        "failed": 1,
        "rejected": 1,
        "duplicate": 1,
        "expired": 1,
        "discarded": 0,
    }
    assert sum(by_status.values()) == sum(event.type in FINAL_EVENTS for event in seen)
    assert read("queue_dedup_hits_total", queue="q") == 1
    assert read("queue_retries_total", queue="q") == 1
    assert read("queue_dead_lettered_total", queue="q") == 3  # dead, denied, expired
    assert read("queue_processing_duration_seconds_count", queue="q") == 6  # runs, the retried too
    assert read("queue_consume_delay_seconds_count", queue="q") == 6  # messages that were taken up
    assert read("queue_llm_calls_total", queue="q") == 12
    assert read("queue_llm_tokens_total", queue="q") == 60


@pytest.mark.parametrize("broker", ["sqlite", "memory://"])
async def test_further_copies_are_dedup_hits_and_no_second_message(home, broker):
    app = App(config(home, broker=broker))
    release, began = asyncio.Event(), asyncio.Event()

    @app.on("*", queue="q")
    async def handle(ctx: Context) -> None:
        began.set()
        await release.wait()

    message = Message(type="t", payload={"n": 1})
    async with running(app) as worker:
        read = counted(app)
        await app.send_message(message, queue="q")
        await asyncio.wait_for(began.wait(), 30)
        await app.send_message(message, queue="q")  # while it runs
        await until(lambda: read("queue_dedup_hits_total", queue="q") == 1)
        release.set()
        await asyncio.wait_for(app.idle(worker), 30)
        await app.send_message(message, queue="q")  # when it is over
        await until(lambda: read("queue_dedup_hits_total", queue="q") == 2)
        await asyncio.wait_for(app.idle(worker), 30)
    assert read("queue_dedup_hits_total") == 2
    assert read("queue_messages_consumed_total") == 1


async def test_what_a_dead_worker_ran_is_counted_as_reclaimed(home):
    app = App(config(home))
    ran = asyncio.Event()

    @app.on("*", queue="q")
    async def handle(ctx: Context) -> None:
        ran.set()

    async with app:
        ghost = await app.store.register("ghost")
        await app.send("t", {}, queue="q")
        from ackbone.engine.decoder import decoder

        sub = app.config.subscription("q")
        taken = await sqlite_store(app).take(sub, decoder(sub), limit=1, worker=ghost)
        assert len(taken.verdicts) == 1
        sqlite_store(app)._leases.release(ghost.worker_id)  # it dies
        worker = app.worker()
        await worker.begin()
        await asyncio.wait_for(ran.wait(), 30)
        await app.idle(worker)
        await worker.drain(1.0)
        assert counted(app)("queue_reclaimed_total", queue="q") == 1
        assert counted(app)("queue_messages_consumed_total", status="success") == 1


async def test_active_workers_are_the_slots_that_take_messages(home):
    app = App(config(home, **{"worker.slots": 8}))

    @app.on("*", queue="q")
    async def handle(ctx: Context) -> None:
        return None

    async with running(app) as worker:
        read = counted(app)
        assert read("queue_active_workers", queue="q") == 8
        worker.pause()
        assert read("queue_active_workers", queue="q") == 0
        worker.resume()
        assert read("queue_active_workers", queue="q") == 8
    assert read("queue_active_workers", queue="q") == 0


async def test_a_store_that_is_away_counts_what_waits_for_it(home, monkeypatch):
    app = App(config(home, broker="memory://"))
    ran = asyncio.Event()

    @app.on("*", queue="q")
    async def handle(ctx: Context) -> None:
        ran.set()

    async with running(app):
        claim, failures = app.store.claim, iter([True, False])

        async def away_once(*args: Any, **named: Any) -> Any:
            if next(failures, False):
                raise StoreUnavailable("away")
            return await claim(*args, **named)

        monkeypatch.setattr(app.store, "claim", away_once)
        await app.send("t", {}, queue="q")
        await asyncio.wait_for(ran.wait(), 30)
        assert counted(app)("queue_dedup_unavailable_total", queue="q") == 1


async def test_switched_off_nothing_is_counted(home):
    app = App(config(home, **{"metrics.enabled": False}))
    ran = asyncio.Event()

    @app.on("*", queue="q")
    async def handle(ctx: Context) -> None:
        ran.set()

    async with running(app, relays=True):
        await app.send("t", {}, queue="q")
        await asyncio.wait_for(ran.wait(), 30)
    assert app.metrics is None


# ── the form ─────────────────────────────────────────────────────────────────────────────────────


def finished(*, took_us: int = 1500, usage: Usage | None = None, waited_us: int = 0) -> Finished:
    message = Message(type="t")
    run = Run(
        subscription="q",
        queue="q",
        message=message,
        token=Token(1, 1),
        attempt=1,
        crashes=0,
        claimed_at_us=waited_us,
        created_at_us=0,
    )
    return Finished(
        run=run, outcome=Done(None), started_at_us=0, finished_at_us=took_us, usage=usage
    )


microseconds = st.lists(
    st.integers(-2_000_000, 8_000_000_000) | st.sampled_from([round(b * 1e6) for b in BUCKETS]),
    max_size=30,
)


@given(microseconds, microseconds)
def test_a_value_is_counted_in_the_first_bucket_that_takes_it(
    took: list[int], waited: list[int]
) -> None:
    metrics = Metrics()
    for batch in (took, waited):  # a second batch adds to the first
        metrics.ran([finished(took_us=us, waited_us=us) for us in batch])
    counts = metrics._queues.get("q", QueueCounts())
    for histogram, values in (
        (counts.duration, [us / 1e6 for us in (*took, *waited)]),
        (counts.delay, [max(0.0, us / 1e6) for us in (*took, *waited)]),
    ):
        expected = [0] * (len(BUCKETS) + 1)
        for value in values:
            expected[next((n for n, le in enumerate(BUCKETS) if value <= le), -1)] += 1
        assert histogram.buckets == expected
        assert histogram.sum == pytest.approx(sum(values))


def test_prometheus_reads_the_names_labels_and_buckets():
    from prometheus_client import generate_latest

    metrics = Metrics()
    metrics.ran([finished(took_us=2_000_000), finished(took_us=4_000_000_000)])
    metrics.hear([("acme", "q", "m", "task.succeeded", {"queue": "q"})])
    metrics.watch(lambda: {"q": 5})
    text = generate_latest(metrics.registry).decode()
    for line in (
        'queue_messages_consumed_total{queue="q",status="success"} 1.0',
        'queue_messages_consumed_total{queue="q",status="failed"} 0.0',
        'queue_active_workers{queue="q"} 5.0',
        'queue_processing_duration_seconds_bucket{le="1.0",queue="q"} 0.0',
        'queue_processing_duration_seconds_bucket{le="2.5",queue="q"} 1.0',
        'queue_processing_duration_seconds_bucket{le="+Inf",queue="q"} 2.0',
        'queue_processing_duration_seconds_count{queue="q"} 2.0',
        'queue_processing_duration_seconds_sum{queue="q"} 4002.0',
        'queue_consume_delay_seconds_count{queue="q"} 2.0',
    ):
        assert line in text.splitlines()
    for name, description in HELP.items():
        family = name.removesuffix("_total")
        assert f"# HELP {name} {description}" in text or f"# HELP {family} {description}" in text


def test_a_value_on_a_bucket_s_edge_belongs_to_it():
    metrics = Metrics()
    metrics.ran([finished(took_us=int(BUCKETS[3] * 1e6))])
    assert metrics._queues["q"].duration.buckets[3] == 1


def test_an_unknown_name_is_an_error_and_an_uncounted_one_is_zero():
    metrics = Metrics()
    with pytest.raises(KeyError, match="queue_retries_total"):
        metrics.read("queue_retrys_total")
    assert {metrics.read(name) for name in NAMES} == {0}


def test_an_event_without_a_queue_counts_for_its_subscription_s():
    metrics = Metrics(queue_of={"orders-audit": "orders"})
    metrics.hear([("acme", "orders-audit", "m", "task.retried", {"attempt": 1})])
    assert metrics.read("queue_retries_total", queue="orders") == 1


def test_nothing_of_prometheus_is_imported_before_it_is_asked_for():
    code = (
        "import sys, ackbone.app, ackbone.composition.background; "
        "assert 'prometheus_client' not in sys.modules; "
        "from ackbone.observe.metrics import Metrics; Metrics().registry; "
        "assert 'prometheus_client' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


class Rows:
    def __init__(self) -> None:
        self.batches: list[list[MetricRow]] = []
        self.fails = False

    async def add(self, batch: Any) -> None:
        if self.fails:
            raise StoreUnavailable("away")
        self.batches.append(list(batch))


def of(batch: list[MetricRow], name: str) -> list[float]:
    return [row.value for row in batch if row.name == name]


async def test_rows_hold_what_was_counted_since_the_last_export():
    metrics, rows = Metrics(), Rows()
    exporter, worker = Exporter(metrics, rows), Worker(worker_id=7)
    metrics.watch(lambda: {"q": 4})
    metrics.ran([finished(usage=Usage(llm_calls=1, tokens=5))])
    metrics.hear([("t", "q", "m", "task.failed", {"queue": "q"})])
    await exporter.step(worker)
    first = rows.batches[0]
    assert of(first, "queue_llm_tokens_total") == [5]
    assert of(first, "queue_processing_duration_seconds_count") == [1]
    assert of(first, "queue_processing_duration_seconds_sum") == [0.0015]
    assert of(first, "queue_active_workers") == [4]
    failed = [row for row in first if row.name == "queue_messages_consumed_total"]
    assert [(row.queue, row.value, row.tags) for row in failed] == [
        ("q", 1, {"worker": 7, "status": "failed"})
    ]
    await exporter.step(worker)
    assert [row.name for row in rows.batches[1]] == ["queue_active_workers"]
    rows.fails = True
    metrics.recognized("q", 2)
    with pytest.raises(StoreUnavailable):
        await exporter.step(worker)
    rows.fails = False
    metrics.recognized("q", 1)
    await exporter.step(worker)
    assert of(rows.batches[2], "queue_dedup_hits_total") == [3], "a failed export loses nothing"


async def test_a_worker_that_stops_has_exported_everything(home):
    app = App(config(home))

    @app.on("*", queue="q")
    async def handle(ctx: Context) -> None:
        return None

    async with running(app, relays=True) as worker:
        for n in range(5):
            await app.send("t", {"n": n}, queue="q")
        await app.idle(worker)
    async with app:
        found = await sqlite_store(app).file.read(
            lambda conn: conn.execute(
                "SELECT queue_name, tenant_id, sum(metric_value), min(tags) FROM queue_metrics"
                " WHERE metric_name = 'queue_messages_consumed_total' GROUP BY queue_name"
            ).fetchall()
        )
    ((queue, tenant, total, tags),) = found
    assert (queue, tenant, total) == ("q", "default", 5)
    assert json.loads(tags) == {"worker": worker.worker.worker_id, "status": "success"}


def test_replies_are_counted_by_channel():
    metrics = Metrics()
    telegram = {"channel": "telegram", "delivery_id": "d"}
    heard: list[tuple[str, dict[str, Any]]] = [
        (events.DELIVERY_SENT, telegram),
        (events.DELIVERY_SENT, {"channel": "slack", "delivery_id": "e"}),
        (events.DELIVERY_PART, telegram),
        (events.DELIVERY_WAITING, {**telegram, "costs": True}),
        (events.DELIVERY_WAITING, {**telegram, "costs": False}),
        (events.DELIVERY_WAITING, {**telegram, "costs": False}),
        (events.DELIVERY_RESENT, telegram),
        (events.DELIVERY_FAILED, telegram),
        (events.DELIVERY_UNKNOWN, telegram),
        (events.DELIVERY_DISCARDED, telegram),
    ]
    metrics.hear([("default", "q", "m", kind, data) for kind, data in heard])
    assert metrics.read("delivery_replies_total") == 5
    for status in ("sent", "failed", "unknown", "discarded"):
        assert metrics.read("delivery_replies_total", channel="telegram", status=status) == 1
    assert metrics.read("delivery_retries_total", channel="telegram") == 1
    assert metrics.read("delivery_waits_total", channel="telegram") == 2
    assert metrics.read("delivery_resent_total", channel="slack") == 0
    text = prometheus_client.generate_latest(metrics.registry).decode()
    assert 'delivery_replies_total{channel="slack",status="sent"} 1.0' in text


async def test_what_replies_did_is_exported_under_the_channel_s_name():
    metrics, rows = Metrics(), Rows()
    metrics.hear([("default", "q", "m", events.DELIVERY_SENT, {"channel": "telegram"})])
    await Exporter(metrics, rows).step(Worker(worker_id=7))
    ((row,),) = rows.batches
    assert (row.queue, row.name, row.value) == ("telegram", "delivery_replies_total", 1)
    assert row.tags == {"worker": 7, "status": "sent"}
