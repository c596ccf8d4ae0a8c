"""RabbitMQ's adapter among faults: wrong URLs, vanished queues, lost and silent connections."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pamqp import commands as spec
from pamqp import decode

from ackbone.brokers.rabbitmq import RabbitBroker
from ackbone.brokers.rabbitmq.address import read_address
from ackbone.brokers.rabbitmq.decoding import tolerant_context
from ackbone.core.broker import Outgoing, Settlement, Verb
from ackbone.core.errors import (
    BrokerDenied,
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    InvalidMessage,
    MessageTooLarge,
    PublishUnknown,
)
from ackbone.core.findings import Finding
from ackbone.core.ids import new_id
from tests.integration.rabbit_lab import (
    ack,
    messages,
    opened,
    publish_without_id,
    raw,
    receive,
    source_of,
)
from tests.servers.certificates import Authority
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import DEBIAN, NEWEST, RabbitServer

pytestmark = [pytest.mark.xdist_group("rabbitmq"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=[NEWEST, DEBIAN], ids=["newest", "debian"])
def server(request: pytest.FixtureRequest) -> Iterator[RabbitServer]:
    server = RabbitServer(request.param)
    server.start()
    yield server
    server.remove()


@pytest.fixture
def queue() -> str:
    return f"faults-{new_id()[-12:]}"


# -- wrong URLs ---------------------------------------------------------------------------------


async def test_wrong_password(server: RabbitServer):
    broker = RabbitBroker(f"amqp://guest:hunter2@127.0.0.1:{server.port}/")
    with pytest.raises(BrokerDenied, match=r"refuses the login") as refused:
        await broker.open()
    assert "hunter2" not in str(refused.value)


async def test_missing_vhost(server: RabbitServer):
    broker = RabbitBroker(f"{server.url}nowhere")
    with pytest.raises(BrokerDenied, match=r"the vhost 'nowhere' does not exist") as refused:
        await broker.open()
    assert "correct the vhost in `broker`" in str(refused.value)
    (check,) = await broker.examine()
    assert (check.detail, check.hint) == (str(refused.value), None)  # the server is up


def test_the_default_vhost_is_named():
    for url in ("amqp://h:1", "amqp://h:1/", "amqp://h:1/%2F"):
        assert read_address(url).where == "amqp://h:1 (vhost /)"
    assert read_address("amqp://h:1/nov").where == "amqp://h:1/nov"


async def test_nobody_there_and_tls_refused(server: RabbitServer):
    with pytest.raises(BrokerUnavailable, match=r"amqp://127\.0\.0\.1:1"):
        await RabbitBroker("amqp://u:hunter2@127.0.0.1:1/").open()
    with pytest.raises(BrokerUnavailable, match=r"SSL"):
        await RabbitBroker(f"amqps://guest:guest@127.0.0.1:{server.port}/").open()


async def test_a_silent_port_ends_with_the_deadline(server: RabbitServer):
    with Proxy(server.port) as proxy:
        proxy.hold()
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match=r"no connection within 0\.5 s"):
            await RabbitBroker(f"amqp://guest:guest@127.0.0.1:{proxy.port}/?timeout_s=0.5").open()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("amqp://h/?timeout=1", "did you mean timeout_s"),
        ("amqp://h/?timeout_s=-1", "timeout_s must be a number"),
        ("amqp://h/?queue_type=stream", "queue_type must be one of"),
        ("amqps://h/?cafile=/nowhere/ca.crt", "cafile: there is no such file"),
        ("amqp://u:a#b@h/", "host and port cannot be read"),
        ("amqp://h/a/b", "%2F"),
    ],
)
def test_a_wrong_url(url: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        RabbitBroker(url)


# -- messages -----------------------------------------------------------------------------------


async def test_bad_messages_fail_alone(server: RabbitServer, queue: str):
    bad: Any = {"n": 5}
    batch = [
        Outgoing(id="a", body=b"a"),
        Outgoing(id="b", body=b"b", headers=bad),
        Outgoing(id="c", body=b"c", headers={"x" * 200: "long"}),
        Outgoing(id="d", body=b"d", headers={"x-big": "x" * 200_000}),
        Outgoing(id="e" * 300, body=b"e"),
        Outgoing(id="f", body=b"f", delay_s=1.0),
        Outgoing(id="g", body=b"g", headers={"x-half": "\udcff"}),
        Outgoing(id="h", body=b"h"),
    ]
    async with opened(server.url) as broker:
        errors = [type(each.error) for each in await broker.publish(queue, batch)]
        good = type(None)
        refused = InvalidMessage
        assert errors == [good, refused, refused, MessageTooLarge, *[refused] * 3, good]
        source = await source_of(broker, queue)
        assert [each.body for each in await receive(source, 2)] == [b"a", b"h"]


async def test_a_message_of_another_program(server: RabbitServer, queue: str):
    headers: Any = {
        "text": "t",
        "n": 5,
        "on": True,
        "none": None,
        "raw": bytearray(b"\xff"),
        "deep": {"a": [1]},
    }
    async with opened(server.url) as broker, raw(server) as other:
        source = await source_of(broker, queue)
        await source.receive(limit=1, wait=0.1)
        for body, given in ((b"one", headers), (b"one", {}), (b"two", {})):
            about = spec.Basic.Properties(message_id="order-7", headers=given)
            await other.basic_publish(body, routing_key=queue, properties=about)
        first, same, different = await receive(source, 3)
        await asyncio.to_thread(publish_without_id, server, queue, "three")
        (nameless,) = await receive(source, 1)
    assert first.headers == {
        "text": "t",
        "n": "5",
        "on": "true",
        "none": "null",
        "raw": "\\xff",
        "deep": '{"a": [1]}',
    }
    assert first.identity == same.identity != different.identity
    assert (nameless.identity, nameless.body) == (None, b"three")


async def test_what_the_decoder_of_the_driver_refuses(server: RabbitServer, queue: str):
    """A time in microseconds: the message comes, and so do those behind it."""
    async with opened(server.url) as broker:
        await broker.publish(queue, messages(1))
        micros = 1_763_500_000_000_000
        await asyncio.to_thread(publish_without_id, server, queue, "odd", timestamp=micros)
        await broker.publish(queue, messages(1))
        source = await source_of(broker, queue)
        assert [each.body for each in await receive(source, 3)] == [b"0", b"odd", b"0"]
    ours = tolerant_context()
    for data, kind, found in (
        (b"\x02\xffa", "shortstr", (3, "\\xffa")),
        (b"\x00\x00\x00\x04\x01\xff\x01\x00", "table", (8, {})),
    ):
        assert ours.run(decode.by_type, data, kind) == found
        with pytest.raises(UnicodeDecodeError):  # another program's connection in this process
            decode.by_type(data, kind)


async def test_a_header_of_very_many_levels(server: RabbitServer, queue: str):
    """The message comes without the innermost ones, and so do those behind it."""
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"a": deep}
    async with opened(server.url) as broker, raw(server) as other:
        source = await source_of(broker, queue)
        await source.receive(limit=1, wait=0.1)
        about = spec.Basic.Properties(message_id="deep", headers={"deep": deep})
        await other.basic_publish(b"deep", routing_key=queue, properties=about)
        await broker.publish(queue, messages(1))
        assert [each.body for each in await receive(source, 2)] == [b"deep", b"0"]


async def test_one_id_twice_while_both_are_on_their_way(server: RabbitServer, queue: str):
    twin = Outgoing(id="twin", body=b"twin")
    async with opened(server.url) as broker:
        assert all(each.ok for each in await broker.publish(queue, [twin, twin]))
        source = await source_of(broker, queue)
        assert [each.identity for each in await receive(source, 2)] == ["twin", "twin"]


# -- queues -------------------------------------------------------------------------------------


async def test_unroutable_names_queue_and_broker(server: RabbitServer, queue: str):
    async with opened(server.url) as broker, raw(server) as other:
        await broker.publish(queue, messages(1))
        await other.queue_delete(queue)
        (lost, *_) = await broker.publish(queue, messages(2))
        assert isinstance(lost.error, BrokerError)
        assert f"queue {queue} does not exist" in str(lost.error)
        assert f"127.0.0.1:{server.port}" in str(lost.error)
        (again,) = await broker.publish(queue, messages(1))
        assert again.ok, "the queue is declared again"


async def test_a_queue_deleted_while_it_is_read(server: RabbitServer, queue: str):
    async with opened(server.url) as broker, raw(server) as other:
        await broker.publish(queue, messages(3))
        source = await source_of(broker, queue)
        held = await receive(source, 1)
        await other.queue_delete(queue)
        await asyncio.sleep(0.2)
        await ack(source, held)
        assert not await source.receive(limit=1, wait=0.5)
        (sent,) = await broker.publish(queue, messages(1))
        if not sent.ok:
            await broker.publish(queue, messages(1))
        assert len(await receive(source, 1)) == 1


async def test_other_arguments_are_used_and_reported(server: RabbitServer, queue: str):
    async with opened(server.url) as broker, raw(server) as other:
        await other.queue_declare(queue, durable=True, arguments={"x-queue-type": "classic"})
        await other.queue_declare(f"{queue}-loose", durable=False)
        for name in (queue, f"{queue}-loose"):
            assert all(each.ok for each in await broker.publish(name, messages(2)))
            assert len(await receive(await source_of(broker, name), 2)) == 2
        found = {each.name: each for each in await RabbitBroker(server.url).examine([queue])}
        assert found[f"rabbitmq {queue}"].finding is Finding.WARNING
        assert "x-queue-type" in found[f"rabbitmq {queue}"].detail
        found = {each.name: each for each in await broker.examine()}
        assert "not durable" in found[f"rabbitmq {queue}-loose"].detail
        old = server.version < "4"
        assert found["rabbitmq"].finding is (Finding.WARNING if old else Finding.OK)


async def test_a_user_who_may_declare_nothing(server: RabbitServer, queue: str):
    server.api("PUT", "users/reader", {"password": "pw", "tags": ""})
    server.api("PUT", "permissions/%2F/reader", {"configure": "^$", "write": ".*", "read": ".*"})
    async with opened(f"amqp://reader:pw@127.0.0.1:{server.port}/") as broker:
        (lost,) = await broker.publish(queue, messages(1))
        assert "does not exist" in str(lost.error)
        with pytest.raises(BrokerError, match=queue):
            await (await source_of(broker, queue)).receive(limit=1, wait=0.1)
        async with raw(server) as other:
            await other.queue_declare(queue, durable=True)
        (kept,) = await broker.publish(queue, messages(1))
        assert kept.ok
        assert len(await receive(await source_of(broker, queue), 1)) == 1


async def test_pause_hands_back_and_keeps_the_order(server: RabbitServer, queue: str):
    async with opened(server.url) as first:
        await first.publish(queue, messages(50))
        mine = await source_of(first, queue)
        head = await receive(mine, 10)
        await ack(mine, head)
        await mine.pause()
        second = RabbitBroker(server.url)
        await second.open()
        theirs = await receive(await source_of(second, queue), 40)
        await second.close()
        assert [int(each.body) for each in theirs] == list(range(10, 50))


async def test_a_priority_that_is_deleted_while_another_is_read(server: RabbitServer, queue: str):
    """Its consumer is cancelled, and the channel of all stays open."""
    async with opened(server.url) as broker, raw(server) as other:
        await broker.publish(queue, messages(3))
        source = await source_of(broker, queue)
        held = await receive(source, 1)
        await other.queue_delete(f"{queue}:p3")
        again = await receive(source, 3)
        await ack(source, held)
        await ack(source, again)
        assert sorted(each.body for each in again) == [b"0", b"1", b"2"]


async def test_many_returns_lose_nothing(server: RabbitServer, queue: str):
    """Since 4.0 a server drops a message after 20 returns, unless its queue says otherwise."""
    async with opened(server.url) as broker:
        await broker.publish(queue, messages(1))
        source = await source_of(broker, queue)
        for _ in range(30):
            (held,) = await receive(source, 1)
            await source.settle([Settlement(delivery=held, verb=Verb.RELEASE)])
        for _ in range(25):
            source = await source_of(broker, queue)
            await receive(source, 1)
            await broker.close()
            await broker.open()
        assert len(await receive(await source_of(broker, queue), 1)) == 1


# -- connections --------------------------------------------------------------------------------


async def test_only_what_is_settled_is_gone(server: RabbitServer, queue: str):
    """An acknowledgement takes neither an older message along, nor one of a later channel that has
    the same number."""
    async with opened(server.url) as broker:
        await broker.publish(queue, messages(4))
        source = await source_of(broker, queue)
        before = await receive(source, 4)
        await ack(source, [before[0], before[2]])
        channel = source._channel
        assert channel is not None
        async with asyncio.timeout(10):
            await channel.channel.close()
        again = await receive(source, 2)
        assert {each.body for each in again} == {b"1", b"3"}
        assert {each.tag[1] for each in again} <= {each.tag[1] for each in before}
        await ack(source, before)
    async with opened(server.url) as broker:
        left = await receive(await source_of(broker, queue), 2)
    assert {each.body for each in left} == {b"1", b"3"}


async def test_connections_closed_under_load(server: RabbitServer, queue: str):
    """Every 200 ms for 4 s: all accepted messages come, and nothing is left behind."""
    accepted: set[bytes] = set()
    came: set[bytes] = set()
    async with opened(server.url) as broker:
        source = await source_of(broker, queue)
        busy = True

        async def send() -> None:
            n = 0
            while busy:
                out = Outgoing(id=new_id(), body=b"%d" % n)
                try:
                    (result,) = await broker.publish(queue, [out])
                except BrokerError:
                    await asyncio.sleep(0.01)
                    continue
                if result.ok:
                    accepted.add(out.body)
                    n += 1

        async def read() -> None:
            while busy or not accepted <= came:
                try:
                    batch = list(await source.receive(limit=50, wait=0.5))
                    came.update(each.body for each in batch)
                    await ack(source, batch)
                except BrokerError:
                    await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(send()), asyncio.create_task(read())]
        for _ in range(20):
            await asyncio.sleep(0.2)
            await asyncio.to_thread(server.close_all_connections)
        busy = False
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert len(accepted) > 20
    assert accepted <= came


async def test_a_server_that_stands_still(server: RabbitServer, queue: str):
    async with opened(f"{server.url}?timeout_s=1") as broker:
        await broker.publish(queue, messages(3))
        source = await source_of(broker, queue)
        held = await receive(source, 1)
        broker.publish_within_s = 1.0
        server.pause()
        try:
            began = time.monotonic()
            with pytest.raises(PublishUnknown):
                await broker.publish(queue, messages(1))
            assert time.monotonic() - began < 4
            with pytest.raises(BrokerUnavailable):
                await broker.publish(queue, messages(1))
            await ack(source, held)
            health = await broker.health()
            assert not health.ok
        finally:
            server.go_on()
        assert len(await receive(source, 2)) == 2
        assert (await broker.publish(queue, messages(1)))[0].ok


async def test_a_queue_that_stands_still_stops_no_other(server: RabbitServer, queue: str):
    """As one without a majority of its replicas."""
    async with opened(f"{server.url}?timeout_s=1") as broker:
        still, lively = await source_of(broker, f"{queue}-still"), await source_of(broker, queue)
        for name, source in ((f"{queue}-still", still), (queue, lively)):
            await broker.publish(name, messages(2))
            assert len(await receive(source, 1)) == 1
        process = f'list_to_existing_atom("%2F_{queue}-still")'
        await asyncio.to_thread(server.ctl, "eval", f"sys:suspend({process}).")
        try:
            before = lively._channel
            for _ in range(2):
                with pytest.raises(PublishUnknown, match="no confirmation"):
                    await broker.publish(f"{queue}-still", messages(1))
                assert (await broker.publish(queue, messages(1)))[0].ok
            held = await receive(lively, 3)
            await ack(lively, held)
            assert lively._channel is before, "its connection was not touched"
        finally:
            await asyncio.to_thread(server.ctl, "eval", f"sys:resume({process}).")
        assert (await broker.publish(f"{queue}-still", messages(1)))[0].ok
        assert len(await receive(still, 3)) == 3


async def test_a_network_that_holds_and_flaps(server: RabbitServer, queue: str):
    with Proxy(server.port) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}/?timeout_s=1"
        async with opened(url) as broker:
            await broker.publish(queue, messages(3))
            source = await source_of(broker, queue)
            assert len(await receive(source, 3)) == 3
            proxy.hold()
            with pytest.raises(BrokerError):
                await broker.publish(queue, messages(1))
            proxy.flap(0.3)
            await asyncio.sleep(2)
            proxy.forward()
            back = await receive(source, 3)
            await ack(source, back)
            assert {each.body for each in back} >= {b"0"}


async def test_a_blocked_connection_is_back_pressure(server: RabbitServer, queue: str):
    async with opened(server.url) as broker:
        broker.publish_within_s = 1.0
        await broker.publish(queue, messages(2))
        source = await source_of(broker, queue)
        await asyncio.to_thread(server.ctl, "set_vm_memory_high_watermark", "0.00001")
        try:
            with pytest.raises(PublishUnknown, match="takes no messages"):
                await broker.publish(queue, [Outgoing(id="late", body=b"late")])
            with pytest.raises(BrokerUnavailable, match="takes no messages"):
                await broker.publish(queue, messages(1))
            assert "takes no messages" in (await broker.health()).detail
            got = await receive(source, 2)  # the other connection reads on
            await ack(source, got)
        finally:
            await asyncio.to_thread(server.ctl, "set_vm_memory_high_watermark", "absolute", "1GB")
        (late,) = await receive(source, 1)
        assert late.body == b"late", "what was written while blocked is stored afterwards"
        async with asyncio.timeout(20):
            while True:
                try:
                    assert (await broker.publish(queue, messages(1)))[0].ok
                    break
                except BrokerUnavailable:
                    await asyncio.sleep(0.1)
        assert (await broker.health()).ok


# -- TLS ----------------------------------------------------------------------------------------


async def test_tls(queue: str):
    with socket.socket() as free, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        authority, other = Authority(Path(folder) / "a"), Authority(Path(folder) / "b")
        certificate, key = authority.sign("server")
        free.close()
        server = RabbitServer(
            NEWEST,
            f"listeners.ssl.default = 127.0.0.1:{port}",
            f"ssl_options.cacertfile = {authority.certificate}",
            f"ssl_options.certfile = {certificate}",
            f"ssl_options.keyfile = {key}",
        )
        try:
            await asyncio.to_thread(server.start)
            url = f"amqps://guest:guest@localhost:{port}/?cafile="
            async with opened(f"{url}{authority.certificate}") as broker:
                await broker.publish(queue, messages(2))
                assert len(await receive(await source_of(broker, queue), 2)) == 2
            with pytest.raises(BrokerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await RabbitBroker(f"{url}{other.certificate}").open()
            with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1"):
                await RabbitBroker(f"amqp://guest:guest@127.0.0.1:{port}/").open()
        finally:
            server.remove()
