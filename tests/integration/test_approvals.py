"""Messages that wait for a person: asked once, answered once, and run once or never."""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
import yaml

from ackbone import Ask, Context, Decision
from ackbone.admin.approvals import Approvals
from ackbone.admin.parked import Parked
from ackbone.app import App
from ackbone.cli.session import operating
from ackbone.composition.background import relays_of
from ackbone.core.approvals import Approval, ApprovalFilter
from ackbone.core.errors import Ambiguous, Conflict, InvalidMessage, NotFound
from ackbone.store import claiming
from ackbone.store.upkeep import StoreGovernance
from ackbone.testing import FakeClock
from tests.integration.lab import Lab
from tests.servers.stores import sqlite_store

BIG = {
    "name": "big",
    "match": {"type": "payout", "payload": "amount > 1000"},
    "then": "approve",
    "reason": "more than 1000",
}


async def governed(lab: Lab, *rules: dict[str, Any], **settings: Any) -> tuple[App, list[Any]]:
    """An app under rules, and what its handler was given: id, attempt."""
    file = lab.home / "rules.yaml"
    file.write_text(yaml.safe_dump({"rules": list(rules)}))
    app = await lab.open(rules=file, **settings)
    ran: list[Any] = []

    @app.on("*")
    async def run(ctx: Context) -> dict[str, bool]:
        ran.append((ctx.message.id, ctx.attempt))
        if ctx.attempt <= ctx.payload.get("fail", 0):
            raise RuntimeError("not yet")
        return {"paid": True}

    return app, ran


@asynccontextmanager
async def desk(app: App) -> AsyncIterator[tuple[Approvals, Parked]]:
    async with operating(app) as (records, operations):
        yield Approvals(records, operations), Parked(records, operations)


async def parked(lab: Lab, app: App, message_id: str, **options: Any) -> None:
    payload = {"amount": 5000, **options.pop("payload", {})}
    await app.send("payout", payload, id=message_id, **options)
    await lab.becomes(message_id, "parked")


async def test_a_yes_lets_it_run_with_its_attempt_unchanged(lab: Lab) -> None:
    app, ran = await governed(lab, BIG)
    await lab.start(app)
    await app.send("payout", {"amount": 5}, id="small")
    await parked(lab, app, "m-1")
    assert lab.task("m-1")["parked_kind"] == "waiting_approval"
    async with desk(app) as (approvals, aside):
        (listed,) = await approvals.list(ApprovalFilter(), limit=9)
        assert (listed.message_id, listed.rule, listed.reason) == ("m-1", "big", "more than 1000")
        assert listed.expires_at_us - listed.asked_at_us == 86_400_000_000, "a day by default"
        assert (await aside.find("m-1")).parked_kind == "waiting_approval"
        task, reading = await approvals.message(listed)
        assert task is not None
        assert reading.message is not None
        assert reading.message.payload == {"amount": 5000}
        answered = await approvals.approve(listed, by="anna", note="checked")
        assert (answered.state, answered.answered_by, answered.note) == (
            "approved", "anna", "checked",
        )  # fmt: skip
    assert await lab.ends("m-1", "small") == ["succeeded", "succeeded"]
    assert sorted(ran) == [("m-1", 1), ("small", 1)]
    assert lab.kinds("m-1") == [
        "task.claimed", "task.parked", "approval.requested", "approval.approved", "task.resumed",
        "task.claimed", "task.succeeded",
    ]  # fmt: skip
    events = dict(lab.history("m-1"))
    assert events["approval.approved"] == {
        "approval_id": listed.id, "rule": "big", "by": "anna", "note": "checked",
    }  # fmt: skip
    assert events["approval.requested"]["payload_sha256"] == listed.payload_sha256
    assert events["task.resumed"] == {"kind": "waiting_approval", "by": "anna"}


