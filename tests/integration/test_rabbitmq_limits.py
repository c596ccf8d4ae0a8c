"""What a RabbitMQ server does not allow: long holds, an old password, and too many messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from pamqp import commands as spec

from ackbone import App, Context
from ackbone.brokers.rabbitmq import RabbitBroker
from ackbone.brokers.rabbitmq.source import RabbitSource
from ackbone.config import Config, Queue
from ackbone.core.errors import BrokerDenied, BrokerUnavailable
from ackbone.core.ids import new_id
from tests.integration.rabbit_lab import (
    ack,
    messages,
    opened,
    raw,
    receive,
    source_of,
    until,
)
from tests.servers.rabbitmq import RabbitServer

pytestmark = [pytest.mark.xdist_group("rabbitmq"), pytest.mark.timeout(120)]
TIMEOUT_MS = 2000
"""The server's consumer_timeout in these tests. The usual one is half an hour."""
_LIMITS = "application:set_env(rabbit, {}, {})"


@pytest.fixture(params=["newest_rabbitmq", "rabbitmq"], ids=["newest", "debian"])
def server(request: pytest.FixtureRequest) -> RabbitServer:
    found: RabbitServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def impatient(server: RabbitServer) -> Iterator[RabbitServer]:
    """The server, with a short consumer_timeout for channels that are opened now."""
    _limit(server, TIMEOUT_MS, tick_ms=200)
    yield server
    _limit(server, 1_800_000, tick_ms=60_000)


def _limit(server: RabbitServer, timeout_ms: int, *, tick_ms: int) -> None:
    limits = {"consumer_timeout": timeout_ms, "channel_tick_interval": tick_ms}
    server.ctl("eval", ", ".join(_LIMITS.format(*each) for each in limits.items()) + ".")


@pytest.fixture
def queue(server: RabbitServer) -> Iterator[str]:
    name = f"limits-{new_id()[-8:]}"
    yield name
    named = [each["name"] for each in server.api("GET", "queues/%2F")]
    server.forget(*(each for each in named if each.startswith(name)))


async def test_a_message_that_is_held_for_too_long(impatient: RabbitServer, queue: str):
    """The server takes it back, by closing the channel (3.10) or the consumer (4.3). Reading goes
    on by itself, and a late acknowledgement does no harm."""
    async with opened(impatient.url) as broker:
        await broker.publish(queue, messages(1, priority=1))
        await broker.publish(queue, messages(2, priority=3))
        source = await source_of(broker, queue)
        held = await receive(source, 3)
        again = await receive(source, 3)
        assert {each.identity for each in again} == {each.identity for each in held}
        await ack(source, held)
        await broker.publish(queue, messages(1))
        await ack(source, [*again, *await receive(source, 1)])
        assert not await source.receive(limit=1, wait=0.5)
        (stats,) = await broker.stats()
        assert (stats.ready, stats.in_flight) == (0, 0)


async def test_a_run_that_is_longer_than_consumer_timeout(
    impatient: RabbitServer, queue: str, home: Path
):
    """The store takes the message over and acknowledges the copy, before the server loses its
    patience: the channel stays as it is."""
    hold_s = TIMEOUT_MS / 1000 / 2
    url = f"{impatient.url}?hold_limit_s={hold_s}"
    app = App(Config(home=home, broker=url, queues={queue: Queue()}))
    runs: list[tuple[bool, int]] = []

    @app.on("long", queue=queue)
    async def run(ctx: Context) -> None:
        source = await app.brokers.of(queue).subscribe(app.subscriptions()[0], room=1)
        assert isinstance(source, RabbitSource)
        before = source._channel
        assert before is not None
        await asyncio.sleep(2 * TIMEOUT_MS / 1000)
        runs.append((source._channel is before and not before.lost, source.held))

    async with app:
        await app.send("long", queue=queue)
        await app.work(until_idle=True)
    assert runs == [(True, 0)]


