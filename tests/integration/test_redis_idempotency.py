"""`RedisIdempotencyStore` on a real server: as others know it, atomic, and never in the way."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from ackbone import ConfigError, IdempotencyStore, RedisIdempotencyStore
from ackbone.core.events import FINAL_EVENTS, Entry
from tests.integration.test_queue_trigger import Kit, raw
from tests.servers.redis import RedisServer

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


@pytest.fixture(params=[False, True], ids=["bytes", "decoded"])
async def keys(
    request: pytest.FixtureRequest, server: RedisServer, client: Any
) -> AsyncIterator[RedisIdempotencyStore]:
    """On a client of the user's, which may be told to decode what it reads."""
    async with Redis.from_url(server.url, decode_responses=request.param) as theirs:
        yield RedisIdempotencyStore(theirs)


# -- as others know it ----------------------------------------------------------------------------


async def test_a_result_is_json_that_expires_under_the_agreed_key(
    keys: RedisIdempotencyStore, client: Any
):
    assert await keys.exists("order-1") is False
    assert await keys.get("order-1") is None
    await keys.set("order-1", {"run_id": "r-1", "n": [1, "ä"]}, ttl=3600)
    assert await keys.exists("order-1") is True
    assert await keys.get("order-1") == {"run_id": "r-1", "n": [1, "ä"]}
    assert json.loads(client.get("idempotency:order-1")) == {"run_id": "r-1", "n": [1, "ä"]}
    assert 3590 < client.ttl("idempotency:order-1") <= 3600
    client.set("idempotency:theirs", json.dumps({"by": "somebody else"}), ex=60)
    assert await keys.get("theirs") == {"by": "somebody else"}
    assert isinstance(keys, IdempotencyStore)


async def test_nothing_as_a_result_is_a_result(keys: RedisIdempotencyStore):
    await keys.set("k", None, ttl=60)
    assert await keys.exists("k") is True
    assert await keys.get("k") is None


async def test_of_many_that_claim_at_once_one_wins(keys: RedisIdempotencyStore, client: Any):
    answers = await asyncio.gather(*(keys.claim("k", f"m-{n}", 60) for n in range(50)))
    (winner,) = [n for n, won in enumerate(answers) if won]
    assert await keys.claim("k", f"m-{winner}", 60) is True, "it is the owner's already"
    assert await keys.exists("k") is False, "a claim is no result"
    assert client.exists("idempotency:k") == 0, "nor is it one to others"
    await keys.release("k", "m-none")
    assert await keys.claim("k", "m-none", 60) is False
    await keys.release("k", f"m-{winner}")
    assert await keys.claim("k", "m-none", 60) is True


async def test_what_others_recorded_cannot_be_claimed(keys: RedisIdempotencyStore, client: Any):
    client.set("idempotency:k", "1", ex=60)
    assert await keys.claim("k", "mine", 60) is False
    assert client.exists("idempotency-claim:k") == 0
    await keys.claim("mine", "m-1", 60)
    await keys.set("mine", 1, 600)
    assert await keys.claim("mine", "m-1", 60) is True, "its own result"
    assert await keys.claim("mine", "m-2", 60) is False
    assert client.ttl("idempotency-claim:mine") > 60, "known as long as the result is"


# -- its client -----------------------------------------------------------------------------------


