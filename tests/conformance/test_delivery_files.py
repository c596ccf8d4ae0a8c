"""The folder of replies passes the suite of deliveries, with its desk."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast.core import events
from holdfast.core.delivery import Deliveries
from holdfast.core.store import Worker
from holdfast.delivery.file_deliveries import FileDeliveries
from tests.suites.checks.delivery_desk import Desk
from tests.suites.delivery_harness import CHANNEL, DeliveryTrial, Home
from tests.suites.delivery_suite import DeliveryDeskConformance


class TestFileDeliveries(DeliveryDeskConformance):
    many_processes = False
    with_runs = False
    keeps_sent = False
    made_for = 1000  # and more: but each of them costs a sync of the disk

    def setup_method(self) -> None:
        super().setup_method()
        self._folder = tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp")

    def teardown_method(self) -> None:
        self._folder.cleanup()

    async def make_home(self) -> Home:
        return FileDeliveries(Path(self._folder.name) / "delivery-queue", clock=self.clock)

    def make_deliveries(self, store: Home) -> Deliveries:
        assert isinstance(store, FileDeliveries)
        return store

    async def let_die_at(self, home: Home, worker: Worker) -> None:
        await home.leave(worker)  # without a word of what it was doing

    async def notice_dead_at(self, home: Home, worker: Worker) -> None:
        """Whoever sends from a folder knows at once who does not."""

    @asynccontextmanager
    async def open_desk(self, store: Home) -> AsyncIterator[Desk]:
        assert isinstance(store, FileDeliveries)
        desk = store.desk(by="suite")
        yield Desk(desk, desk, desk.acts)


class TestDeskOfAnotherProcess(TestFileDeliveries):
    """People act on a folder while somebody else sends from it, who looks at it now and then."""

    async def test_a_sender_tells_what_others_did(self) -> None:
        async def check(trial: DeliveryTrial, desk: Desk) -> None:
            await trial.put("a")
            await desk.acts.edit_delivery("a", content="better")
            await desk.acts.pause_channel(CHANNEL)
            await trial.queue.due_in_s(trial.limits)  # it looks
            heard = [(event.type, event.data["by"]) for event in trial.events]
            kinds = events.DELIVERY_EDITED, events.DELIVERY_PAUSED
            assert heard == [(kind, "suite") for kind in kinds]

        await self.check_desk(check)

    async def test_a_paused_channel_waits(self) -> None:
        async def check(trial: DeliveryTrial, desk: Desk) -> None:
            worker = await trial.worker()
            await trial.put("a")
            assert await desk.acts.pause_channel(CHANNEL)
            assert await trial.none(worker) is None
            assert await desk.acts.unpause_channel(CHANNEL)
            assert (await trial.one(worker)).id == "a"

        await self.check_desk(check)

    @asynccontextmanager
    async def open_desk(self, store: Home) -> AsyncIterator[Desk]:
        assert isinstance(store, FileDeliveries)
        other = FileDeliveries(store.queue.queue_dir, clock=self.clock)
        desk = other.desk(by="suite")
        yield Desk(desk, desk, desk.acts)
        await other.close()