@pytest.mark.parametrize("policy", ["dlq", "ack"])
async def test_a_no_ends_it(one_file: Lab, policy: str) -> None:
    app, ran = await governed(one_file, BIG, queues={"default": {"ack_policy": policy}})
    await one_file.start(app)
    await parked(one_file, app, "m-1", idempotency_key="k", ordering_key="c")
    await app.send("payout", {"amount": 1}, id="next", ordering_key="c")
    await app.send("payout", {"amount": 2}, id="twin", idempotency_key="k")
    async with desk(app) as (approvals, _):
        await approvals.reject(await approvals.find("m-1"), by="bob", note="wrong account")
    assert await one_file.ends("m-1", "next", "twin") == ["rejected", "succeeded", "succeeded"]
    assert [each for each, _ in ran if each == "m-1"] == [], "its key and its lane were let go"
    final = dict(one_file.history("m-1"))["task.rejected"]
    assert final["reason"] == "bob said no: wrong account"
    assert (final["policies"], final["by"]) == (["big"], "bob")
    assert final["status"] == "rejected"
    letters = one_file.letters()
    assert [letter["reason"] for letter in letters] == (["rejected"] if policy == "dlq" else [])
    assert all(letter["body"] for letter in letters), "kept whole"


async def test_the_first_answer_wins_and_the_second_is_told(one_file: Lab) -> None:
    app, ran = await governed(one_file, BIG)
    await one_file.start(app)
    await parked(one_file, app, "m-1")
    async with desk(app) as (approvals, _):
        found = await approvals.find("m-1")
        answers = await asyncio.gather(
            approvals.approve(found, by="anna"),
            approvals.reject(found, by="bob"),
            approvals.approve(found, by="cora"),
            return_exceptions=True,
        )
        (won,) = [each for each in answers if isinstance(each, Approval)]
        lost = [each for each in answers if isinstance(each, Conflict)]
        assert len(lost) == 2
        for each in lost:
            assert f"was {won.state} by {won.answered_by} at 2" in str(each)
            assert "nothing was changed" in str(each)
    ended = await one_file.ends("m-1")
    assert ended == ["succeeded" if won.state == "approved" else "rejected"]
    assert len(ran) == (won.state == "approved")
    assert len(one_file.finals("m-1")) == 1


async def test_four_eyes(one_file: Lab) -> None:
    app, ran = await governed(one_file, {**BIG, "four_eyes": True})
    await one_file.start(app)
    await parked(one_file, app, "m-1")
    await parked(one_file, app, "m-2")
    async with desk(app) as (approvals, _):
        first = await approvals.approve(await approvals.find("m-1"), by="anna")
        assert (first.state, first.first_by) == ("pending", "anna")
        assert one_file.status("m-1") == "parked"
        with pytest.raises(Conflict, match=r"anna said yes .* before; .* a second, other person"):
            await approvals.approve(first, by=" anna ")
        second = await approvals.approve(first, by="bob")
        assert (second.state, second.first_by, second.answered_by) == ("approved", "anna", "bob")
        assert await one_file.ends("m-1") == ["succeeded"]
        half = await approvals.approve(await approvals.find("m-2"), by="anna")
        await approvals.reject(half, by="anna", note="second thoughts")
        assert await one_file.ends("m-2") == ["rejected"]
    assert [each for each, _ in ran] == ["m-1"]
    assert one_file.kinds("m-1")[2:6] == [
        "approval.requested", "approval.first", "approval.approved", "task.resumed",
    ]  # fmt: skip
    assert dict(one_file.history("m-1"))["approval.approved"]["first_by"] == "anna"


async def test_no_answer_in_time_is_a_no(one_file: Lab) -> None:
    app, ran = await governed(one_file, {**BIG, "expires_s": 0.2})
    await one_file.start(app, relays=relays_of(app, spawn_solo=False))
    await app.send("payout", {"amount": 5000}, id="m-1")
    assert await one_file.ends("m-1") == ["rejected"]
    assert ran == []
    assert one_file.kinds("m-1")[2:] == [
        "approval.requested", "approval.expired", "task.rejected", "task.dlq",
    ]  # fmt: skip
    assert "nobody answered by" in dict(one_file.history("m-1"))["task.rejected"]["reason"]
    async with desk(app) as (approvals, _):
        with pytest.raises(Conflict, match="was expired at"):
            await approvals.approve(await approvals.find("m-1"), by="late")


async def test_a_late_answer_counts_for_nothing_even_before_the_relay_looks(one_file: Lab) -> None:
    app, ran = await governed(one_file, {**BIG, "expires_s": 0.001})
    await one_file.start(app)
    await parked(one_file, app, "m-1")
    async with desk(app) as (approvals, _):
        found = await approvals.find("m-1")
        await one_file.until(lambda: app.clock.now_us() > found.expires_at_us)
        with pytest.raises(Conflict, match=r"expired at .*; no answer in time is a no"):
            await approvals.approve(found, by="late")
        app.store.expiry_paused = True  # somebody sets the clock: nobody knows what is over
        assert (
            await StoreGovernance(sqlite_store(app)).expire(worker=one_file._workers[0].worker) == 0
        )
        await approvals.approve(found, by="in doubt")
    assert await one_file.ends("m-1") == ["succeeded"]
    assert len(ran) == 1


