"""Quotas: counted at the claim, corrected at the end; used up means wait, and never no."""

from typing import Any

import pytest
import yaml

from ackbone import Context, Decision
from ackbone.app import App
from ackbone.cli.session import operating
from ackbone.composition.background import relays_of
from ackbone.core.outcome import Duplicate
from ackbone.core.quota import QuotaUse
from ackbone.testing import FakeClock
from tests.integration.lab import Lab

HOUR_US = 3_600_000_000


def quota(name: str = "budget", window: Any = "hour", **limits: float) -> dict[str, Any]:
    match = {"type": "*"}
    return {"name": name, "match": match, "then": "quota", "window": window, "limits": limits}


def write(lab: Lab, *rules: dict[str, Any]) -> Any:
    draft = lab.home / "rules.draft"
    draft.write_text(yaml.safe_dump({"rules": list(rules)}))
    return draft.rename(lab.home / "rules.yaml")


async def governed(lab: Lab, *rules: dict[str, Any], **settings: Any) -> tuple[App, list[str]]:
    app = await lab.open(rules=write(lab, *rules), **settings)
    ran: list[str] = []

    @app.on("*")
    async def run(ctx: Context) -> None:
        ran.append(ctx.message.id)
        payload = ctx.payload or {}
        ctx.usage(**payload.get("usage", {}))
        if ctx.attempt <= payload.get("fail", 0):
            raise RuntimeError("not yet")

    return app, ran


async def used(app: App, name: str = "budget", tenant: str = "default") -> QuotaUse:
    async with operating(app) as (records, _):
        (found,) = [each for each in await records.quota_use(tenant_id=tenant) if each.name == name]
        return found


async def put_off(lab: Lab, message_id: str) -> dict[str, Any]:
    await lab.has_event(message_id, "task.released")
    return lab.task(message_id)


def clock_at(into_the_hour_us: int) -> FakeClock:
    clock = FakeClock()
    assert clock.now_us() % HOUR_US == 0
    clock.advance(into_the_hour_us / 1e6)
    return clock


