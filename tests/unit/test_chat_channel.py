"""What `ackbone chat` tells of replies: each once, before any attempt at it begins."""

from __future__ import annotations

from pathlib import Path

from ackbone import App
from ackbone.cli.chat_channel import AnnouncedDeliveries
from ackbone.config import load_config
from ackbone.core.outbound.delivery import New, unlimited
from ackbone.core.outbound.delivery_records import DeliveryRecord


async def test_replies_that_go_with_another_are_told_of(home: Path) -> None:
    told: list[str] = []

    def announce(record: DeliveryRecord) -> None:
        told.append(record.id)

    async with App(load_config(environ={}, cwd=home, overrides={"home": str(home)})) as app:
        worker = await app.store.register("w")
        records = app.storage.records(app.store)
        queue = AnnouncedDeliveries(app.storage.deliveries(app.store), records, announce)
        await queue.put([New(id="old", channel="c", recipient="ann", content="hi")])
        await queue.begin()
        await queue.put([New(id="new", channel="c", recipient="bob", content="hi")])
        old, new = (await queue.take({"c": unlimited}, limit=9, worker=worker)).replies
        assert told == ["new"]
        await queue.put([New(id="behind", channel="c", recipient="bob", content="hi")])
        assert not await queue.follow(old, lambda _: True, limit=9, worker=worker)
        assert told == ["new"]
        (found,) = await queue.follow(new, lambda _: True, limit=9, worker=worker)
        assert found.id == "behind"
        assert told == ["new", "behind"]