async def test_a_password_that_is_changed(server: RabbitServer, queue: str):
    """Both connections are lost. They come back with the new password, which is read then."""
    user = f"user-{queue}"

    def give(password: str) -> str:
        server.api("PUT", f"users/{user}", {"password": password, "tags": ""})
        return f"amqp://{user}:{password}@127.0.0.1:{server.port}/"

    old = give("old")
    server.api("PUT", f"permissions/%2F/{user}", {"configure": ".*", "write": ".*", "read": ".*"})
    new = old.replace(":old@", ":new@")
    try:
        async with opened(old, url_now=new) as broker:
            stuck = RabbitBroker(old)
            await stuck.open()
            await broker.publish(queue, messages(2))
            source = await source_of(broker, queue)
            await ack(source, await receive(source, 1))
            await asyncio.to_thread(give, "new")
            await asyncio.to_thread(server.close_all_connections, user)
            with pytest.raises(BrokerDenied, match="refuses the login") as refused:
                await stuck.publish(queue, messages(1))
            await stuck.close()
            assert "old@" not in str(refused.value)
            assert (await broker.publish(queue, messages(1)))[0].ok
            assert len(await receive(source, 2)) == 2
    finally:
        server.api("DELETE", f"users/{user}")


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_a_full_queue_that_refuses(server: RabbitServer, queue: str, kind: str):
    """`x-overflow: reject-publish`: what is refused is refused for the sender, nothing is lost."""
    given = {"x-queue-type": kind, "x-max-length": 3, "x-overflow": "reject-publish"}
    async with opened(server.url) as broker, raw(server) as other:
        await other.queue_declare(queue, durable=True, arguments=given)
        accepted: list[bytes] = []
        refused: BrokerUnavailable | None = None
        for out in messages(20):
            try:
                (result,) = await broker.publish(queue, [out])
                assert result.ok
                accepted.append(out.body)
            except BrokerUnavailable as error:
                refused = error
        assert f"queue {queue} is full and refuses messages" in str(refused)
        assert f"127.0.0.1:{server.port}" in str(refused)
        source = await source_of(broker, queue)
        got = await receive(source, len(accepted))
        assert [each.body for each in got] == accepted
        await ack(source, got)
        assert not await source.receive(limit=1, wait=0.5)
        assert (await broker.publish(queue, messages(1)))[0].ok
        assert len(await receive(source, 1)) == 1


async def test_a_follow_up_to_a_full_queue(server: RabbitServer, queue: str, home: Path):
    """It waits in the outbox until there is room; a sender gets an error instead."""
    given = {"x-max-length": 1, "x-overflow": "reject-publish"}
    app = App(Config(home=home, broker=server.url, queues={f"{queue}-in": Queue()}))

    @app.on("order", queue=f"{queue}-in")
    async def order(ctx: Context) -> None:
        await ctx.send("bill", ctx.payload, queue=queue)

    async with app, raw(server) as other:
        await other.queue_declare(queue, durable=True, arguments=given)
        await app.send("bill", "first", queue=queue)
        with pytest.raises(BrokerUnavailable, match="is full and refuses messages"):
            await app.send("bill", "refused", queue=queue)
        receipt = await app.send("order", "second", queue=f"{queue}-in")
        working = asyncio.create_task(app.work())
        records = app.storage.records(app.store)

        async def is_done() -> bool:
            return [each.status for each in await records.tasks(None, receipt.id)] == ["succeeded"]

        async def read() -> bytes | None:
            got = await other.basic_get(queue, no_ack=True)
            return bytes(got.body) if isinstance(got.delivery, spec.Basic.GetOk) else None

        await until(is_done)
        bodies = [await until(read) for _ in range(2)]
        working.cancel()
        await asyncio.wait({working})
        assert b"first" in bodies[0]
        assert b"second" in bodies[1]
        assert await read() is None