async def test_what_is_used_up_waits_for_the_next_window(lab: Lab) -> None:
    clock = clock_at(HOUR_US // 2)
    app, ran = await governed(lab, quota(runs=2), clock=clock)
    await lab.start(app)
    for n in range(3):
        await app.send("t", id=f"m-{n}", tenant_id="acme")
        await (lab.ends(f"m-{n}") if n < 2 else put_off(lab, f"m-{n}"))
    await app.send("t", id="other", tenant_id="umbrella")
    assert await lab.ends("other") == ["succeeded"], "each tenant has its own"
    waiting = lab.task("m-2")
    assert (waiting["status"], waiting["attempt"], waiting["error_message"]) == (
        "ready", 0, "waits for quota budget",
    )  # fmt: skip
    assert waiting["due_at"] == clock.now_us() // HOUR_US * HOUR_US + HOUR_US
    assert waiting["held"] == "store"
    (released,) = [data for kind, data in lab.history("m-2") if kind == "task.released"]
    assert released == {
        "attempt": 1, "quota": "budget", "unit": "runs", "until": waiting["due_at"],
    }  # fmt: skip
    clock.advance(HOUR_US / 1e6)
    assert await lab.ends("m-2") == ["succeeded"]
    assert ran.count("m-2") == 1
    assert lab.task("m-2")["attempt"] == 1, "no attempt was spent by waiting"
    assert (await used(app, tenant="acme")).runs == 1
    assert (await used(app, tenant="umbrella")).runs == 1


async def test_every_unit_counts_and_all_quotas_that_match(one_file: Lab) -> None:
    clock = clock_at(1)
    app, _ = await governed(
        one_file,
        quota(llm_calls=10, tokens=100, cost=1.5),
        quota("daily", "day", runs=50),
        quota("idle", "minute", tokens=5) | {"match": {"type": "never"}},
        clock=clock,
    )
    await one_file.start(app)
    await app.send("t", {"usage": {"llm_calls": 3, "tokens": 40, "cost": 0.5}}, id="m-1")
    await app.send("t", {"usage": {"llm_calls": 3, "tokens": 59, "cost": 0.5}}, id="m-2")
    await one_file.ends("m-1", "m-2")
    found = await used(app)
    assert (found.runs, found.llm_calls, found.tokens, found.cost) == (2, 6, 99, 1.0)
    assert found.window_end_us - found.window_start_us == HOUR_US
    await app.send("t", {"usage": {"tokens": 5}}, id="m-3")
    await one_file.ends("m-3")
    await app.send("t", id="m-4")
    row = await put_off(one_file, "m-4")
    (released,) = [data for kind, data in one_file.history("m-4") if kind == "task.released"]
    assert (released["quota"], released["unit"]) == ("budget", "tokens")
    assert row["due_at"] == found.window_end_us
    assert (await used(app, "daily")).runs == 3, "what waits was not counted elsewhere"
    async with operating(app) as (records, _):
        assert {each.name for each in await records.quota_use()} == {"budget", "daily"}


async def test_failed_attempts_count_with_what_they_used(one_file: Lab) -> None:
    app, _ = await governed(one_file, quota(window="day", runs=10, tokens=1000))
    await one_file.start(app)
    await app.send("t", {"fail": 2, "usage": {"tokens": 7}}, id="m-1")
    assert await one_file.ends("m-1") == ["succeeded"]
    found = await used(app)
    assert (found.runs, found.tokens) == (3, 21)


async def test_what_never_ran_is_given_back(one_file: Lab) -> None:
    app, ran = await governed(
        one_file,
        {"name": "no", "match": {"payload": "exists(no)"}, "then": "deny"},
        {"name": "ask", "match": {"payload": "exists(ask)"}, "then": "approve"},
        quota(runs=1),
        clock=clock_at(1),
    )
    guarded: list[str] = []

    @app.guard
    async def guard(context: dict[str, Any]) -> Decision:
        guarded.append(context["message_id"])
        return Decision(allowed=not context["payload"].get("guard"))

    await one_file.start(app)
    await app.send("t", {"no": 1}, id="denied")
    await app.send("t", {"ask": 1}, id="asked")
    await app.send("t", {"guard": 1}, id="guarded")
    assert await one_file.ends("denied", "guarded") == ["rejected", "rejected"]
    await one_file.becomes("asked", "parked")
    await app.send("t", {}, id="m-1")
    assert await one_file.ends("m-1") == ["succeeded"], "nothing of the quota was gone"
    assert (await used(app)).runs == 1
    async with operating(app) as (records, operations):
        (question,) = await records.approvals_named("asked", tenant_id=None, limit=9)
        await operations.approve(question.id, by="anna")
    await put_off(one_file, "asked")
    assert ran == ["m-1"], "what was approved is counted as others are"
    assert one_file.status("asked") == "ready"


async def test_a_result_that_is_known_already_uses_up_nothing(one_file: Lab) -> None:
    """As one that a trigger finds in its `idempotency_store`."""
    app, _ = await governed(one_file, quota(runs=1), clock=clock_at(1))

    @app.on("known")
    async def known(ctx: Context) -> Duplicate:
        return Duplicate(of="another")

    await one_file.start(app)
    await app.send("known", {}, id="known")
    assert await one_file.ends("known") == ["duplicate"]
    await app.send("t", {}, id="m-1")
    assert await one_file.ends("m-1") == ["succeeded"]
    assert (await used(app)).runs == 1


async def has_run(lab: Lab, ran: list[str], wanted: int) -> None:
    """Exactly so many ran, and were committed."""
    await lab.until(lambda: list(lab.statuses().values()).count("succeeded") == wanted, lambda: ran)
    assert len(ran) == wanted


async def test_a_backlog_is_spread_over_the_windows_to_come(one_file: Lab) -> None:
    """Were all to look again at each window's end, each window would move the whole backlog."""
    clock = clock_at(1)
    app, ran = await governed(one_file, quota(runs=3), clock=clock)
    ids = [f"m-{n:02}" for n in range(20)]
    for message_id in ids:
        await app.send("t", id=message_id)
    await one_file.start(app)
    for turn in range(7):
        await has_run(one_file, ran, min(20, 3 * (turn + 1)))
        await one_file.until(lambda: len(one_file.statuses()) == 20)
        clock.advance(HOUR_US / 1e6)
    assert sorted(ran) == ids
    released = one_file.rows("SELECT count(*) FROM event_log WHERE event_type = 'task.released'")
    assert released == [(17,)], "each of those that had to wait was put off once"


async def test_other_quotas_let_what_waits_look_again(one_file: Lab) -> None:
    app, _ = await governed(one_file, quota(window="day", runs=1))
    await one_file.start(app, relays=relays_of(app, spawn_solo=False))
    ids = [f"m-{n}" for n in range(4)]
    for message_id in ids:
        await app.send("t", id=message_id)
    await one_file.until(lambda: sum("task.released" in one_file.kinds(i) for i in ids) == 3)
    write(one_file, quota(window="day", runs=10))
    assert await one_file.ends(*ids) == ["succeeded"] * 4


async def test_what_expires_while_it_waits_expires_in_time(one_file: Lab) -> None:
    clock = clock_at(1)
    app, _ = await governed(one_file, quota(runs=1), clock=clock)
    await one_file.start(app)
    await app.send("t", id="m-1")
    await one_file.ends("m-1")
    await app.send("t", id="m-2", ttl_s=60)
    row = await put_off(one_file, "m-2")
    assert row["due_at"] == row["expires_at"]
    clock.advance(61)
    assert await one_file.ends("m-2") == ["expired"]


async def test_keys_and_conversations_wait_along(one_file: Lab) -> None:
    clock = clock_at(1)
    app, ran = await governed(one_file, quota(runs=1), clock=clock)
    await one_file.start(app)
    await app.send("t", id="m-0")
    await one_file.ends("m-0")
    await app.send("t", id="m-1", ordering_key="c", idempotency_key="k")
    await app.send("t", id="m-2", ordering_key="c")
    await app.send("t", id="twin", idempotency_key="k")
    await put_off(one_file, "m-1")
    await one_file.becomes("m-2", "queued")
    await one_file.becomes("twin", "waiting_key")
    clock.advance(HOUR_US / 1e6)
    assert await one_file.ends("m-1") == ["succeeded"]
    await put_off(one_file, "m-2")
    clock.advance(HOUR_US / 1e6)
    assert await one_file.ends("m-1", "m-2", "twin") == ["succeeded", "succeeded", "duplicate"]
    assert ran == ["m-0", "m-1", "m-2"]


async def test_two_workers_share_one_quota(one_file: Lab) -> None:
    app, ran = await governed(one_file, quota(window="day", runs=25))
    twin = App(app.config)
    await twin.open()
    twin.handlers = app.handlers
    for n in range(60):
        await app.send("t", id=f"m-{n}")
    await one_file.start(app)
    await one_file.start(twin)
    await one_file.until(
        lambda: (
            one_file.rows("SELECT count(*) FROM event_log WHERE event_type = 'task.released'")
            == [(35,)]
        )
    )
    await one_file.until(lambda: list(one_file.statuses().values()).count("succeeded") == 25)
    assert len(ran) == 25
    assert (await used(app)).waiting == 35
    for worker in list(one_file._workers):
        await one_file.stop(worker)
    await twin.close()


async def test_a_rule_that_cannot_be_told_stops_no_claim(
    one_file: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, ran = await governed(one_file, quota(runs=5))
    worker = await one_file.start(app)

    def broken(run: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(app.store, "quotas_of", broken)
    await app.send("t", id="m-1")
    assert await one_file.ends("m-1") == ["succeeded"]
    assert worker.failure is None
    assert ran == ["m-1"]
