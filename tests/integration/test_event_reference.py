"""The data keys that the reference of events names are those that the ledger really holds."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from ackbone import App, Config, Context, Decision, ParkMessage, TemporaryError
from ackbone.cli.session import operating
from ackbone.config import Retry
from ackbone.core.approvals import ApprovalFilter
from ackbone.core.events import FINAL_EVENTS
from ackbone.core.outbound.delivery import (
    Again,
    Failed,
    Held,
    New,
    Result,
    Sent,
    Settled,
    unlimited,
)
from tests.faults.history import History
from tests.unit.desk import until

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/events.md"
FINAL_KEYS = {
    "trace_id", "message_id", "queue", "event_name", "tenant_id", "status", "duration_ms",
    "agent_run_id",
}  # fmt: skip
OF_A_RUN = {"attempt", "usage"}


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """Keys that each event has always, and those that it may have."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| `([a-z.]+)` \| (.*) \| (.*) \|$", line)
        if row is None:
            continue
        always, _, sometimes = row[3].partition(";")
        must = set(re.findall(r"`(\w+)`", always))
        may = set(re.findall(r"`(\w+)`", sometimes))
        if row[1] in FINAL_EVENTS:
            must, may = must | FINAL_KEYS, may | OF_A_RUN
        found[row[1]] = (must, must | may)
    return found


def checked(home: Path) -> set[str]:
    """The types of all events in the ledger; each has the keys that the page says."""
    known = documented()
    seen = set()
    for event in History(home / "ackbone.db").events:
        must, may = known[event.type]
        keys = set(event.data)
        assert must <= keys <= may, f"{event.type}: {sorted(keys)}"
        seen.add(event.type)
    return seen


async def test_keys_of_events(home: Path) -> None:
    app = App(Config(home=home, retry=Retry(base_delay_s=0.01, jitter=0.0)))

    @app.guard
    async def guard(context: dict[str, object]) -> Decision:
        return Decision(allowed=context["type"] != "denied", reason="no", policies=("rule",))

    @app.on("good")
    async def good(ctx: Context) -> dict[str, str]:
        ctx.usage(llm_calls=1)
        await ctx.heartbeat()
        await ctx.once("effect", lambda: 1)
        return {"run_id": "r"}

    @app.on("flaky", retries=1)
    async def flaky(ctx: Context) -> None:
        raise TemporaryError("no")

    @app.on("aside")
    async def aside(ctx: Context) -> None:
        raise ParkMessage("wait")

    @app.on("denied")
    async def denied(ctx: Context) -> None: ...

    async with app:
        for _ in range(2):
            await app.send("good", idempotency_key="k")
        for kind in ("flaky", "aside", "denied"):
            await app.send(kind)
        await app.send("good", ttl_s=0.000001)
        await app.work(until_idle=True)

    assert checked(home) >= {
        "task.claimed", "task.succeeded", "task.failed", "task.rejected", "task.expired",
        "task.duplicate", "task.retried", "task.parked", "task.dlq", "task.heartbeat",
        "effect.begun", "effect.done",
    }  # fmt: skip


async def test_keys_of_delivery_events(home: Path) -> None:
    app = App(Config(home=home))
    ends: list[Result] = [
        Again(error="no", wait_s=0.0, in_doubt=True),
        Sent(receipt="n", more=True),
        Sent(),
        Failed(error="never"),
        Held(error="who knows"),
    ]
    async with app:
        queue, channels = app.storage.deliveries(app.store), {"c": unlimited}
        dead = await app.store.register("dead")
        await queue.put([New(id="lost", channel="c", recipient="bob", content="x")])
        await queue.take(channels, limit=1, worker=dead)
        await app.store.leave(dead)
        worker = await app.store.register("sender")
        await queue.recover(worker=worker)
        (lost,) = (await queue.take(channels, limit=1, worker=worker)).replies
        await queue.settle(channels, [Settled(reply=lost, result=Sent())], worker=worker)
        await queue.put(
            [
                New(id=f"r{n}", tenant_id="acme", channel="c", recipient="ann", content="x")
                for n in range(4)
            ]
        )
        for result in ends:
            (reply,) = (await queue.take(channels, limit=1, worker=worker)).replies
            await queue.settle(channels, [Settled(reply=reply, result=result)], worker=worker)
        async with operating(app) as (_, operations):
            await operations.edit_delivery("r1", content="better")
            await operations.retry_deliveries(["r1"])
            await operations.discard_deliveries(["r1"], reason="enough")
            await operations.pause_channel("c")
            await operations.unpause_channel("c")
    kinds = (
        "created sent part waiting resent reclaimed failed unknown"
        " retried edited discarded paused resumed"
    )
    assert checked(home) >= {f"delivery.{kind}" for kind in kinds.split()}


async def test_keys_of_governance_events(home: Path) -> None:
    rules = home / "rules.yaml"
    rules.write_text(
        "rules:\n"
        "  - {name: late, match: {type: late}, then: approve, expires_s: 0.001}\n"
        "  - {name: ask, match: {type: ask}, then: approve, four_eyes: true}\n"
        "  - {name: few, match: {type: few}, then: quota, window: day, limits: {runs: 1}}\n"
    )
    app = App(Config(home=home, rules=rules))

    @app.on("*")
    async def run(ctx: Context) -> None: ...

    async with app:
        for kind in ("ask", "ask", "late", "few", "few"):
            await app.send(kind, tenant_id="acme")
        working = asyncio.create_task(app.work())
        async with operating(app) as (records, operations):
            ask = ApprovalFilter(rule="ask")

            async def both_ask() -> bool:
                return len(await records.approvals(ask, limit=9)) == 2

            await until(both_ask)
            asked = await records.approvals(ask, limit=9)
            for name in ("anna", "bob"):
                await operations.approve(asked[0].id, by=name)
            await operations.reject(asked[1].id, by="cora")
            wanted = {"approval.expired", "task.released", "approval.approved", "task.succeeded"}

            async def all_happened() -> bool:
                return wanted <= {e.type for e in await records.events_after(0, limit=1000)}

            await until(all_happened)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert checked(home) >= wanted | {
        "approval.requested", "approval.first", "approval.rejected", "task.rejected",
        "task.resumed",
    }  # fmt: skip
