"""Whoever subscribed to events is told of them, by deliveries that are committed with them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook

from ackbone import App, Config, Context
from ackbone.admin.deliveries import Deliveries
from ackbone.cli.session import operating
from ackbone.config import Retry, load_config
from ackbone.config.settings import Delivery, Subscriber
from ackbone.core.errors import ConfigError, FinalError
from ackbone.core.events import Entry
from ackbone.core.outbound.delivery import Outbound
from ackbone.core.outbound.subscribers import EVENT_NAMES, OURS, Subscribers
from ackbone.core.outbound.subscribers import Subscriber as Place
from ackbone.delivery.channels.webhook_channel import WebhookChannel
from ackbone.store.unit import Change
from tests.servers.receiver import Receiver, receiving
from tests.servers.stores import STORES, sqlite_store, store_url

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


class Chat:
    """A channel that takes everything but what is addressed to nobody."""

    name = "chat"

    def __init__(self) -> None:
        self.got: list[Outbound] = []

    async def send(self, reply: Outbound) -> None:
        if reply.recipient == "nobody":
            raise FinalError("no such chat")
        self.got.append(reply)

    async def close(self) -> None:
        pass


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    return store_url(request) or "sqlite"


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


def app_of(home: Path, store: str, **subscribers: Subscriber) -> tuple[App, Chat]:
    """An app with a webhook channel and a chat, and a handler that answers wherever it is told."""
    config = Config(
        home=home,
        store=store,
        retry=Retry(base_delay_s=0.01, jitter=0.0),
        delivery=Delivery(wait_scale=0.01),
        subscribers=subscribers,
    )
    app, chat = App(config), Chat()
    app.channel(WebhookChannel([SECRET], allow=["127.0.0.0/8"], https_only=False))
    app.channel(chat)

    @app.on("order")
    async def order(ctx: Context) -> None:
        if ctx.payload == "broken":
            raise FinalError("it is broken")
        await ctx.send_to("chat", ctx.payload, "thank you")

    return app, chat


def told(receiver: Receiver) -> list[dict[str, Any]]:
    """The events that arrived; each request must be signed."""
    for headers, body in receiver.got:
        Webhook(SECRET).verify(body.decode(), {key.lower(): each for key, each in headers.items()})
    return [json.loads(body) for _, body in receiver.got]


async def work(app: App, wanted: Callable[[], bool]) -> None:
    """Run a worker until this is so, and until nothing else is under way."""
    working = asyncio.create_task(app.work())
    try:
        async with asyncio.timeout(60):
            while not wanted():  # noqa: ASYNC110 - whoever is told tells nobody
                await asyncio.sleep(0.005)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_a_webhook_is_told_of_what_it_asked_for(
    home: Path, store: str, receiver: Receiver
) -> None:
    ops = Subscriber(to=receiver.url(), events=("delivery.*", "task.failed"))
    app, _ = app_of(home, store, ops=ops)
    async with app:
        first = await app.send("order", "ann")
        second = await app.send("order", "nobody")
        third = await app.send("order", "broken")
    await work(app, lambda: len(receiver.got) == 5)
    made = [each for each in told(receiver) if each["type"] == "delivery.created"]
    assert {each["data"]["task_id"] for each in made} == {first.id, second.id}
    found = {each["data"]["task_id"]: each for each in told(receiver) if each not in made}
    assert {key: each["type"] for key, each in found.items()} == {
        first.id: "delivery.sent",
        second.id: "delivery.failed",
        third.id: "task.failed",
    }
    data = found[second.id]["data"]
    assert (data["channel"], data["error"], data["tenant_id"]) == (
        "chat",
        "no such chat",
        "default",
    )
    assert data["queue"] == "default"
    assert found[first.id]["timestamp"].endswith("+00:00")


async def test_what_became_of_the_telling_is_told_to_nobody(
    home: Path, store: str, receiver: Receiver
) -> None:
    app, _ = app_of(home, store, ops=Subscriber(to=receiver.url(), events=("*",)))
    seen: list[tuple[str, str]] = []
    app.observe(lambda event: seen.append((event.subscription, event.type)))
    async with app:
        await app.send("order", "ann")
    own = (OURS, "delivery.sent")
    # task.claimed, task.succeeded, and what the chat got; each of the four was delivered
    await work(app, lambda: seen.count(own) == 4)
    types = [each["type"] for each in told(receiver)]
    assert types == ["task.claimed", "task.succeeded", "delivery.created", "delivery.sent"]
    assert (OURS, "delivery.created") not in seen
    async with app:
        await app.work(until_idle=True)
    assert len(receiver.got) == 4


async def test_a_subscriber_that_is_away_is_told_later_in_order(
    home: Path, store: str, receiver: Receiver
) -> None:
    receiver.says(503)
    app, _ = app_of(home, store, ops=Subscriber(to=receiver.url(), events=("task.*",)))
    async with app:
        await app.send("order", "ann")

    def back() -> bool:
        if len(receiver.got) >= 2:
            receiver.says(204)
        return len({body for _, body in receiver.got}) == 2

    await work(app, back)
    types = [json.loads(body)["type"] for _, body in receiver.got]
    assert types == ["task.claimed"] * (len(types) - 1) + ["task.succeeded"]


async def test_people_get_a_line_of_text(home: Path, store: str) -> None:
    app, chat = app_of(home, store)
    app.subscribe("chat", "on-call", events=["delivery.failed"])
    app.subscribe("chat", "others", events=["delivery.failed"], tenant_id="others")
    async with app:
        receipt = await app.send("order", "nobody")
    await work(app, lambda: bool(chat.got))
    (line,) = chat.got
    assert line.recipient == "on-call"
    assert line.content.startswith(
        f"delivery.failed: message {receipt.id}, queue default, delivery_id "
    )
    assert line.content.endswith(", channel chat, tenant default: no such chat")


async def test_commands_are_told_of_too(home: Path, store: str, receiver: Receiver) -> None:
    app, _ = app_of(home, store, ops=Subscriber(to=receiver.url(), events=("delivery.discarded",)))
    async with app:
        await app.deliver("nowhere", "somebody", "hello", id="9f6b0c1e-0000-4000-8000-000000000001")
        async with operating(app) as (records, operations):
            desk = Deliveries(records, operations)
            ids = ["9f6b0c1e-0000-4000-8000-000000000001"]
            (done,) = [each async for each in desk.discard(ids, reason="too late")]
            assert done.error is None
    await work(app, lambda: bool(receiver.got))
    (event,) = told(receiver)
    assert (event["type"], event["data"]["reason"]) == ("delivery.discarded", "too late")


async def test_what_is_undone_is_not_told(
    home: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delivery stands or falls with the event's transaction."""
    app, _ = app_of(home, "sqlite", ops=Subscriber(to=receiver.url(), events=("queue.paused",)))
    async with app:
        store = sqlite_store(app)
        worker = await store.register("test")

        async def op(tx: Any, change: Change) -> None:
            entry = ("default", "default", "", "queue.paused", {"queue": "default", "by": "me"})
            change.entries.append(entry)

        def fail(conn: Any, *_: Any) -> None:
            assert conn.execute("SELECT count(*) FROM deliveries").fetchone() == (1,)
            raise RuntimeError("undo")

        monkeypatch.setattr(store._ledger, "write", fail)
        with pytest.raises(RuntimeError, match="undo"):
            await store.write(op, worker_id=worker.worker_id)
        monkeypatch.undo()
        rows = await store.file.read(
            lambda conn: conn.execute("SELECT count(*) FROM deliveries").fetchone()
        )
        assert rows == (0,)