async def test_an_answer_holds_for_its_payload_alone(one_file: Lab) -> None:
    app, ran = await governed(one_file, BIG)
    worker = await one_file.start(app)
    await parked(one_file, app, "m-1")
    await one_file.stop(worker)
    async with desk(app) as (approvals, _):
        found = await approvals.find("m-1")
        await approvals.approve(found, by="anna")
    body: bytes = one_file.task("m-1")["body"]
    forged = body.replace(b"5000", b"9000")
    assert forged != body
    with closing(sqlite3.connect(one_file.path)) as conn, conn:
        conn.execute(
            "UPDATE queue_executions SET body = ?, body_crc = ?", (forged, zlib.crc32(forged))
        )
    await one_file.start(app)
    await one_file.has_event("m-1", "approval.requested", 2)
    assert ran == []
    async with desk(app) as (approvals, _):
        again = await approvals.find("m-1")
        assert again.id != found.id
        assert again.payload_sha256 != found.payload_sha256
        await approvals.approve(again, by="anna")
    assert await one_file.ends("m-1") == ["succeeded"]


async def test_a_yes_passes_its_rule_and_no_other(one_file: Lab) -> None:
    app, ran = await governed(
        one_file,
        BIG,
        {"name": "foreign", "match": {"payload": "country != 'CH'"}, "then": "approve"},
        {"name": "never", "match": {"payload": "country == 'XX'"}, "then": "deny"},
    )
    await one_file.start(app)
    await parked(one_file, app, "twice", payload={"country": "DE"})
    await parked(one_file, app, "denied", payload={"country": "XX"})
    async with desk(app) as (approvals, _):
        for message_id in ("twice", "denied"):
            await approvals.approve(await approvals.find(message_id), by="anna")
            await one_file.has_event(message_id, "approval.requested", 2)
            await one_file.becomes(message_id, "parked")
            second = await approvals.find(message_id)
            assert second.rule == "foreign"
            await approvals.approve(second, by="bob")
    assert await one_file.ends("twice", "denied") == ["succeeded", "rejected"]
    assert [each for each, _ in ran] == ["twice"]


async def test_retries_of_what_was_approved_ask_nobody_again(one_file: Lab) -> None:
    app, ran = await governed(one_file, BIG)
    await one_file.start(app)
    await parked(one_file, app, "m-1", payload={"fail": 2})
    async with desk(app) as (approvals, _):
        await approvals.approve(await approvals.find("m-1"), by="anna")
    assert await one_file.ends("m-1") == ["succeeded"]
    assert ran == [("m-1", 1), ("m-1", 2), ("m-1", 3)]
    assert one_file.kinds("m-1").count("approval.requested") == 1


async def test_parked_commands_know_of_the_question(one_file: Lab) -> None:
    app, ran = await governed(one_file, BIG)
    await one_file.start(app)
    await parked(one_file, app, "m-1")
    async with desk(app) as (approvals, aside):
        task = await aside.find("m-1")
        with pytest.raises(Conflict, match="ackbone approvals approve"):
            await aside.resume(task)
        await aside.discard(task, reason="no use")
        with pytest.raises(Conflict, match=r"was rejected by .*the message was discarded"):
            await approvals.approve(await approvals.find("m-1"), by="anna")
    assert one_file.kinds("m-1")[-2:] == ["approval.rejected", "task.discarded"]
    assert one_file.finals("m-1") == ["task.discarded"]
    assert ran == []


