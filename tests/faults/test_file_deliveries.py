"""A folder of replies whose sender is killed again and again: each reply ends sent or failed with
its reason, in the order of its conversation, twice only where nobody could know."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from holdfast.core import events
from holdfast.core.clock import SystemClock
from holdfast.core.delivery import (
    Again,
    Failed,
    Held,
    Limit,
    Limits,
    New,
    Outbound,
    Result,
    Sent,
    Settled,
)
from holdfast.delivery import whole_files
from holdfast.delivery.file_deliveries import FileDeliveries
from holdfast.delivery.file_queue import DeliveryQueue
from holdfast.delivery.filing import Filing
from holdfast.delivery.queued import QueuedDelivery
from tests.faults.test_delivery import ROOT, Request, Scene, _check_order, _made
from tests.faults.test_file_queue import _at_a_step, _killed
from tests.faults.waiting import wait_until


class FolderScene(Scene):
    """The same receiver; a folder in place of the store."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.folder = home / "delivery-queue"
        self.queue = DeliveryQueue(self.folder)
        self.events = home / "events.jsonl"
        self.doubtful: set[str] = set()
        """What a kill found in mid-send."""

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.faults.folder_sender"]
        with (self.home / "sender.log").open("ab") as log:
            self.sender = subprocess.Popen(
                [*command, str(self.folder), str(self.events)], cwd=ROOT, stdout=log, stderr=log
            )

    def kill(self) -> None:
        super().kill()
        for left in self.queue.load_pending():
            if left.sending_since > left.last_attempt_at:
                self.doubtful.add(left.id)

    async def put(self, new: list[New]) -> None:
        """From this process, while the sender may be at work."""
        feeder = FileDeliveries(self.folder)
        for start in range(0, len(new), 100):
            await feeder.put(new[start : start + 100])
        await feeder.close()

    def waiting(self) -> int:
        return len(list(self.folder.glob("*.json")))

    def told(self, wanted: str) -> list[str]:
        lines = [json.loads(line) for line in self.events.read_text().splitlines()]
        return [name for kind, name in lines if kind == wanted]


@pytest.fixture
def scene(home: Path) -> Iterator[FolderScene]:
    scene = FolderScene(home)
    yield scene
    scene.close()


