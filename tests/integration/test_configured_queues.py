"""What the configuration says of queues and triggers is what a worker does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from ackbone import App, ConfigError, Context, SyncContext
from ackbone.cli.root import cli
from ackbone.cli.session import Exit

TRIGGER = """
queue_trigger:
  queue_name: agent-events
  consumer_group: agents
  concurrency: 2
  parser_type: json
  ack_policy: requeue
  max_retries: 1
  retry_backoff_base: 0.01
  retry_backoff_multiplier: 1.0
  idempotency_window: 60
  event_name_header: x-kind
"""


def _app(home: Path, text: str) -> App:
    path = home / "ackbone.yaml"
    path.write_text(f"home: {home}/data\n{text}")
    return App(path)


async def test_a_trigger_of_the_configuration_is_a_queue_of_the_worker(home: Path) -> None:
    app = _app(home, TRIGGER)
    seen: list[tuple[str, dict[str, int], int]] = []
    most = running = 0

    @app.on("order", queue="agent-events")
    async def order(ctx: Context) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        seen.append((ctx.message.type, ctx.payload, ctx.attempt))
        if ctx.payload == {"n": 0}:
            raise ValueError("this one fails")

    async with app:
        for n in range(20):
            headers = {"x-kind": "order"}
            await app.send("ignored", {"n": n}, queue="agent-events", headers=headers, id=f"m{n}")
        await app.send("ignored", {"n": 1}, queue="agent-events", headers=headers, id="m1")
    await app.work(until_idle=True)

    assert sorted(n for _, payload, _ in seen for n in payload.values()) == sorted([0, *range(20)])
    assert {kind for kind, _, _ in seen} == {"order"}
    assert most <= 2


async def test_a_trigger_for_another_broker_is_refused_at_the_start(home: Path) -> None:
    app = _app(home, TRIGGER + "  adapter: {type: kafka}\n")
    with pytest.raises(ConfigError, match="Kafka"):
        app.subscriptions()


@pytest.mark.parametrize(
    ("broker", "adapter", "problem"),
    [
        ("redis://a:6379/0", "{connection: {host: b}}", "is not used without adapter.type"),
        ("redis://a:6379/0", "{type: redis, connection: {host: b}}", "needs the address"),
        ("sqlite", "{type: redis}", "needs the address of its server and nothing else"),
        ("sqlite", "{type: mock}", "Write `broker: memory://`"),
    ],
)
def test_a_trigger_whose_broker_is_not_known_is_refused_by_run_and_check(
    home: Path, broker: str, adapter: str, problem: str
) -> None:
    app = _app(home, f"broker: {broker}\n{TRIGGER}  adapter: {adapter}\n")
    shown = CliRunner().invoke(cli, ["config", "check", "--config", str(home / "ackbone.yaml")])
    with pytest.raises(ConfigError) as refused:
        app.subscriptions()
    assert problem in str(refused.value)
    assert "trigger agent-events: " in str(refused.value)
    assert shown.exit_code == Exit.CHECK_FAILED
    assert problem in shown.output


OWN = "trigger agent-events"


@pytest.mark.parametrize(
    ("broker", "adapter", "place"),
    [
        ("redis://a:6379/0", "{type: redis, connection: {url: 'redis://a:6379/0'}}", "default"),
        (
            "redis://:s@a:6379/0",
            "{type: redis, connection: {url: 'redis://:s@a:6379/0'}}",
            "default",
        ),
        ("redis://:hunter2@a/0", "{type: redis, connection: {url: 'redis://b:6379/0'}}", OWN),
        ("sqlite", "{type: sqlite, connection: {url: 'sqlite:////elsewhere.db'}}", OWN),
        ("redis://a:6379/0", "{type: sqlite}", OWN),
        ("memory://", "{type: mock, connection: {brokers: 'k:9092'}}", "default"),
    ],
)
def test_a_trigger_with_an_adapter_of_its_own_has_a_broker_of_its_own(
    home: Path, broker: str, adapter: str, place: str
) -> None:
    app = _app(home, f"broker: {broker}\n{TRIGGER}  adapter: {adapter}\n")
    shown = CliRunner().invoke(cli, ["config", "check", "--config", str(home / "ackbone.yaml")])
    assert shown.exit_code == 0, shown.output
    assert "hunter2" not in shown.output
    assert [(sub.name, sub.broker) for sub in app.subscriptions()] == [("agent-events", place)]


async def test_the_focus_of_a_trigger_reaches_its_handlers(home: Path) -> None:
    app = _app(home, f"{TRIGGER}  focus: refunds\n")
    seen: list[tuple[str, str | None]] = []

    @app.on("order", queue="agent-events")
    async def order(ctx: Context) -> None:
        seen.append(("order", ctx.focus))

    @app.on("plain", queue="agent-events")
    def plain(ctx: SyncContext) -> None:
        seen.append(("plain", ctx.focus))

    @app.on("other", queue="other")
    async def other(ctx: Context) -> None:
        seen.append(("other", ctx.focus))

    async with app:
        for kind in ("order", "plain"):
            await app.send("ignored", {}, queue="agent-events", headers={"x-kind": kind})
        await app.send("other", {}, queue="other")
    await app.work(until_idle=True)
    assert sorted(seen) == [("order", "refunds"), ("other", None), ("plain", "refunds")]


async def test_a_queue_that_is_paused_by_configuration_waits(home: Path) -> None:
    app = _app(home, "queues: {slow: {paused: true}}\n")
    ran: list[str] = []
    finished = asyncio.Event()

    @app.on("job", queue="slow")
    async def slow(ctx: Context) -> None:
        ran.append("slow")

    @app.on("job")
    async def quick(ctx: Context) -> None:
        ran.append("quick")
        finished.set()

    async with app:
        await app.send("job", queue="slow")
        await app.send("job")
        worker = app.worker()
        await worker.begin()
        await asyncio.wait_for(finished.wait(), 30)
        drained = await worker.drain()
    assert ran == ["quick"]
    assert drained.finished == 1
