"""Capabilities that a server decides are named in the registry, and so in the table of brokers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ackbone.brokers.registry import KINDS, make_broker
from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer

VARIES = {kind.name: set(kind.varies) for kind in KINDS}


async def changed_by_opening(url: str) -> set[str]:
    """Return the names of the capabilities that are others after the broker was opened."""
    broker = make_broker(url)
    before = msgspec.structs.asdict(broker.capabilities)
    await broker.open()
    await broker.close()
    after = msgspec.structs.asdict(broker.capabilities)
    return {name for name, value in before.items() if after[name] != value}


@pytest.mark.parametrize(("sync", "changed"), [("always", {"durability"}), ("everysec", set())])
async def test_redis(server: RedisServer, client: Any, sync: str, changed: set[str]) -> None:
    client.config_set("appendfsync", sync)
    assert await changed_by_opening(server.url) == changed
    assert changed <= VARIES["redis"]


@pytest.mark.xdist_group("rabbitmq")
async def test_rabbitmq(rabbitmq: RabbitServer) -> None:
    changed = await changed_by_opening(rabbitmq.url)
    assert changed == {"max_body"}, "the tests' server is older than 4.0"
    assert changed <= VARIES["rabbitmq"]


def test_what_is_named_is_a_capability() -> None:
    for kind in KINDS:
        if kind.adapter:
            fields = make_broker(kind.example).capabilities.__struct_fields__
            assert set(kind.varies) <= set(fields), kind.name
