"""What a start says of replies in the database, in the words of the file queue."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ackbone import App, FinalError
from ackbone.backends import Looking
from ackbone.composition.background import relays_of
from ackbone.config import load_config
from ackbone.core.clock import SystemClock
from ackbone.core.errors import SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Outbound
from ackbone.delivery.recovery_report import store_report, store_scan
from tests.unit.desk import until

AGO_S = 30


class Earlier(SystemClock):
    """Half a minute behind."""

    def now_us(self) -> int:
        return super().now_us() - AGO_S * 1_000_000


class Sad:
    name = "chat"

    async def send(self, reply: Outbound) -> None:
        kinds = {"away": TemporaryError, "bad": FinalError, "lost": SendUnknown}
        raise kinds[reply.content]("no")

    async def close(self) -> None:
        pass


@pytest.fixture
async def app(home: Path) -> AsyncIterator[App]:
    app = App(load_config(environ={}, cwd=home, overrides={"home": str(home)}), clock=Earlier())
    app.channel(Sad(), on_unknown="hold")
    async with app:
        yield app


async def tried(app: App, *texts: str) -> None:
    """Replies, each after its first attempt."""
    records = app.storage.records(app.store)
    worker = app.worker(relays=relays_of(app, spawn_solo=False))
    await worker.begin()
    ids = [await app.deliver("chat", text, text) for text in texts]
    for name in ids:
        await until(functools.partial(_was_tried, records, name))
    await worker.drain()


async def _was_tried(records: Looking, name: str) -> bool:
    (found,) = await records.deliveries_named(name, tenant_id=None)
    return found.last_error is not None


async def test_nothing_is_said_of_nothing(app: App):
    assert await store_report(app.storage.records(app.store)) == ""


async def test_what_waits(app: App):
    await tried(app, "away")
    records = app.storage.records(app.store)
    report = await store_report(records)
    assert re.sub(r"oldest: 3\ds", "oldest: 30s", report) == (
        "Delivery Queue Recovery:\n"
        "  Pending: 1 item (oldest: 30s ago, 1 retry)\n"
        "  Failed:  0 items\n"
        "  Resuming delivery..."
    )
    found = await store_scan(records)
    assert (found["pending"], found["failed"], found["unknown"]) == (1, 0, 0)
    assert found["oldest_pending"]["channel"] == "chat"


async def test_what_waits_for_a_person(app: App):
    await tried(app, "bad", "lost")
    assert await store_report(app.storage.records(app.store)) == (
        "Delivery Queue Recovery:\n"
        "  Pending: 0 items\n"
        "  Failed:  1 item (ackbone deliveries list --status failed)\n"
        "  Unknown: 1 item may have arrived (ackbone deliveries list --status unknown)"
    )