async def test_without_a_client_the_address_is_that_of_redis_url(
    server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("REDIS_URL", server.url)
    keys = RedisIdempotencyStore()
    await keys.set("k", 1, 60)
    assert client.get("idempotency:k") == b"1"
    assert await keys.health_check() is True
    await keys.close()


def test_no_address_and_a_wrong_one_are_said_without_a_password(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="REDIS_URL is not set"):
        RedisIdempotencyStore()
    monkeypatch.setenv("REDIS_URL", "http://user:hunter2@localhost")
    with pytest.raises(ConfigError, match="REDIS_URL is not the address") as caught:
        RedisIdempotencyStore()
    assert "hunter2" not in str(caught.value)


def test_a_client_that_blocks_is_refused_at_once(server: RedisServer):
    with redis.Redis.from_url(server.url) as blocking, pytest.raises(TypeError, match="asyncio"):
        RedisIdempotencyStore(blocking)


async def test_the_rights_of_the_guide_are_enough(server: RedisServer, client: Any):
    guide = (ROOT / "docs/guides/redis.md").read_text()
    (rights,) = re.findall(r"`(~idempotency[^`]*)`", guide)
    client.execute_command(
        "ACL", "SETUSER", "keeper", "reset", "on", ">secret", "-@all", *rights.split()
    )
    url = server.url.replace("unix://", "unix://keeper:secret@")
    async with Redis.from_url(url) as theirs:
        keys = RedisIdempotencyStore(theirs)
        assert await keys.claim("k", "m-1", 60) is True
        assert await keys.claim("k", "m-2", 60) is False
        await keys.release("k", "m-1")
        assert await keys.claim("k", "m-2", 60) is True
        await keys.set("k", 1, 60)
        assert await keys.exists("k") is True
        assert await keys.get("k") == 1
        assert await keys.health_check() is True
    client.execute_command("ACL", "DELUSER", "keeper")


# -- in a trigger ---------------------------------------------------------------------------------


async def test_a_trigger_runs_each_key_once_and_others_see_it(
    keys: RedisIdempotencyStore, client: Any
):
    client.set("idempotency:seen", json.dumps({"run_id": "elsewhere"}), ex=60)
    kit = Kit()
    kit.keys = keys
    for message_id in ("seen", "new"):
        kit.adapter.enqueue(raw(message_id))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(2)
    assert (await trigger.health_check())["status"] == "healthy"
    await trigger.stop()
    assert [e.message_id for e in kit.runtime.get_triggered_events()] == ["new"]
    assert json.loads(client.get("idempotency:new")) == {"run_id": "run-1"}
    assert trigger.metrics.read("queue_dedup_hits_total") == 1
    assert trigger.metrics.read("queue_dedup_unavailable_total") == 0


async def test_the_default_tenant_has_one_key_whether_or_not_it_is_named(
    keys: RedisIdempotencyStore, client: Any
):
    """Two triggers with a store each: only the shared memory can see that the key is the same."""
    runs = 0
    named: list[dict[str, Any]] = [{}, {"x_tenant_id": "default"}, {"x_tenant_id": "acme"}]
    for tenant in named:
        kit = Kit()
        kit.keys = keys
        kit.adapter.enqueue(raw("m", x_dedup_key="k", **tenant))
        trigger = kit.trigger()
        await trigger.start()
        await kit.settled(1)
        await trigger.stop()
        runs += kit.runtime.events.count
    assert runs == 2, "one for the default tenant, one for acme"
    assert sorted(client.keys("idempotency:*")) == [b"idempotency:acme/k", b"idempotency:k"]


async def test_a_key_that_is_claimed_for_long_costs_no_attempt(
    keys: RedisIdempotencyStore, client: Any, monkeypatch: pytest.MonkeyPatch
):
    """Another machine's run may take longer than all retries of this message would."""
    monkeypatch.setattr("ackbone.triggers.runner.CLAIMED_ELSEWHERE_S", 0.01)
    client.set("idempotency-claim:k", "another message", ex=3600)
    asked = 0

    class Watched(RedisIdempotencyStore):
        async def claim(self, key: str, owner: str, ttl: int) -> bool:
            nonlocal asked
            asked += 1
            if asked == 12:  # it ends at last
                client.set("idempotency:k", json.dumps({"run_id": "theirs"}), ex=60)
            return await super().claim(key, owner, ttl)

    kit = Kit(max_retries=1)
    kit.keys = Watched(keys.redis)
    kit.adapter.enqueue(raw("mine", x_dedup_key="k"))
    trigger = kit.trigger()
    await trigger.start()
    await kit.settled(1)
    await trigger.stop()
    assert kit.adapter.get_acked() == ["mine"]
    assert kit.runtime.events.count == 0
    assert trigger.metrics.read("queue_dedup_hits_total") == 1
    assert trigger.metrics.read("queue_dead_lettered_total") == 0


@pytest.mark.parametrize("outage", ["killed", "standing still", "full"])
async def test_an_outage_is_warned_of_counted_shown_and_loses_nothing(
    server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture, outage: str
):
    async with Redis.from_url(server.url) as theirs:
        kit = Kit()
        kit.keys = RedisIdempotencyStore(theirs, timeout_s=0.3)
        trigger = kit.trigger()
        await trigger.start()
        written: list[Entry] = []
        trigger.store.on_events(written.extend)
        if outage == "killed":
            server.kill()
        elif outage == "full":
            client.config_set("maxmemory", 1)
        else:
            server.pause()
        try:
            kit.adapter.enqueue(raw("a"))
            kit.adapter.enqueue(raw("b"))
            await kit.settled(2)
            status = (await trigger.health_check())["status"]
        finally:
            if outage == "killed":
                server.start()
            elif outage == "full":
                client.config_set("maxmemory", 0)
            else:
                server.go_on()
        assert sorted(e.message_id for e in kit.runtime.get_triggered_events()) == ["a", "b"]
        assert sorted(kit.adapter.get_acked()) == ["a", "b"]
        assert "continuing without dedup" in caplog.text
        assert trigger.metrics.read("queue_dedup_unavailable_total") >= 2
        assert status == "degraded"
        kit.adapter.enqueue(raw("c"))
        await kit.settled(3)
        assert (await trigger.health_check())["status"] == "healthy"
        await trigger.stop()
    assert client.get("idempotency:c") is not None
    flagged = {
        data["message_id"]: data.get("without_dedup", False)
        for _, _, _, kind, data in written
        if kind in FINAL_EVENTS
    }
    assert flagged == {"a": True, "b": True, "c": False}


async def test_a_memory_that_cannot_tell_its_health_is_judged_by_its_last_answer():
    kit = Kit()
    trigger = kit.trigger()
    await trigger.start()
    kit.keys.error = OSError("away")
    kit.adapter.enqueue(raw("a"))
    await kit.settled(1)
    assert (await trigger.health_check())["status"] == "degraded"
    kit.keys.error = None
    kit.adapter.enqueue(raw("b"))
    await kit.settled(2)
    assert (await trigger.health_check())["status"] == "healthy"
    await trigger.stop()
