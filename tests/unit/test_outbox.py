"""The outbox: follow-ups reach a broker elsewhere, at least once, under the id they had."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context
from ackbone.brokers.memory import MemoryBroker
from ackbone.composition.background import relays_of
from ackbone.config import load_config
from ackbone.core.broker import Outgoing, Result, Subscription
from ackbone.core.errors import (
    AckboneError,
    BrokerError,
    BrokerUnavailable,
    MessageTooLarge,
    PublishUnknown,
)
from ackbone.core.ids import uuid7_bytes
from ackbone.core.store import Worker
from ackbone.store import outbox as outbox_module
from ackbone.store.outbox import Outbox
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore
from ackbone.testing import FakeClock, Signal
from tests import sources


class Fragile(MemoryBroker):
    """A broker that can be away, refuse one message, or answer and then be forgotten."""

    down = False
    error: BrokerError = BrokerUnavailable("away")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.refused: dict[str, AckboneError] = {}

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        if self.down:
            raise self.error
        good = [out for out in batch if out.id not in self.refused]
        await super().publish(queue, good)
        return [Result(id=out.id, error=self.refused.get(out.id)) for out in batch]


class Office:
    def __init__(self, home: Path) -> None:
        self.clock = FakeClock()
        self.store = SqliteStore(home / "ackbone.db", clock=self.clock)
        self.broker = Fragile(clock=self.clock)
        self.outbox = Outbox(
            self.store, lambda queue: self.broker, codec_of=lambda queue: "standard"
        )
        self.worker = Worker(worker_id=0)

    async def put(self, name: str, body: bytes = b"{}", **columns: Any) -> None:
        now = self.clock.now_us()
        row = {
            "id": uuid7_bytes(),
            "tenant_id": "acme",
            "queue_name": "q",
            "message_id": name,
            "headers": '{"x":"1"}',
            "body": body,
            "body_crc": zlib.crc32(body),
            "priority": 2,
            "ordering_key": "chat",
            "ttl_us": 5_000_000,
            "due_at": now,
            "created_at": now,
            **columns,
        }
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        await self.store.file.write(
            lambda conn: conn.execute(
                f"INSERT INTO outbox ({names}) VALUES ({marks})", tuple(row.values())
            )
        )

    async def received(self, queue: str = "q") -> list[Any]:
        sub = Subscription(name=queue, queue=queue)
        return list(await sources.receive(self.broker, sub, limit=1000, wait=0))

    async def left(self) -> list[str]:
        found = await self.store.file.read(
            lambda conn: conn.execute("SELECT message_id FROM outbox ORDER BY 1").fetchall()
        )
        return [name for (name,) in found]


@pytest.fixture
async def office(home: Path) -> AsyncIterator[Office]:
    office = Office(home)
    ensure_schema(office.store.path)
    await office.store.open()
    await office.broker.open()
    office.worker = await office.store.register("w")
    yield office
    await office.broker.close()
    await office.store.close()


@pytest.mark.parametrize("jump_s", [86_400, -86_400], ids=["+1d", "-1d"])
async def test_what_is_not_due_yet_does_not_leave_because_the_clock_was_set(office, jump_s):
    await office.put("later", due_at=office.clock.now_us() + 1_800_000_000)
    office.clock.jump_wall(jump_s)  # and nobody has written since
    assert await office.outbox.due_rows(10) == []
    await office.store.file.write(lambda conn: None)  # this one moves what waits
    assert await office.outbox.due_rows(10) == []
    office.clock.advance(1801)
    assert [row.message_id for row in await office.outbox.due_rows(10)] == ["later"]


async def test_what_is_due_is_published_as_it_was_and_then_gone(office):
    await office.put("a", b'{"n": 1}')
    await office.put("b", queue_name="other", ttl_us=None, ordering_key=None)
    await office.put("later", due_at=office.clock.now_us() + 1_000_000)
    assert await office.outbox.due()
    assert await office.outbox.step(office.worker) == 2
    (first,) = await office.received()
    assert (first.body, dict(first.headers)) == (b'{"n": 1}', {"x": "1"})
    assert (first.priority, first.key) == (2, "chat")
    assert first.expires_at_us == office.clock.now_us() + 5_000_000
    (other,) = await office.received("other")
    assert other.expires_at_us is None
    assert await office.left() == ["later"]
    assert not await office.outbox.due()
    office.clock.advance(1)
    assert await office.outbox.step(office.worker) == 1
    assert await office.left() == []


async def test_many_go_in_batches_and_in_order(office, monkeypatch):
    monkeypatch.setattr(outbox_module, "BATCH", 7)
    for n in range(40):
        await office.put(f"m{n:02}", str(n).encode(), due_at=office.clock.now_us() - 40 + n)
    assert await office.outbox.step(office.worker) == 40
    assert [delivery.body for delivery in await office.received()] == [
        str(n).encode() for n in range(40)
    ]


async def test_while_the_broker_is_away_all_wait(office):
    await office.put("a")
    office.broker.down = True
    with pytest.raises(BrokerUnavailable):
        await office.outbox.step(office.worker)
    assert await office.left() == ["a"]
    office.broker.down = False
    assert await office.outbox.step(office.worker) == 1


async def test_one_that_is_refused_waits_alone(office):
    await office.put("a")
    await office.put("b")
    office.broker.refused = {"a": BrokerUnavailable("not now")}
    assert await office.outbox.step(office.worker) == 1
    assert await office.left() == ["a"]
    assert not await office.outbox.due(), "not before its wait is over"
    office.broker.refused = {}
    office.clock.advance(outbox_module.REFUSED_WAIT_S)
    assert await office.outbox.step(office.worker) == 1
    assert len(await office.received()) == 2


async def test_a_crash_before_the_deletion_publishes_again_under_the_same_id(office, monkeypatch):
    await office.put("a", b"body")

    class Killed(BaseException):
        pass

    def die(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(office.outbox, "_settle", die)
        with pytest.raises(Killed):
            await office.outbox.step(office.worker)
    assert await office.left() == ["a"]
    assert await office.outbox.step(office.worker) == 1
    assert [delivery.body for delivery in await office.received()] == [b"body", b"body"]


@pytest.mark.parametrize("damage", ["too large", "body", "headers"])
async def test_what_can_never_be_published_becomes_a_dead_letter(office, damage):
    await office.put("good")
    if damage == "too large":
        await office.put("bad", b"big")
        office.broker.refused = {"bad": MessageTooLarge("too large")}
    elif damage == "body":
        await office.put("bad", b"big", body_crc=1)
    else:
        await office.put("bad", b"big", headers="[")
    assert await office.outbox.step(office.worker) == 1
    assert await office.left() == []
    letters = await office.store.file.read(
        lambda conn: conn.execute(
            "SELECT tenant_id, queue_name, message_id, reason, body, state FROM dead_letters"
        ).fetchall()
    )
    reason = "unpublishable" if damage == "too large" else "body_corrupt"
    assert letters == [("acme", "q", "bad", reason, b"big", "open")]


async def test_follow_ups_of_a_run_arrive_at_once_and_run_once(home):
    """Memory broker, SQLite store: a chain of three messages, each sent by the one before."""
    app = App(
        load_config(environ={}, cwd=home, overrides={"home": str(home), "broker": "memory://"})
    )
    ran: Signal[tuple[str, int]] = Signal("ran")

    @app.on("step", queue="q")
    async def step(ctx: Context) -> None:
        if ctx.payload["n"] < 3:
            await ctx.send("step", {"n": ctx.payload["n"] + 1}, queue="q")
        ran.emit((ctx.message.id, ctx.payload["n"]))

    async with app:
        from msgspec.structs import replace

        relays = [
            replace(relay, every_s=3600.0)  # the bell alone
            for relay in relays_of(app, spawn_solo=False)
            if relay.name == "outbox"
        ]
        assert len(relays) == 1
        worker = app.worker(relays=relays)
        await worker.begin()
        await app.send("step", {"n": 1}, queue="q")
        await asyncio.wait_for(app.idle(worker), 30)  # not idle while follow-ups wait
        await worker.drain(1.0)
    assert sorted(n for _, n in ran.seen) == [1, 2, 3]
    assert len({name for name, _ in ran.seen}) == 3


async def test_a_store_with_its_own_queue_needs_no_outbox(home):
    app = App(load_config(environ={}, cwd=home, overrides={"home": str(home)}))
    async with app:
        assert "outbox" not in {relay.name for relay in relays_of(app, spawn_solo=False)}


@pytest.mark.parametrize(
    "error",
    [
        BrokerUnavailable("away"),
        BrokerError("the queue is another connection's own"),
        PublishUnknown(["far0"], "no confirmation"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_broker_that_is_away_holds_up_its_own_queues_alone(office, error):
    away = Fragile(clock=office.clock)
    away.error = error
    await away.open()
    away.down = True
    brokers = {"far": away}
    outbox = Outbox(
        office.store,
        lambda queue: brokers.get(queue, office.broker),
        codec_of=lambda _: "standard",
        name_of=lambda queue: "events" if queue == "far" else "default",
    )
    for n in range(3):
        await office.put(f"far{n}", queue_name="far")
        await office.put(f"near{n}")
    with pytest.raises(type(error)) as raised:
        await outbox.step(office.worker)
    assert raised.value.broker == "events"
    assert await office.left() == ["far0", "far1", "far2"]
    assert len(await office.received()) == 3
    away.down = False
    assert await outbox.step(office.worker) == 3


async def test_a_broker_that_does_not_answer_delays_no_other(office, monkeypatch):
    """Its publish ends only after that of the other broker has."""
    silent, published = Fragile(clock=office.clock), asyncio.Event()
    await silent.open()
    outbox = Outbox(
        office.store,
        lambda queue: silent if queue == "far" else office.broker,
        codec_of=lambda _: "standard",
    )
    publish = office.broker.publish

    async def near(queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        results: Sequence[Result] = await publish(queue, batch)
        published.set()
        return results

    async def far(queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        async with asyncio.timeout(10):
            await published.wait()
        raise BrokerUnavailable("no answer")

    monkeypatch.setattr(office.broker, "publish", near)
    monkeypatch.setattr(silent, "publish", far)
    await office.put("first", queue_name="far")
    await office.put("second")
    with pytest.raises(BrokerUnavailable):
        await outbox.step(office.worker)
    assert await office.left() == ["first"]
