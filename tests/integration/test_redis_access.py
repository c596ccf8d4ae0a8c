"""Redis behind TLS, and as a user who may do little: real servers, and clear words for a no."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis.asyncio
from redis import Redis

from ackbone import App, Context, RedisIdempotencyStore
from ackbone.brokers.registry import make_broker
from ackbone.config import Config
from ackbone.core.broker import Examinable
from ackbone.core.errors import BrokerUnavailable, PublishUnknown
from ackbone.core.findings import Finding
from tests.servers.certificates import Authority
from tests.servers.redis import RedisServer

LIMIT_S = 60.0
TASK = {"task_id": "t-1", "tool_name": "search", "payload": "{}", "idempotency_key": "k-1"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


StartTls = Callable[..., str]


@pytest.fixture
def start_tls(authority: Authority, free_port: int) -> Iterator[StartTls]:
    """Starts a Redis behind TLS; returns its address, with the authority that the client trusts."""
    started: list[RedisServer] = []
    certificate, key = authority.sign("server")

    def start(*settings: str) -> str:
        server = RedisServer(
            "--tls-port", str(free_port), "--tls-cert-file", str(certificate),
            "--tls-key-file", str(key), "--tls-ca-cert-file", str(authority.certificate), *settings,
        )  # fmt: skip
        server.start()
        started.append(server)
        return f"rediss://localhost:{free_port}/0?ssl_ca_certs={authority.certificate}"

    yield start
    for server in started:
        server.remove()


async def runs_a_task(home: Path, url: str, plain: Any) -> None:
    """An app on this address runs what a plain client wrote, and tells its result."""
    app = App(Config(home=home, broker=url, default_queue="stream:task"))
    ran: list[str] = []

    @app.on("search")
    async def search(ctx: Context) -> None:
        ran.append(ctx.message.id)

    plain.xadd("stream:task", TASK)
    async with app:
        sent = await app.send("search", {})
    async with asyncio.timeout(LIMIT_S):
        await app.work(until_idle=True)
    assert sorted(ran) == sorted(["t-1", sent.id])
    assert plain.xlen("stream:result") == 2
    assert plain.xlen("stream:task") == 0


async def refusal(url: str) -> str:
    """Why the server cannot be used: what opening raises, and `doctor` says the same."""
    with pytest.raises(BrokerUnavailable) as caught:
        await make_broker(url).open()
    broker = make_broker(url)
    assert isinstance(broker, Examinable)
    (check,) = await broker.examine()
    assert check.finding is Finding.REFUSED
    return f"{caught.value}\n{check.detail}"


# -- TLS ------------------------------------------------------------------------------------------


async def test_a_server_behind_tls(home: Path, start_tls: StartTls):
    url = start_tls("--tls-auth-clients", "no")
    with Redis.from_url(url) as plain:
        await runs_a_task(home, url, plain)


async def test_a_certificate_of_somebody_unknown_is_refused(
    home: Path, start_tls: StartTls, tmp_path: Path
):
    url = start_tls("--tls-auth-clients", "no")
    stranger = Authority(tmp_path, "somebody else")
    told = await refusal(f"{url.partition('?')[0]}?ssl_ca_certs={stranger.certificate}")
    assert told.count("certificate verify failed") == 2
    assert "certificate verify failed" in await refusal(url.partition("?")[0])


async def test_a_server_that_wants_a_certificate_gets_one_or_says_no(
    home: Path, start_tls: StartTls, authority: Authority
):
    url = start_tls("--tls-auth-clients", "yes")
    told = await refusal(url)  # the server's word may get lost when it hangs up
    assert "certificate required" in told or "Connection reset" in told
    certificate, key = authority.sign("client")
    known = f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}"
    with Redis.from_url(known) as plain:
        await runs_a_task(home, known, plain)


async def test_tls_to_a_server_without_it_ends_in_time(home: Path, free_port: int):
    server = RedisServer("--port", str(free_port), "--bind", "127.0.0.1")
    server.start()
    try:
        assert "rediss://localhost" in await refusal(
            f"rediss://localhost:{free_port}/0?timeout_s=2"
        )
    finally:
        server.remove()


async def test_dedup_keys_behind_tls(start_tls: StartTls, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REDIS_URL", start_tls("--tls-auth-clients", "no"))
    keys = RedisIdempotencyStore()
    await keys.set("k", {"n": 1}, 60)
    assert await keys.get("k") == {"n": 1}
    await keys.close()


# -- users ----------------------------------------------------------------------------------------

PASSWORD = "p@ss:w/rd?#[1] %"
RIGHTS = (
    "~stream:*", "~{stream:*", "-@all", "+ping", "+info", "+config|get", "+time", "+exists",
    "+xadd", "+xlen", "+xrange", "+xreadgroup", "+xack", "+xdel", "+xclaim",
    "+xautoclaim", "+xpending", "+xgroup", "+xinfo", "+xtrim", "+eval", "+get", "+set",
    "+pexpire", "+select", "+client",
)  # fmt: skip
"""What docs/guides/redis.md says that a worker's user needs."""