async def test_finding_one(one_file: Lab) -> None:
    app, _ = await governed(one_file, BIG)
    await one_file.start(app)
    await parked(one_file, app, "order-1", tenant_id="acme")
    await parked(one_file, app, "order-2", tenant_id="umbrella")
    async with desk(app) as (approvals, _):
        one = await approvals.find("order-1")
        assert await approvals.find(one.id) == one
        assert await approvals.find(one.id.replace("-", "")[:31]) == one
        assert await approvals.find("orde", tenant_id="acme") == one
        with pytest.raises(Ambiguous) as caught:
            await approvals.find("order-")
        assert len(caught.value.matches) == 2
        with pytest.raises(NotFound):
            await approvals.find("nothing-here")
        with pytest.raises(InvalidMessage):
            await approvals.find("o")
        with pytest.raises(InvalidMessage, match="needs a name"):
            await approvals.approve(one, by="  ")
        for where, found in (
            (ApprovalFilter(tenant_id="acme"), 1),
            (ApprovalFilter(rule="big"), 2),
            (ApprovalFilter(rule="other"), 0),
            (ApprovalFilter(queue="other"), 0),
            (ApprovalFilter(state="approved"), 0),
        ):
            assert len(await approvals.list(where, limit=9)) == found
        first = await approvals.list(ApprovalFilter(), limit=1)
        rest = await approvals.list(ApprovalFilter(), limit=9, after=first[0].id)
        assert {each.message_id for each in (*first, *rest)} == {"order-1", "order-2"}
        with pytest.raises(NotFound):
            await approvals._acting.approve("0199a1e1-0000-7000-8000-000000000000", by="x")


async def test_a_guard_of_ones_own_may_ask(one_file: Lab) -> None:
    app = await one_file.open()
    ran: list[str] = []

    @app.guard
    async def guard(context: dict[str, Any]) -> Decision:
        if "mine" in context["approved"]:
            return Decision(allowed=True)
        return Decision(allowed=False, reason="look first", ask=Ask(rule="mine", expires_s=60))

    @app.on("payout")
    async def pay(ctx: Context) -> None:
        ran.append(ctx.message.id)

    await one_file.start(app)
    await parked(one_file, app, "m-1")
    async with desk(app) as (approvals, _):
        found = await approvals.find("m-1")
        assert (found.rule, found.reason) == ("mine", "look first")
        await approvals.approve(found, by="anna")
    assert await one_file.ends("m-1") == ["succeeded"]
    assert ran == ["m-1"]


async def test_a_guard_that_asks_for_ever_is_a_failure(one_file: Lab) -> None:
    app = await one_file.open()

    @app.guard
    async def guard(context: dict[str, Any]) -> Decision:
        return Decision(allowed=False, ask=Ask(rule="mine"))

    @app.on("payout")
    async def pay(ctx: Context) -> None:
        raise AssertionError("never")

    await one_file.start(app)
    await parked(one_file, app, "m-1")
    async with desk(app) as (approvals, _):
        await approvals.approve(await approvals.find("m-1"), by="anna")
    assert await one_file.ends("m-1") == ["failed"]
    assert "context['approved']" in one_file.letters()[0]["error"]


async def test_a_message_with_a_handler_that_came_late_is_not_asked_about_twice(
    one_file: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set aside for another reason after the yes: the yes still holds."""
    monkeypatch.setattr(claiming, "GRACE_US", 0)  # nobody expects the first worker back
    app, ran = await governed(one_file, BIG)
    worker = await one_file.start(app)
    await parked(one_file, app, "m-1")
    await one_file.stop(worker)
    async with desk(app) as (approvals, _):
        await approvals.approve(await approvals.find("m-1"), by="anna")
    bare = App(app.config)
    await bare.open()
    await one_file.start(bare)
    await one_file.has_event("m-1", "task.parked", 2)
    await one_file.stop(one_file._workers[0])
    await bare.close()
    await one_file.start(app)  # its relay takes up what waited for a handler
    assert await one_file.ends("m-1") == ["succeeded"]
    assert ran == [("m-1", 1)]
    assert one_file.kinds("m-1").count("approval.requested") == 1


async def test_a_question_moves_with_the_clock(one_file: Lab) -> None:
    """Somebody sets it two days forward: nobody had those two days to answer."""
    clock = FakeClock()
    app, ran = await governed(one_file, BIG, clock=clock)
    await one_file.start(app)
    await parked(one_file, app, "m-1")
    async with desk(app) as (approvals, _):
        before = await approvals.find("m-1")
        clock.jump_wall(2 * 86_400)
        await sqlite_store(app).file.write(lambda conn: None)
        after = await approvals.find("m-1")
        assert after.expires_at_us - before.expires_at_us == 2 * 86_400_000_000
        await approvals.approve(after, by="anna")
    assert await one_file.ends("m-1") == ["succeeded"]
    assert len(ran) == 1