async def test_a_folders_sender_that_is_killed_again_and_again(
    scene: FolderScene, soak: bool
) -> None:
    seed = int(os.environ.get("HOLDFAST_SEED", random.randrange(1_000_000)))
    print(f"seed {seed}")
    chance = random.Random(seed)
    conversations, each, kills = (100, 20, 30) if soak else (30, 6, 4)
    new = _made(scene, chance, conversations, each)
    half = len(new) // 2
    await scene.put(new[:half])
    for n in range(kills):
        before = len(scene.requests())
        scene.start()
        if n == kills // 2:
            await scene.put(new[half:])
        # Killed while it sends: after some more requests, at a moment of its own.
        wanted = before + chance.randint(1, len(new) // (2 * kills))
        wait_until(partial(scene.has_met, wanted), "more requests")
        time.sleep(chance.random() * 0.05)
        scene.kill()
    await scene.put(new)  # whoever fed it does not know what became of them
    scene.start()
    wait_until(lambda: scene.waiting() == 0, "every delivery has ended", patience_s=300)
    _check(scene, new, kills)


def _check(scene: FolderScene, new: list[New], kills: int) -> None:
    requests = scene.requests()
    lines = [line.split("\t") for line in (scene.folder / ".sent").read_text().splitlines()]
    sent = [line[0] for line in lines]
    failed = {each.id: each for each in scene.queue.load_failed()}
    assert sorted([*sent, *failed]) == sorted(each.id for each in new), "each ended, and once"
    # Who hears events may die before it hears; the folder itself keeps the mark.
    resent = {line[0] for line in lines if line[1:] == ["again"]}
    resent |= {name for name, each in failed.items() if each.resent}
    resent |= set(scene.told(events.DELIVERY_RESENT))
    by_id: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_id[request.id].append(request)
    doubles = 0
    for each in new:
        met = by_id[each.id]
        taken = [request for request in met if request.taken]
        moods = json.loads(each.content)["moods"]
        if each.id in failed:
            found = failed[each.id]
            assert moods[-1] != "ok" or each.id in resent, f"{each.id} would have been taken"
            assert found.last_error, f"{each.id} failed without a reason"
            assert found.content == each.content, f"{each.id} lost its text"
        else:
            assert taken, f"{each.id} counts as sent and never arrived"
        if len(taken) > 1:
            doubles += 1
            assert each.id in resent, f"{each.id} was taken {len(taken)} times without a mark"
        if each.id in resent:
            unsure = any(request.mood in ("hang", "reset") for request in met)
            assert unsure or each.id in scene.doubtful, f"{each.id}: a repeat without a doubt"
    _check_order(requests)
    assert not scene.queue.broken()
    assert not list(scene.folder.glob("*.tmp"))
    print(
        f"{len(new)} deliveries, {kills} kills, {len(requests)} requests: {len(sent)} sent,"
        f" {len(failed)} failed, {len(resent)} sent again in doubt, {doubles} of them twice"
    )


# -- killed at every step -------------------------------------------------------------------------

ME = 1
ENDS: dict[str, Result | None] = {
    "take": None,
    "sent": Sent(receipt="n"),
    "part": Sent(receipt="n", more=True),
    "again": Again(error="away", wait_s=5.0),
    "unknown": Again(error="no answer", wait_s=5.0, in_doubt=True),
    "failed": Failed(error="refused"),
    "held": Held(error="no answer"),
}


def _limits(reply: Outbound) -> Sequence[Limit]:
    return [Limit("bot", 5, 1.0)]


def _attempt(result: Result | None, queue: DeliveryQueue, delivery: QueuedDelivery) -> None:
    """One reply is taken, and what became of it is written down, by a process of its own."""
    filing = Filing(queue, SystemClock())
    filing.open()
    filing.alive.add(ME)
    channels: dict[str, Limits] = {"chat": _limits}
    (reply,) = filing.take(channels, 10, ME).replies
    whole_files.sync(*filing.changed)
    if result is not None:
        filing.settle(channels, [Settled(reply=reply, result=result)], ME)
        whole_files.sync(*filing.changed)


@pytest.mark.parametrize("name", ENDS)
def test_an_attempt_that_is_killed_at_every_step(tmp_path: Path, name: str) -> None:
    """The reply is in one place, whole; what may have been called for is in doubt; and whoever puts
    it in again changes nothing, wherever it is."""
    step, killed = 0, True
    while killed:
        folder = tmp_path / str(step)
        queue = DeliveryQueue(folder)
        delivery = queue.enqueue("chat", "ann", "precious")
        killed = _killed(_at_a_step, step, partial(_attempt, ENDS[name]), queue, delivery)
        again = DeliveryQueue(folder)
        filing = Filing(again, SystemClock())
        filing.open()
        filing.recover(ME)
        waiting, given_up = again.load_pending(), again.load_failed()
        places = len(waiting) + len(given_up)
        assert filing.holds(delivery.id), (step, "it is forgotten")
        assert places == 1 or (name == "sent" and places == 0), (step, waiting, given_up)
        for each in [*waiting, *given_up]:
            assert each.content == "precious"
        for each in waiting:
            assert each.extra.get("calls", 0) <= 1
            settled = bool(each.last_error or each.extra.get("receipts"))
            called = each.extra.get("calls", 0) == 1
            if called and (not settled or name in ("unknown", "held")):
                assert each.sending_since > 0, (step, "a doubt is forgotten")
        assert (given_up == []) or name in ("failed", "held"), step
        assert not again.broken()
        assert not list(folder.rglob("*.tmp"))
        if not killed:
            expected = {"sent": (0, 0), "failed": (0, 1), "held": (0, 1)}.get(name, (1, 0))
            assert (len(waiting), len(given_up)) == expected
        step += 1
    assert step >= 6, "it made too few steps at which it could have been killed"
