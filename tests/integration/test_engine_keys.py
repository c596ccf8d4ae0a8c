"""Idempotency keys: one committed run per key and window, and an answer for every copy."""

import asyncio

import pytest

from ackbone.core.events import DUPLICATE, SUCCEEDED
from ackbone.engine.context import Context
from ackbone.engine.worker_relays import WorkerRelays
from ackbone.testing import FakeClock
from tests.integration.lab import Lab


async def test_duplicates_get_the_first_ones_result(lab: Lab) -> None:
    app = await lab.open()
    runs: list[str] = []

    @app.on("pay")
    async def pay(ctx: Context) -> dict[str, str]:
        runs.append(ctx.message.id)
        return {"paid_by": ctx.message.id}

    await lab.start(app)
    first = await app.send("pay", 1, idempotency_key="order-1")
    await lab.ends(first.id)
    copies = [await app.send("pay", n, idempotency_key="order-1") for n in range(3)]
    ids = [copy.id for copy in copies]
    assert await lab.ends(*ids) == ["duplicate"] * 3
    assert runs == [first.id]
    for copy in ids:
        assert lab.task(copy)["result"] == f'{{"paid_by":"{first.id}"}}'.encode()
        assert lab.finals(copy) == [DUPLICATE]
        (data,) = (data for kind, data in lab.history(copy) if kind == DUPLICATE)
        assert data["first_id"] == first.id


async def test_copies_that_come_while_the_first_runs(lab: Lab) -> None:
    app = await lab.open()
    runs: list[str] = []
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.on("pay")
    async def pay(ctx: Context) -> str:
        runs.append(ctx.message.id)
        running.set()
        await go_on.wait()
        return "paid"

    await lab.start(app)
    first = await app.send("pay", idempotency_key="k")
    await asyncio.wait_for(running.wait(), 20)
    copies = [(await app.send("pay", n, idempotency_key="k")).id for n in range(5)]
    for copy in copies:
        await lab.becomes(copy, "waiting_key")
    go_on.set()
    assert await lab.ends(first.id, *copies) == ["succeeded"] + ["duplicate"] * 5
    assert runs == [first.id]
    assert {lab.task(copy)["result"] for copy in copies} == {b'"paid"'}


async def test_twins_in_one_batch(lab: Lab) -> None:
    """Sent before any worker looks: all copies are claimed by one statement."""
    app = await lab.open()
    runs: list[str] = []

    @app.on("pay")
    async def pay(ctx: Context) -> None:
        runs.append(str(ctx.message.idempotency_key))

    ids = [(await app.send("pay", idempotency_key=f"k{n % 4}")).id for n in range(40)]
    await lab.start(app)
    statuses = await lab.ends(*ids)
    assert sorted(runs) == ["k0", "k1", "k2", "k3"]
    assert statuses.count("succeeded") == 4
    assert statuses.count("duplicate") == 36


async def test_a_failure_frees_the_key_for_the_next(lab: Lab) -> None:
    """Those who wait take over, one by one, until one of them succeeds."""
    app = await lab.open()
    runs: list[str] = []
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.on("pay", retries=0)
    async def pay(ctx: Context) -> str:
        runs.append(ctx.payload)
        running.set()
        await go_on.wait()
        if len(runs) < 3:
            raise RuntimeError("no")
        return "paid"

    await lab.start(app)
    first = await app.send("pay", "a", idempotency_key="k")
    await asyncio.wait_for(running.wait(), 20)
    rest = []
    for name in "bcd":
        receipt = await app.send("pay", name, idempotency_key="k")
        await lab.becomes(receipt.id, "waiting_key")
        rest.append(receipt.id)
    go_on.set()
    assert await lab.ends(first.id, *rest) == ["failed", "failed", "succeeded", "duplicate"]
    assert runs == ["a", "b", "c"]


async def test_a_retry_keeps_its_key(lab: Lab) -> None:
    app = await lab.open()
    runs: list[str] = []

    @app.on("pay", retries=3)
    async def pay(ctx: Context) -> None:
        runs.append(ctx.payload)
        if ctx.attempt < 3:
            raise RuntimeError("again")

    await lab.start(app)
    first = await app.send("pay", "a", idempotency_key="k")
    second = await app.send("pay", "b", idempotency_key="k")
    assert sorted(await lab.ends(first.id, second.id)) == ["duplicate", "succeeded"]
    assert len(set(runs)) == 1, f"both ran: {runs}"


async def test_keys_are_unique_per_tenant_and_queue(lab: Lab) -> None:
    app = await lab.open()

    async def run(ctx: Context) -> None:
        return None

    app.on("pay", queue="a")(run)
    app.on("pay", queue="b")(run)
    await lab.start(app)
    ids = [
        (await app.send("pay", queue=queue, tenant_id=tenant, idempotency_key="k")).id
        for queue in ("a", "b")
        for tenant in ("one", "two")
    ]
    assert await lab.ends(*ids) == ["succeeded"] * 4


async def test_a_key_is_free_after_its_window(lab: Lab) -> None:
    clock = FakeClock()
    app = await lab.open(clock=clock, queues={"default": {"dedup_window_s": 3600.0}})

    @app.on("pay")
    async def pay(ctx: Context) -> None:
        return None

    await lab.start(app)
    first = await app.send("pay", 1, idempotency_key="k")
    await lab.ends(first.id)
    clock.advance(3599)
    second = await app.send("pay", 2, idempotency_key="k")
    assert await lab.ends(second.id) == ["duplicate"]
    clock.advance(2)
    third = await app.send("pay", 3, idempotency_key="k")
    assert await lab.ends(third.id) == ["succeeded"]
    assert lab.finals(third.id) == [SUCCEEDED]


async def test_dedup_can_be_switched_off(lab: Lab) -> None:
    app = await lab.open(queues={"default": {"dedup": False}})

    @app.on("pay")
    async def pay(ctx: Context) -> None:
        return None

    await lab.start(app)
    ids = [(await app.send("pay", n, idempotency_key="k")).id for n in range(3)]
    assert await lab.ends(*ids) == ["succeeded"] * 3


async def test_an_expired_holder_frees_its_key_at_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two twins is over its time: the second one runs, without a net's help."""
    monkeypatch.setattr(WorkerRelays, "_resolve", _nothing)
    clock = FakeClock()
    app = await lab.open(clock=clock)

    @app.on("pay")
    async def pay(ctx: Context) -> str:
        return str(ctx.payload)

    first = await app.send("pay", "late", idempotency_key="k", ttl_s=0.001)
    second = await app.send("pay", "fine", idempotency_key="k")
    clock.advance(1)
    await lab.start(app)
    assert await lab.ends(first.id, second.id) == ["expired", "succeeded"]


async def _nothing(*_: object) -> None:
    """A net that holds nothing."""
