"""Rows of `queue_metrics` while workers and triggers run: by tenant, as often as settings say."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context, QueueTrigger
from ackbone.config import Config, load_config
from tests.faults.waiting import until
from tests.integration.test_queue_trigger import Kit, raw

CONSUMED = "queue_messages_consumed_total"
NEVER = 86_400.0
SOON_S = 40.0
"""Below the usual interval of 60 s, at which rows would come whatever the settings say."""


def rows(path: Path, name: str = CONSUMED) -> dict[tuple[str, str], float]:
    """Sums by queue and tenant."""
    with closing(sqlite3.connect(path)) as conn:
        found = conn.execute(
            "SELECT queue_name, tenant_id, sum(metric_value) FROM queue_metrics"
            " WHERE metric_name = ? GROUP BY 1, 2",
            (name,),
        ).fetchall()
    return {(queue, tenant): value for queue, tenant, value in found}


@asynccontextmanager
async def started(trigger: QueueTrigger) -> AsyncIterator[QueueTrigger]:
    await trigger.start()
    try:
        yield trigger
    finally:
        await trigger.stop()


def feed(kit: Kit) -> None:
    kit.adapter.enqueue(raw("m0"))
    for n, tenant in enumerate(["acme", "acme", "globex"], 1):
        kit.adapter.enqueue(raw(f"m{n}", x_tenant_id=tenant))


@pytest.mark.parametrize("said_by", ["trigger", "configuration"])
async def test_a_trigger_writes_rows_while_it_runs(home: Path, said_by: str) -> None:
    path = home / "trigger.db"
    text = f"home: {home}\nstore: sqlite:///{path}\nmetrics:\n  export_interval_s: %g\n"
    every_s = {"trigger": (0.05, NEVER), "configuration": (None, 0.05)}[said_by]
    kit = Kit(metrics_export_interval=every_s[0])
    store = loaded(home, text % every_s[1])
    feed(kit)
    async with started(kit.trigger(store=store)):
        expected = {("orders", "acme"): 2, ("orders", "globex"): 1, ("orders", "default"): 1}
        await until(lambda: rows(path) == expected, "rows while it runs", patience_s=SOON_S)
        await until(
            lambda: rows(path, "queue_processing_duration_seconds_count") == expected, "durations"
        )


@pytest.mark.parametrize("off", ["trigger", "configuration"])
async def test_a_trigger_whose_metrics_are_off_writes_none(home: Path, off: str) -> None:
    path = home / "trigger.db"
    kit = Kit(metrics_enabled=off != "trigger", metrics_export_interval=0.01)
    enabled = str(off != "configuration").lower()
    store = loaded(home, f"store: sqlite:///{path}\nmetrics:\n  enabled: {enabled}\n")
    feed(kit)
    async with started(kit.trigger(store=store)) as trigger:
        await kit.settled(4)
        assert trigger.metrics.read(CONSUMED) == 4
    assert rows(path) == rows(path, "queue_active_workers") == {}


def loaded(home: Path, text: str) -> Config:
    file = home / "ackbone.yaml"
    file.write_text(text)
    return load_config(file, environ={}, overrides={"home": str(home)})


@asynccontextmanager
async def working(app: App) -> AsyncIterator[None]:
    @app.on("*", queue="own")
    @app.on("*", queue="often")
    @app.on("*", queue="silent")
    async def handle(ctx: Context) -> None:
        return None

    async with app:
        task = asyncio.create_task(app.work())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_an_app_writes_rows_while_it_runs(home: Path) -> None:
    config = loaded(home, "metrics:\n  export_interval_s: 0.05\n")
    app = App(config)
    async with working(app):
        for tenant in ("acme", "acme", "default"):
            await app.send("t", {}, queue="own", tenant_id=tenant)
        expected = {("own", "acme"): 2, ("own", "default"): 1}
        await until(
            lambda: rows(config.store_file) == expected, "rows while it runs", patience_s=SOON_S
        )


TRIGGERS = """
metrics:
  export_interval_s: 86400
triggers:
  - {queue_name: often, consumer_group: agents, metrics: {export_interval: 0.05}}
  - {queue_name: silent, consumer_group: agents, metrics: {enabled: false}}
"""


async def test_each_trigger_of_an_app_has_rows_as_its_settings_say(home: Path) -> None:
    config = loaded(home, TRIGGERS)
    app = App(config)
    gauge = "queue_active_workers"

    async def sent_to(queue: str) -> Any:
        return await app.send("t", {}, queue=queue)

    async with working(app):
        for queue in ("silent", "own", "often"):
            await sent_to(queue)
        read = app.metrics.read if app.metrics is not None else None
        assert read is not None
        await until(lambda: read(CONSUMED) == 3, "all ran")
        await until(
            lambda: ("often", "default") in rows(config.store_file),
            "its own interval",
            patience_s=SOON_S,
        )
        assert rows(config.store_file) == {("often", "default"): 1}
    assert rows(config.store_file) == {("often", "default"): 1, ("own", "default"): 1}
    assert {queue for queue, _ in rows(config.store_file, gauge)} == {"often", "own"}
