"""People act on a folder of replies while it is sent from, and are killed in the middle of it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from holdfast.core.clock import SystemClock
from holdfast.core.delivery import New, Outbound
from holdfast.core.errors import Conflict, NotFound, SendUnknown, TemporaryError
from holdfast.delivery import whole_files
from holdfast.delivery.attempts import Policy
from holdfast.delivery.desk_work import DeskWork
from holdfast.delivery.file_deliveries import FileDeliveries
from holdfast.delivery.file_queue import DeliveryQueue
from holdfast.delivery.filing import Filing
from holdfast.delivery.folder_sender import FolderSender
from holdfast.delivery.queued import QueuedDelivery
from holdfast.delivery.runner import DeliveryRunner
from tests.faults.test_file_queue import _at_a_step, _killed

ACTS: dict[str, Callable[[DeskWork, str], object]] = {
    "retry": lambda desk, name: desk.retry([name]),
    "edit": lambda desk, name: desk.edit(name, "mended"),
    "discard": lambda desk, name: desk.discard([name], "over"),
    "pause": lambda desk, name: desk.pause("chat"),
}


def _act(name: str, queue: DeliveryQueue, delivery: QueuedDelivery) -> None:
    filing = Filing(queue, SystemClock())
    with whole_files.alone(queue.queue_dir):
        ACTS[name](filing.desk("me"), delivery.id)
        whole_files.sync(*filing.changed)


@pytest.mark.parametrize("failed", [False, True], ids=["waiting", "failed"])
@pytest.mark.parametrize("name", ACTS)
def test_an_act_that_is_killed_at_every_step(tmp_path: Path, name: str, failed: bool) -> None:
    """The reply is in one place, as it was or as it should be, and no act is without its line."""
    step, killed = 0, True
    while killed:
        folder = tmp_path / str(step)
        queue = DeliveryQueue(folder)
        delivery = queue.enqueue("chat", "ann", "precious")
        queue.fail(delivery, "away")
        if failed:
            queue.fail_for_good(delivery, "refused")
        killed = _killed(_at_a_step, step, partial(_act, name), queue, delivery)
        again = DeliveryQueue(folder)
        waiting, given_up = again.load_pending(), again.load_failed()
        discarded = [each.name for each in again.discarded_dir.glob("*.json")]
        places = [*(each.id for each in [*waiting, *given_up]), *discarded]
        assert len(places) == 1, (step, places)
        acted = bool(discarded) or again.paused.names() == {"chat"}
        for each in [*waiting, *given_up]:
            assert each.content in ("precious", "mended")
            acted = acted or each.content == "mended" or each.retry_count == 0
        log = folder / "acts.log"
        told = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        assert [act["by"] for act in told] == ["me"] or not acted, (step, "an act without a line")
        assert acted or killed
        assert not again.broken()
        assert not list(folder.rglob("*.tmp"))
        step += 1
    assert step >= 4, "it made too few steps at which it could have been killed"


class Witness:
    """A channel that remembers what it was given, and fails now and then."""

    name = "chat"

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.taken: list[tuple[str, str, bool]] = []
        """Id, text, and whether it was marked as a repeat."""

    async def send(self, reply: Outbound) -> str | None:
        await asyncio.sleep(self._chance.random() * 0.005)
        self._take(reply.id, reply.content, reply.in_doubt)
        return None

    def plainly(
        self, channel: str, recipient: str, content: str, *, delivery_id: str, in_doubt: bool
    ) -> None:
        """The same for a runner."""
        time.sleep(self._chance.random() * 0.005)
        self._take(delivery_id, content, in_doubt)

    def _take(self, delivery_id: str, content: str, in_doubt: bool) -> None:
        mood = self._chance.random()
        if mood < 0.2:
            raise TemporaryError("away")
        self.taken.append((delivery_id, content, in_doubt))
        if mood < 0.3:
            raise SendUnknown("no answer")

    async def close(self) -> None:
        pass


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading a file and writing it again there is time enough for somebody else."""
    write = whole_files.write

    def slow(path: Path, body: bytes, *, new: bool = False) -> bool:
        time.sleep(random.random() * 0.004)
        return write(path, body, new=new)

    monkeypatch.setattr(whole_files, "write", slow)


@asynccontextmanager
async def _folder_sender(folder: Path, witness: Witness) -> AsyncIterator[None]:
    policy = Policy(wait_scale=0.01)
    async with FolderSender(FileDeliveries(folder), [witness], policy=policy):
        yield


@asynccontextmanager
async def _runner(folder: Path, witness: Witness) -> AsyncIterator[None]:
    runner = DeliveryRunner(DeliveryQueue(folder), witness.plainly, wait_scale=0.01)
    runner.start()
    try:
        yield
        assert runner.failure is None
    finally:
        await asyncio.to_thread(runner.stop)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("sending", [_folder_sender, _runner])
async def test_a_person_and_a_sender_never_write_over_each_other(
    tmp_path: Path,
    soak: bool,
    sending: Callable[[Path, Witness], AbstractAsyncContextManager[None]],
) -> None:
    """What was edited in time is what goes out, what was discarded does not, and nothing goes twice
    without a mark, however both meet."""
    seed = int(os.environ.get("HOLDFAST_SEED", random.randrange(1_000_000)))
    print(f"seed {seed}")
    chance = random.Random(seed)
    names = [f"r{n:04}" for n in range(2000 if soak else 150)]
    texts = dict.fromkeys(names, "as it was")
    discarded: set[str] = set()
    done: Counter[str] = Counter()
    witness = Witness(chance)
    person, feeder = FileDeliveries(tmp_path), FileDeliveries(tmp_path)
    desk = person.desk(by="me")

    async def act(name: str) -> None:
        what = chance.random()
        if what < 0.6:
            text = f"edit {chance.random()}"
            try:
                await desk.edit_delivery(name, content=text)
                texts[name] = text
                done["edits"] += 1
            except (Conflict, NotFound):
                done["refused"] += 1
        elif what < 0.9:
            (answer,) = await desk.retry_deliveries([name])
            done["retries"] += answer is None
        else:
            (answer,) = await desk.discard_deliveries([name], reason="over")
            if answer is None:
                discarded.add(name)

    async with sending(tmp_path, witness):
        for at, name in enumerate(names):
            new = New(id=name, channel="chat", recipient=f"to {name}", content=texts[name])
            await feeder.put([new])
            await act(chance.choice(names[max(0, at - 5) : at + 1]))
        while left := [path.stem for path in tmp_path.glob("*.json")]:
            await act(chance.choice(left))
    await person.close()
    await feeder.close()
    for name in names:
        got = [each for each in witness.taken if each[0] == name]
        unmarked = [each for each in got if not each[2]]
        assert len(unmarked) <= 1, f"{name} went twice without a mark"
        has_failed = (tmp_path / "failed" / f"{name}.json").exists()
        was_discarded = (tmp_path / "discarded" / f"{name}.json").exists()
        assert was_discarded is (name in discarded)
        if not has_failed and not was_discarded:
            assert got, f"{name} is lost"
            assert got[-1][1] == texts[name], f"{name} went out without its last edit"
    assert min(done["edits"], done["refused"], done["retries"]) > 0, "they never met"
    print(f"{len(names)} replies, {dict(done)}, {len(discarded)} discarded")
