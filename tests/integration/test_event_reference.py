"""The data keys that the reference of events names are those that the ledger really holds."""

import re
from pathlib import Path

from holdfast import App, Config, Context, Decision, ParkMessage, TemporaryError
from holdfast.config import Retry
from holdfast.core.events import FINAL_EVENTS
from holdfast.testing.history import History

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/events.md"
FINAL_KEYS = {
    "trace_id", "message_id", "queue", "event_name", "tenant_id", "status", "duration_ms",
    "agent_run_id",
}  # fmt: skip
OF_A_RUN = {"attempt", "usage", "result_dropped"}


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

    known = documented()
    seen = set()
    for event in History(home / "holdfast.db").events:
        must, may = known[event.type]
        keys = set(event.data)
        assert must <= keys <= may, f"{event.type}: {sorted(keys)}"
        seen.add(event.type)
    assert seen >= {
        "task.claimed", "task.succeeded", "task.failed", "task.rejected", "task.expired",
        "task.duplicate", "task.retried", "task.parked", "task.dlq", "task.heartbeat",
        "effect.begun", "effect.done",
    }  # fmt: skip
