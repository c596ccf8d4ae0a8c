"""Times that others write as "for ever": they stop nobody, and their messages run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context, TemporaryError
from ackbone.config import Config, Retry, Tasks
from tests.servers.redis import RedisServer

LIMIT_S = 30.0
EARLIEST, LATEST = "0001-01-01T00:00:00+10:00", "9999-12-31T23:59:59-10:00"
ROUNDED = "9999-12-31T23:59:59.9999999Z"
"""The last moment as .NET writes it; a database may round it to the year 10,000."""


@pytest.fixture(params=["sqlite", pytest.param("pg", marks=pytest.mark.xdist_group("postgres"))])
def app(request: pytest.FixtureRequest, home: Path, server: RedisServer, client: Any) -> App:
    return App(
        Config(
            home=home,
            broker=server.url,
            default_queue="stream:task",
            store="sqlite"
            if request.param == "sqlite"
            else request.getfixturevalue("postgres_url"),
            tasks=Tasks(max_retries=2, retry_delays_s=(0.01,)),
            retry=Retry(max_retries=2, base_delay_s=0.01),
        )
    )


async def both_attempts(app: App, queue: str) -> list[tuple[str, int]]:
    """What ran: everything fails once, and is read from the store again."""
    ran: list[tuple[str, int]] = []

    @app.on("t", queue=queue)
    async def fails_once(ctx: Context) -> None:
        ran.append((ctx.message.id, ctx.message.attempt))
        if ctx.message.attempt == 1:
            raise TemporaryError("again")

    async with app, asyncio.timeout(LIMIT_S):
        await app.work(until_idle=True)
    return sorted(ran)


@pytest.mark.parametrize(
    ("field", "when"),
    [
        ("expires_at", LATEST),
        ("expires_at", ROUNDED),
        ("created_at", EARLIEST),
        ("created_at", LATEST),
    ],
)
async def test_a_time_without_a_year_in_utc_stops_nobody(
    app: App, client: Any, field: str, when: str
) -> None:
    for name, more in (("far", {field: when}), ("near", {})):
        fields = {"task_id": name, "tool_name": "t", "payload": "{}", "idempotency_key": name}
        client.xadd("stream:task", {**fields, **more})
    ran = await both_attempts(app, "stream:task")
    assert ran == [("far", 1), ("far", 2), ("near", 1), ("near", 2)]


@pytest.mark.parametrize("digits", [17, 18, 19, 30, 5000])
async def test_a_time_to_live_of_any_length_stops_nobody(
    app: App, client: Any, digits: int
) -> None:
    for name, more in (("far", {"ttl_us": "9" * digits}), ("near", {})):
        body = f'{{"message_id": "{name}", "message_type": "t", "payload": {{}}}}'
        client.xadd("orders", {"ab": 1, "id": name, "body": body, **more})
    ran = await both_attempts(app, "orders")
    assert ran == [("far", 1), ("far", 2), ("near", 1), ("near", 2)]


@pytest.mark.parametrize("ms", [1_794_923_148_752_000, 2**64 - 2], ids=["in µs", "last"])
async def test_an_entry_id_of_another_scale_stops_nobody(app: App, client: Any, ms: int) -> None:
    for name in ("far", "near"):
        fields = {"task_id": name, "tool_name": "t", "payload": "{}", "idempotency_key": name}
        client.xadd("stream:task", fields, id=f"{ms}-1" if name == "far" else "*")
    ran = await both_attempts(app, "stream:task")
    assert ran == [("far", 1), ("far", 2), ("near", 1), ("near", 2)]
