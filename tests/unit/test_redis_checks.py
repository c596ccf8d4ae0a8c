"""Would this Redis lose messages? Asked of real servers with the settings in question."""

import asyncio
import logging
from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from ackbone.brokers.redis import RedisBroker
from ackbone.brokers.redis.server_checks import Seen, durability, judge, seen_in
from ackbone.brokers.registry import make_broker
from ackbone.core.broker import Durability, Examinable, Outgoing, Subscription
from ackbone.core.errors import BrokerUnavailable
from ackbone.core.findings import Check, Finding
from tests import sources
from tests.servers.redis import RedisServer

OK, WARNING, REFUSED = Finding.OK, Finding.WARNING, Finding.REFUSED
Start = Callable[..., RedisServer]
WITHOUT_CONFIG = ("--user", "default", "on", "nopass", "~*", "&*", "+@all", "-config")
SOUND = Seen(
    version=(7, 0), role="master", log=True, sync="always", sync_pauses=False, limit=0,
    policy="noeviction",
)  # fmt: skip


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Redis with these settings."""
    started: list[RedisServer] = []

    def server(*settings: str) -> RedisServer:
        started.append(RedisServer(*settings))
        started[-1].start()
        return started[-1]

    yield server
    for each in started:
        each.remove()


def examined(server: RedisServer, more: str = "") -> dict[str, Check]:
    broker = make_broker(server.url + more)
    assert isinstance(broker, Examinable)
    return {check.name: check for check in asyncio.run(broker.examine())}


def opened(server: RedisServer, more: str = "") -> Durability:
    """What the broker says of itself once it is open."""

    async def look() -> Durability:
        broker = make_broker(server.url + more)
        assert broker.capabilities.durability is Durability.PROCESS  # nobody was asked yet
        await broker.open()
        try:
            return broker.capabilities.durability
        finally:
            await broker.close()

    return asyncio.run(look())


# ── real servers ─────────────────────────────────────────────────────────────────────────────────


def test_a_log_that_is_synced_always_is_sound(start: Start) -> None:
    server = start("--appendfsync", "always")
    found = examined(server)
    assert {check.finding for check in found.values()} == {OK}, found
    assert server.url in found["redis"].detail
    assert opened(server) is Durability.FSYNC


def test_a_log_that_is_synced_each_second_is_told(start: Start) -> None:
    server = start("--appendfsync", "everysec")
    found = examined(server)
    assert [name for name, check in found.items() if check.finding is not OK] == ["redis log"]
    assert found["redis log"].finding is WARNING
    assert "about the last second" in found["redis log"].detail
    assert "'process'" in found["redis log"].detail
    assert opened(server) is Durability.PROCESS


def test_a_log_that_is_not_synced_while_it_is_rewritten_is_not_called_fsync(start: Start) -> None:
    server = start("--appendfsync", "always", "--no-appendfsync-on-rewrite", "yes")
    assert examined(server)["redis log"].finding is WARNING
    assert opened(server) is Durability.PROCESS


def test_a_server_without_a_log_is_refused(start: Start) -> None:
    server = start("--appendonly", "no")
    found = examined(server)["redis log"]
    assert found.finding is REFUSED
    assert "appendonly no" in found.detail
    assert "appendonly yes" in (found.hint or "")
    assert opened(server) is Durability.NONE


@pytest.mark.parametrize(
    ("policy", "limit", "said"),
    [
        ("allkeys-lru", "100mb", "at 100 MB it deletes whole queues"),
        ("allkeys-random", "0", "once maxmemory is set, a full server would delete whole queues"),
        ("volatile-ttl", "100mb", "at 100 MB it deletes keys with a time to live"),
    ],
)
def test_a_server_that_throws_keys_away_is_refused(
    start: Start, policy: str, limit: str, said: str
) -> None:
    server = start("--maxmemory-policy", policy, "--maxmemory", limit)
    found = examined(server)["redis memory"]
    assert found.finding is REFUSED
    assert said in found.detail
    assert policy in found.detail
    assert opened(server) is Durability.PROCESS


def test_a_limit_without_eviction_is_fine(start: Start) -> None:
    found = examined(start("--maxmemory", "64mb"))["redis memory"]
    assert found.finding is OK
    assert "64 MB" in found.detail


@pytest.mark.parametrize("read_only", ["yes", "no"])
def test_a_replica_is_refused_whether_it_takes_writes_or_not(start: Start, read_only: str) -> None:
    server = start("--replicaof", "127.0.0.1", "1", "--replica-read-only", read_only)
    found = examined(server, "?allow_unsafe=1")["redis role"]
    assert found.finding is REFUSED
    assert "primary" in (found.hint or "")


def test_what_is_unsafe_can_be_allowed_and_is_still_said(start: Start) -> None:
    server = start("--appendonly", "no", "--maxmemory-policy", "allkeys-lru")
    refused = examined(server)
    allowed = examined(server, "?allow_unsafe=1")
    for name in ("redis log", "redis memory"):
        assert refused[name].finding is REFUSED
        assert "allow_unsafe=1" in (refused[name].hint or "")
        assert allowed[name].finding is WARNING
        assert allowed[name].detail == f"allow_unsafe is set: {refused[name].detail}"
        assert "allow_unsafe" not in (allowed[name].hint or "")
    assert opened(server, "?allow_unsafe=1") is Durability.NONE  # allowed, not made better


def test_where_config_is_not_permitted_info_is_read_and_the_rest_named(start: Start) -> None:
    server = start(*WITHOUT_CONFIG)
    found = examined(server)
    assert found["redis config"].finding is WARNING
    assert found["redis config"].detail.endswith("not seen: appendfsync, no-appendfsync-on-rewrite")
    assert found["redis memory"].finding is OK
    assert "does not say how often" in found["redis log"].detail
    assert found["redis log"].finding is WARNING
    assert opened(server) is Durability.PROCESS


def test_config_not_permitted_hides_no_missing_log(start: Start) -> None:
    server = start(*WITHOUT_CONFIG, "--appendonly", "no")
    assert examined(server)["redis log"].finding is REFUSED
    assert opened(server) is Durability.NONE


async def test_a_server_that_tells_nothing_can_be_used_and_is_not_trusted(start: Start) -> None:
    server = start(*WITHOUT_CONFIG, "-info")
    broker = make_broker(server.url)
    assert isinstance(broker, RedisBroker)
    found = {check.name: check.finding for check in await broker.examine()}
    assert found == {
        "redis": WARNING, "redis role": WARNING, "redis log": REFUSED, "redis memory": WARNING,
        "redis config": WARNING,
    }  # fmt: skip
    await broker.open()
    try:
        assert broker.capabilities.durability is Durability.NONE
        (result,) = await broker.publish("q", [Outgoing(id="a", body=b"x")])
        assert result.ok
        sub = Subscription(name="q", queue="q")
        assert [each.body for each in await sources.receive(broker, sub, limit=1, wait=30)] == [
            b"x"
        ]
    finally:
        await broker.close()


def test_a_server_that_does_not_answer_is_refused_without_its_password(start: Start) -> None:
    server = start()
    with Redis.from_url(server.url) as client:
        client.config_set("requirepass", "right-0ne")
    wrong = examined(server, "?password=hunter2&timeout_s=2")
    server.pause()
    try:
        hung = examined(server, "?password=hunter2&timeout_s=0.3")
    finally:
        server.go_on()
    server.kill()
    gone = examined(server, "?password=hunter2")
    for found in (wrong, hung, gone):
        assert list(found) == ["redis"]
        assert found["redis"].finding is REFUSED
        assert server.url in found["redis"].detail
        assert "hunter2" not in repr(found)
    assert "within 0.3 s" in hung["redis"].detail
    with pytest.raises(BrokerUnavailable):
        opened(server)


def test_a_process_warns_once_of_a_server_that_loses_messages(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start("--appendonly", "no")
    sound = start()
    for url in (server.url, server.url, sound.url, f"{sound.url}?allow_unsafe=1"):
        asyncio.run(_open_and_close(url))
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert server.url in warning.getMessage()
    assert "appendonly no" in warning.getMessage()
    assert "ackbone doctor" in warning.getMessage()


async def _open_and_close(url: str) -> None:
    broker = make_broker(url)
    await broker.open()
    await broker.close()


# ── answers that no server here gives ────────────────────────────────────────────────────────────


def test_a_server_without_streams_is_refused_and_cannot_be_allowed() -> None:
    old = seen_in(b"# Server\r\nredis_version:4.0.14\r\nrole:master\r\n", {"appendonly": "yes"})
    assert old.version == (4, 0)
    check = judge(old, "redis://h", allow_unsafe=True)[0]
    assert check.finding is REFUSED
    assert "4.0" in check.detail
    five = seen_in(b"redis_version:5.0.3\r\n", {})
    assert judge(five, "redis://h")[0].finding is OK


@pytest.mark.parametrize("info", [b"", b"redis_version:\r\nmaxmemory:\r\n", b"\xff\xfe:\xff", b":"])
def test_an_answer_that_says_nothing_is_no_yes(info: bytes) -> None:
    seen = seen_in(info, {})
    assert seen == Seen()
    assert durability(seen) is Durability.NONE
    assert OK not in {check.finding for check in judge(seen, "redis://h")}


def test_a_sync_that_the_kernel_decides_about_takes_more() -> None:
    seen = seen_in(b"role:master", {"appendonly": "yes", "appendfsync": "no"})
    assert durability(seen) is Durability.PROCESS
    log = next(check for check in judge(seen, "redis://h") if check.name == "redis log")
    assert "half a minute" in log.detail


def test_the_sound_one_is_sound() -> None:
    assert {check.finding for check in judge(SOUND, "redis://h")} == {OK}