@pytest.fixture
def guarded() -> Iterator[RedisServer]:
    """The default user may do nothing; `worker` may do what a worker needs."""
    server = RedisServer("--user", "worker", "on", f">{PASSWORD}", *RIGHTS)
    server.start()
    yield server
    server.remove()


async def test_a_user_with_the_rights_of_a_worker_and_no_others(home: Path, guarded: RedisServer):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "redis.md"
    assert f"ACL SETUSER worker on >secret {' '.join(RIGHTS)}\n" in guide.read_text()
    url = f"{guarded.url}?username=worker&password={quote(PASSWORD, safe='')}"
    with Redis.from_url(guarded.url) as plain:  # the default user still may do everything
        await runs_a_task(home, url, plain)
        denied = [entry["object"] for entry in plain.acl_log()]
    assert denied == []


async def test_a_user_with_the_rights_of_a_dedup_memory_and_no_others():
    rights = ("~idempotency*", "-@all", "+get", "+set", "+del", "+expire", "+exists", "+eval")
    server = RedisServer("--user", "memory", "on", ">secret", *rights)
    server.start()
    try:
        url = f"{server.url}?username=memory&password=secret"
        async with redis.asyncio.Redis.from_url(url) as client:
            keys = RedisIdempotencyStore(client)
            assert await keys.claim("k", "m-1", 60) is True
            await keys.set("k", 1, 60)
            await keys.release("k", "m-1")
            assert (await keys.exists("k"), await keys.get("k")) == (True, 1)
            assert await keys.health_check() is True
    finally:
        server.remove()


async def test_a_wrong_password_and_a_missing_right_are_told_without_the_password(
    home: Path, guarded: RedisServer
):
    told = await refusal(f"{guarded.url}?username=worker&password=hunter2")
    assert "WRONGPASS" in told or "invalid username-password" in told
    assert "hunter2" not in told
    with Redis.from_url(guarded.url) as plain:
        plain.execute_command("ACL", "SETUSER", "worker", "-xadd")
    url = f"{guarded.url}?username=worker&password={quote(PASSWORD, safe='')}"
    app = App(Config(home=home, broker=url, default_queue="stream:task"))
    async with app:
        with pytest.raises(Exception, match="xadd") as caught:
            await app.send("search", {})
    assert PASSWORD not in str(caught.value)


async def test_a_password_that_was_changed_is_read_again(home: Path, guarded: RedisServer) -> None:
    """The file of the secret says the new one; the connections of the old one are cut."""
    guarded.cli("ACL", "SETUSER", "ada", "on", ">old", "~*", "+@all")
    secret = home / "secret"
    secret.write_text("old\n")
    address = f"{guarded.url}?username=ada&password=${{file:secret}}"
    (home / "ackbone.yaml").write_text(f"home: .\nbroker: {address}\ndefault_queue: stream:task\n")
    app = App(home / "ackbone.yaml")
    async with app, asyncio.timeout(LIMIT_S):
        await app.send("hello", {})
        guarded.cli("ACL", "SETUSER", "ada", "<old", ">new")
        guarded.cli("CLIENT", "KILL", "USER", "ada")
        with pytest.raises(BrokerUnavailable, match="invalid username-password"):
            await _sent(app)
        secret.write_text("new\n")
        await _sent(app)
    assert guarded.cli("XLEN", "stream:task").strip() == "2"


async def _sent(app: App) -> None:
    """A cut connection is noticed by whoever uses it: nothing was sent then."""
    while True:
        try:
            await app.send("hello", {})
            return
        except PublishUnknown:
            continue