def test_mistakes_are_named(home: Path) -> None:
    wrong = {
        "a": Subscriber(to="https://example.org", events=("delivery.send",)),
        "b": Subscriber(to=""),
        "c": Subscriber(to="x", channel="no name"),
    }
    with pytest.raises(ConfigError) as raised:
        Config(home=home, subscribers=wrong)
    first, second, third = raised.value.problems
    assert first == (
        "Config: subscribers.a.events[0]: no event is called 'delivery.send'; did you mean"
        " delivery.sent? there are approval.*, delivery.*, dlq.*, effect.*, queue.*, task.*"
    )
    assert second == "Config: subscribers.b.to: must be text of 1 to 2048 characters"
    assert third.startswith("Config: subscribers.c.channel: not a valid channel name")


def test_mistakes_of_the_file_are_named_with_their_lines(home: Path) -> None:
    file = home / "ackbone.yaml"
    file.write_text("""
subscribers:
  ops:
    events: [task.failed, tusk.failed]
    channel: "?"
""")
    with pytest.raises(ConfigError) as raised:
        load_config(file, environ={})
    said = "\n".join(raised.value.problems)
    assert "subscribers.ops.events[1]: no event is called 'tusk.failed'; did you mean" in said
    assert "subscribers.ops.channel: not a valid channel name" in said
    assert "subscribers.ops.to: must be text of 1 to 2048 characters" in said


def test_patterns() -> None:
    everything = Subscribers([Place(channel="w", recipient="x", events=("*", "task.*"))])
    entries: list[Entry] = [("t", "q", "m", kind, {}) for kind in EVENT_NAMES]
    assert len(everything.notifications(entries, 0)) == len(EVENT_NAMES)  # once each
    assert not any(name.startswith("ledger.") for name in EVENT_NAMES)
    assert not everything.notifications([("t", OURS, "", "delivery.sent", {})], 0)
    assert not Subscribers()
