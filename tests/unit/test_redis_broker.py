"""What Redis Streams have of their own: foreign entries, lost groups, full and wrong servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from ackbone.brokers.redis import RedisBroker, server_checks
from ackbone.brokers.redis.server_checks import Seen
from ackbone.brokers.redis.wire import Wire
from ackbone.core.broker import Outgoing, Settlement, Subscription, Verb
from ackbone.core.errors import BrokerError, BrokerUnavailable, ConfigError, InvalidMessage
from ackbone.core.ids import new_id
from ackbone.core.task_protocol import FLAT, ONCE, AckWithNotices, FlatOutgoing
from tests import sources
from tests.servers.redis import RedisServer

SUB = Subscription(name="jobs", queue="jobs")
GROUP = "ackbone"
PATIENCE_S = 30.0


@pytest.fixture
async def broker(server: RedisServer, client: Any) -> AsyncIterator[RedisBroker]:
    broker = RedisBroker(server.url, lease_s=30.0, timeout_s=10.0)
    await broker.open()
    yield broker
    await broker.close()


def out(body: bytes = b"hello", **options: Any) -> Outgoing:
    made = FlatOutgoing if "fields" in options else Outgoing
    return made(id=new_id(), body=body, **options)


async def ack(broker: RedisBroker, *deliveries: Any, sub: Subscription = SUB) -> None:
    await sources.settle(broker, sub, [Settlement(delivery=d, verb=Verb.ACK) for d in deliveries])


async def depth(broker: RedisBroker) -> tuple[int, int]:
    (found,) = await broker.stats(["jobs"])
    return found.ready, found.in_flight


# -- entries of others ----------------------------------------------------------------------------


async def test_an_entry_of_a_plain_client_comes_as_its_fields(broker: RedisBroker, client: Any):
    entry = client.xadd("jobs", {"task_id": "t-1", "payload": '{"n": 1}'})
    (came,) = await sources.receive(broker, SUB, limit=5, wait=PATIENCE_S)
    assert msgspec.json.decode(came.body) == {"task_id": "t-1", "payload": '{"n": 1}'}
    assert came.headers == {FLAT: "1"}
    assert came.identity == f"jobs/{entry.decode()}"
    await ack(broker, came)
    assert client.xlen("jobs") == 0


async def test_bytes_that_are_no_text_are_kept(broker: RedisBroker, client: Any):
    client.xadd("jobs", {"payload": b"\xff\x00"})
    (came,) = await sources.receive(broker, SUB, limit=5, wait=PATIENCE_S)
    assert msgspec.json.decode(came.body) == {"payload": {"base64": "/wA="}}


async def test_a_flat_message_is_fields_to_a_plain_client(broker: RedisBroker, client: Any):
    body = msgspec.json.encode({"task_id": "t-1", "tool_name": "search"})
    (result,) = await broker.publish("jobs", [out(body, headers={FLAT: "1"})])
    assert result.ok
    ((_, fields),) = client.xrange("jobs")
    assert fields == {b"task_id": b"t-1", b"tool_name": b"search"}


@pytest.mark.parametrize("body", [b"[1]", b"{}", b'{"n": 1}', b"\xff"])
async def test_a_flat_message_that_is_no_object_of_texts_is_refused_alone(
    broker: RedisBroker, body: bytes
):
    good, bad = await broker.publish("jobs", [out(), out(body, headers={FLAT: "1"})])
    assert good.ok
    assert isinstance(bad.error, InvalidMessage)


async def test_each_marked_message_of_a_batch_is_an_entry_of_its_own_fields(
    broker: RedisBroker, client: Any
):
    batch = [
        {"task_id": "1", "status": "succeeded", "result": "null"},
        {"task_id": "2", "status": "succeeded", "result": "null"},
        {"task_id": "3", "status": "failed", "result": "null"},
        {"task_id": "4", "status": "failed", "why": "other names"},
        {"task_id": "5", "status": "failed", "result": "null", "tenant_id": "longer"},
        {"task_id": "6", "status": "succeeded", "result": "null"},
        {"task_id": "6", "status": "succeeded", "result": "null"},
    ]
    marked = [
        out(msgspec.json.encode(fields), headers={FLAT: "1", ONCE: f"mark {n}"}, fields=fields)
        for n, fields in enumerate(batch)
    ]
    await broker.publish("results", [marked[1]])
    await broker.publish("results", marked)
    found = [
        {name.decode(): value.decode() for name, value in fields.items()}
        for _, fields in client.xrange("results")
    ]
    assert found == [batch[1], batch[0], *batch[2:]]


async def test_what_was_sent_before_any_reader_is_read(broker: RedisBroker, client: Any):
    await broker.publish("jobs", [out(b"early")])
    (came,) = await sources.receive(broker, SUB, limit=5, wait=PATIENCE_S)
    assert came.body == b"early"


# -- priorities -----------------------------------------------------------------------------------


async def test_each_priority_has_a_stream_in_the_slot_of_its_queue(
    broker: RedisBroker, client: Any
):
    await broker.publish("jobs", [out(priority=level) for level in (0, 1, 2, 3)])
    assert sorted(client.keys()) == [b"jobs", b"{jobs}:p0", b"{jobs}:p2", b"{jobs}:p3"]


# -- other groups ---------------------------------------------------------------------------------


async def test_acknowledged_entries_go_unless_another_group_reads_them(
    broker: RedisBroker, client: Any
):
    await broker.publish("jobs", [out(), out()])
    first, second = await sources.receive(broker, SUB, limit=2, wait=PATIENCE_S)
    await ack(broker, first)
    assert client.xlen("jobs") == 1
    client.xgroup_create("jobs", "others", "0")
    await ack(broker, second)
    assert client.xlen("jobs") == 1


@pytest.mark.parametrize(("setting", "left"), [("never", 1), ("always", 0)])
async def test_delete_acked_is_obeyed(server: RedisServer, client: Any, setting: str, left: int):
    broker = RedisBroker(server.url, delete_acked=setting)
    await broker.open()
    await broker.publish("jobs", [out()])
    client.xgroup_create("jobs", "others", "0")
    await ack(broker, *await sources.receive(broker, SUB, limit=1, wait=PATIENCE_S))
    await broker.close()
    assert client.xlen("jobs") == left


async def test_a_closed_broker_leaves_no_consumer_and_nothing_in_its_hands(
    server: RedisServer, client: Any
):
    broker = RedisBroker(server.url)
    await broker.open()
    await broker.publish("jobs", [out(b"held"), out(b"done")])
    held, done = await sources.receive(broker, SUB, limit=2, wait=PATIENCE_S)
    await ack(broker, done)
    await broker.close()
    names = [found["name"] for found in client.xinfo_consumers("jobs", "ackbone")]
    assert names == [b"_released"]
    (pending,) = client.xpending_range("jobs", "ackbone", "-", "+", 10)
    assert pending["message_id"] == held.tag[1]


async def test_a_late_release_takes_nothing_from_who_has_it_now(
    server: RedisServer, broker: RedisBroker
):
    await broker.publish("jobs", [out()])
    (old,) = await sources.receive(broker, SUB, limit=1, wait=PATIENCE_S)
    other = RedisBroker(server.url, lease_s=0.01)
    await other.open()
    (taken,) = await sources.receive(other, SUB, limit=1, wait=PATIENCE_S)
    assert taken.count == 2
    await (await other.subscribe(SUB, room=1)).extend([taken])
    await sources.settle(broker, SUB, [Settlement(delivery=old, verb=Verb.RELEASE)])
    assert await sources.receive(broker, SUB, limit=1, wait=0.2) == []
    await other.close()


async def test_a_late_sign_of_life_takes_nothing_from_who_has_it_now(
    server: RedisServer, broker: RedisBroker, client: Any
):
    await broker.publish("jobs", [out()])
    (old,) = await sources.receive(broker, SUB, limit=1, wait=PATIENCE_S)
    other = RedisBroker(server.url, lease_s=0.01)
    await other.open()
    await sources.receive(other, SUB, limit=1, wait=PATIENCE_S)
    (before,) = client.xpending_range("jobs", "ackbone", "-", "+", 10)
    await (await broker.subscribe(SUB, room=1)).extend([old])
    (after,) = client.xpending_range("jobs", "ackbone", "-", "+", 10)
    assert after["consumer"] == before["consumer"]
    await other.close()


async def test_the_entries_of_a_reader_that_ended_are_taken_before_their_lease_is_over(
    server: RedisServer, broker: RedisBroker, client: Any
):
    ended, living = [RedisBroker(server.url, lease_s=30.0) for _ in range(2)]
    names = [ended.name_consumer("ended"), living.name_consumer("living")]
    await broker.publish("jobs", [out(b"of the ended"), out(b"of the living")])
    for other in (ended, living):
        await other.open()
        await sources.receive(other, SUB, limit=1, wait=PATIENCE_S)
    assert await sources.receive(broker, SUB, limit=2, wait=0.01) == []
    assert set((await broker.subscribe(SUB, room=1)).holders) == set(names)
    (await broker.subscribe(SUB, room=1)).take_from([names[0]])
    (taken,) = await sources.receive(broker, SUB, limit=2, wait=PATIENCE_S)
    assert (taken.body, taken.count, taken.taken_from) == (b"of the ended", 2, names[0])
    (await broker.subscribe(SUB, room=1)).take_from([])
    assert await sources.receive(broker, SUB, limit=2, wait=0.2) == []
    by_name = {found["name"]: found["pending"] for found in client.xinfo_consumers("jobs", GROUP)}
    assert by_name[names[1].encode()] == 1, "the reader that lives keeps its entry"
    for other in (ended, living):
        await other.close()


async def test_consumers_of_processes_that_are_gone_are_removed_once_they_hold_nothing(
    server: RedisServer, client: Any
):
    client.xgroup_create("jobs", "ackbone", "0", mkstream=True)
    for name in ("ackbone-gone", "ackbone-busy", "stranger"):
        client.xgroup_createconsumer("jobs", "ackbone", name)
    client.xadd("jobs", {"n": 1})
    client.xreadgroup("ackbone", "ackbone-busy", {"jobs": ">"})

    async def look(lease_s: float) -> set[bytes]:
        broker = RedisBroker(server.url, lease_s=lease_s)
        await broker.open()
        await sources.receive(broker, SUB, limit=1, wait=0.01)
        names = {found["name"] for found in client.xinfo_consumers("jobs", "ackbone")}
        await broker.close()
        return names

    everyone = {b"ackbone-gone", b"ackbone-busy", b"stranger"}
    assert everyone <= await look(600.0), "all were heard of within the last ten minutes"
    names = await look(0.001)
    assert b"stranger" in names
    assert b"ackbone-gone" not in names
    ((_, pending),) = [
        (found["consumer"], found["message_id"])
        for found in client.xpending_range("jobs", "ackbone", "-", "+", 10)
    ]
    assert pending, "what it held is taken over, not deleted with it"


# -- servers that are not as they should be -------------------------------------------------------


async def test_a_group_that_was_removed_is_made_again(broker: RedisBroker, client: Any):
    await broker.publish("jobs", [out(b"one")])
    await ack(broker, *await sources.receive(broker, SUB, limit=1, wait=PATIENCE_S))
    waiting = asyncio.create_task(sources.receive(broker, SUB, limit=1, wait=PATIENCE_S))
    await asyncio.sleep(0)
    client.flushall()
    await broker.publish("jobs", [out(b"two")])
    (came,) = await waiting
    assert came.body == b"two"
    await ack(broker, came)


async def test_a_key_of_another_kind_is_an_error_and_other_queues_go_on(
    broker: RedisBroker, client: Any
):
    client.set("jobs", "not a stream")
    (refused,) = await broker.publish("jobs", [out()])
    assert "WRONGTYPE" in str(refused.error)
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await sources.receive(broker, SUB, limit=1, wait=0.1)
    other = Subscription(name="other", queue="other")
    await broker.publish("other", [out(b"fine")])
    (came,) = await sources.receive(broker, other, limit=1, wait=PATIENCE_S)
    assert came.body == b"fine"


async def test_what_another_worker_acknowledged_does_not_wait(broker: RedisBroker, client: Any):
    """The server gives no `lag` here, as none before 7.0 does: unread entries are counted."""
    await broker.publish("jobs", [out() for _ in range(5)])
    assert await depth(broker) == (5, 0)
    entries = [entry for entry, _ in client.xrange("jobs")]
    client.xgroup_create("jobs", SUB.group, entries[1])  # in the middle: no lag from here on
    assert client.xinfo_groups("jobs")[0].get("lag") is None
    for left in (2, 1):
        ((_, [(entry, _)]),) = client.xreadgroup(SUB.group, "stranger", {"jobs": ">"}, count=1)
        assert await depth(broker) == (left, 1)
        client.xack("jobs", SUB.group, entry)
        assert await depth(broker) == (left, 0)
    client.xreadgroup(SUB.group, "stranger", {"jobs": ">"})
    client.xack("jobs", SUB.group, *entries)
    assert await depth(broker) == (0, 0)
    assert client.xlen("jobs") == 5


async def test_more_than_is_counted_is_what_the_length_says(
    broker: RedisBroker, client: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ackbone.brokers.redis.streams.COUNTED", 3)
    await broker.publish("jobs", [out() for _ in range(6)])
    client.xgroup_create("jobs", SUB.group, client.xrange("jobs")[1][0])
    assert await depth(broker) == (6, 0)


@pytest.mark.parametrize(
    ("version", "command"),
    [((5, 0), "xclaim"), ((6, 0), "xclaim"), (None, "xclaim"), ((6, 2), "xautoclaim")],
)
async def test_the_servers_version_decides_how_stale_entries_are_taken(
    server: RedisServer,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int] | None,
    command: str,
):
    async def look(wire: Wire) -> Seen:
        return msgspec.structs.replace(await server_checks.look(wire), version=version)

    monkeypatch.setattr("ackbone.brokers.redis.broker.look", look)
    client.xadd("jobs", {"n": 1})
    client.xgroup_create("jobs", SUB.group, "0")
    client.xreadgroup(SUB.group, "stranger", {"jobs": ">"})
    client.config_resetstat()
    broker = RedisBroker(server.url, lease_s=0.001)
    await broker.open()
    (came,) = await sources.receive(broker, SUB, limit=5, wait=PATIENCE_S)
    assert came.taken_from == "stranger"
    used = client.info("commandstats")
    assert [each for each in ("xclaim", "xautoclaim") if f"cmdstat_{each}" in used] == [command]
    await broker.close()


async def test_a_full_server_refuses_and_loses_nothing(broker: RedisBroker, client: Any):
    await broker.publish("jobs", [out(b"before")])
    client.config_set("maxmemory", 1)
    (refused,) = await broker.publish("jobs", [out(b"too much")])
    assert isinstance(refused.error, BrokerUnavailable)
    assert "Redis is full" in str(refused.error)
    client.config_set("maxmemory", 0)
    (accepted,) = await broker.publish("jobs", [out(b"after")])
    assert accepted.ok
    came = await sources.receive(broker, SUB, limit=5, wait=PATIENCE_S)
    assert [delivery.body for delivery in came] == [b"before", b"after"]


async def test_a_full_server_can_be_emptied_by_a_worker_that_starts_then(
    server: RedisServer, broker: RedisBroker, client: Any
):
    await broker.publish("jobs", [out(b"one"), out(b"two")])
    await ack(broker, *await sources.receive(broker, SUB, limit=1, wait=PATIENCE_S))
    client.config_set("maxmemory", 1)
    late = RedisBroker(server.url)
    await late.open()
    (came,) = await sources.receive(late, SUB, limit=5, wait=PATIENCE_S)
    assert came.body == b"two"
    await ack(late, came)
    assert client.xlen("jobs") == 0
    client.config_set("maxmemory", 0)
    await late.close()


async def test_however_many_results_a_full_server_owes_it_hears_of_all(
    broker: RedisBroker, client: Any
):
    many = 8500  # more than Lua unpacks
    for _ in range(0, many, 500):
        await broker.publish("jobs", [out() for _ in range(500)])
    came: list[Any] = []
    while len(came) < many:
        came += await sources.receive(broker, SUB, limit=1000, wait=PATIENCE_S)

    def done(n: int) -> Settlement:
        headers, fields = {FLAT: "1", ONCE: f"t-{n}"}, {"task_id": f"t-{n}", "status": "succeeded"}
        told = FlatOutgoing(id=f"t-{n}", body=b"", headers=headers, fields=fields)
        return AckWithNotices(delivery=came[n], verb=Verb.ACK, notices=(("told", told),))

    client.config_set("maxmemory", 1)
    await sources.settle(broker, SUB, [done(n) for n in range(many)])
    assert (client.xlen("told"), client.xlen("jobs")) == (0, many)
    client.config_set("maxmemory", 0)
    assert await sources.receive(broker, SUB, limit=1, wait=0) == []
    assert (client.xlen("told"), client.xlen("jobs")) == (many, 0)


async def test_what_a_server_without_its_replicas_owes_it_hears_once_they_are_back(
    broker: RedisBroker, client: Any
):
    await broker.publish("jobs", [out()])
    (came,) = await sources.receive(broker, SUB, limit=1, wait=PATIENCE_S)
    client.config_set("min-replicas-to-write", 1)
    try:
        (refused,) = await broker.publish("jobs", [out()])
        assert isinstance(refused.error, BrokerUnavailable)
        with pytest.raises(BrokerUnavailable, match="NOREPLICAS"):
            await ack(broker, came)
    finally:
        client.config_set("min-replicas-to-write", 0)
    assert await sources.receive(broker, SUB, limit=1, wait=0) == []
    assert client.xlen("jobs") == 0, "and not only when the lease is over"


async def test_a_replica_that_takes_no_writes_says_so(broker: RedisBroker, client: Any):
    client.replicaof("127.0.0.1", 1)
    try:
        (refused,) = await broker.publish("jobs", [out()])
    finally:
        client.replicaof("no", "one")
    assert isinstance(refused.error, BrokerUnavailable)
    assert "takes no writes" in str(refused.error)


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("-OOM command not allowed when used memory > 'maxmemory'.", BrokerUnavailable, "is full"),
        ("-READONLY You can't write against a replica.", BrokerUnavailable, "takes no writes"),
        ("-WRONGTYPE Operation against a key", BrokerError, ": WRONGTYPE Operation"),
        ("something else", BrokerError, "something else"),
    ],
)
async def test_a_script_that_failed_on_an_old_server_is_understood(
    broker: RedisBroker, said: str, kind: type[Exception], words: str
):
    """Before 7.0 the error of a command stands inside that of its script."""
    text = f"ERR Error running script (call to f_0): @user_script:6: @user_script: 6: {said}"
    with pytest.raises(kind, match=words):
        await broker.wire.ask_one("EVAL", "return redis.error_reply(ARGV[1])", 0, text)


async def test_a_delay_is_refused_here(broker: RedisBroker):
    (refused,) = await broker.publish("jobs", [out(delay_s=5)])
    assert isinstance(refused.error, InvalidMessage)


async def test_a_server_that_is_not_there_is_named_without_its_password():
    broker = RedisBroker("redis://user:hunter2@127.0.0.1:1/0", timeout_s=5)
    with pytest.raises(BrokerUnavailable, match=r"redis://127\.0\.0\.1:1/0") as caught:
        await broker.open()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "query",
    ["visibility_timeout_s=soon", "visibility_timeout_s=0", "timeout_s=-1", "delete_acked=perhaps"],
)
def test_a_wrong_parameter_is_a_configuration_error(query: str):
    with pytest.raises(ConfigError):
        RedisBroker.from_url(f"redis://localhost/0?{query}", clock=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("scan", [False, True], ids=["XTRIM", "XDEL"])
async def test_what_is_old_is_cut_but_nothing_that_a_group_needs(
    server: RedisServer, client: Any, scan: bool
) -> None:
    broker = RedisBroker(server.url, scan=scan)
    await broker.open()
    try:
        assert await broker.trim("told", older_than_s=60) == 0, "there is no such stream"
        old = [client.xadd("told", {"n": n}, id=f"{1000 + n}-0") for n in range(1200)]
        young = client.xadd("told", {"n": "young"})
        client.xgroup_create("told", "reader", id=old[799])
        client.xreadgroup("reader", "me", {"told": ">"}, count=100)  # 800 to 899 are pending
        client.xack("told", "reader", *old[800:850])
        assert await broker.trim("told", older_than_s=60) == 850
        assert client.xrange("told", count=1)[0][0] == old[850]
        client.xack("told", "reader", *old[850:900])
        assert await broker.trim("told", older_than_s=60) == 50
        client.xgroup_setid("told", "reader", young)
        assert await broker.trim("told", older_than_s=60) == 300
        assert [entry for entry, _ in client.xrange("told")] == [young]
    finally:
        await broker.close()
