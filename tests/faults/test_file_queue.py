"""The folder of replies under real kills: whatever was taken is there, once, whole."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ackbone.core.errors import FinalError, NotFound, SendUnknown, TemporaryError
from ackbone.delivery.files import atomic_files
from ackbone.delivery.files.delivery_queue import DeliveryQueue
from ackbone.delivery.files.delivery_runner import DeliveryRunner
from ackbone.delivery.files.queued_delivery import QueuedDelivery
from ackbone.delivery.recovery_report import recovery_scan
from tests.conftest import SOAK

STEPS = ("open", "flock", "truncate", "write", "flush", "fsync", "replace", "unlink")
"""Calls of a write: before each of them, and after the last, the process is killed."""

Act = Callable[[DeliveryQueue, QueuedDelivery], object]


def _last_failure(queue: DeliveryQueue, delivery: QueuedDelivery) -> None:
    for n in range(delivery.max_retries + 1 - delivery.retry_count):
        queue.fail(delivery, f"failure {n}")


def _retry(queue: DeliveryQueue, delivery: QueuedDelivery) -> None:
    queue.fail_for_good(delivery, "refused")
    queue.retry(delivery.id)


ACTS: dict[str, Act] = {
    "enqueue": lambda queue, delivery: queue.enqueue("telegram", "2", "another"),
    "begin": lambda queue, delivery: queue.begin(delivery.id),
    "fail": lambda queue, delivery: queue.fail(delivery, "away"),
    "give up": _last_failure,
    "give up at once": lambda queue, delivery: queue.fail_for_good(delivery, "refused"),
    "put off": lambda queue, delivery: queue.put_off(delivery, time.time() + 60, "slow down"),
    "retry": _retry,
    "edit": lambda queue, delivery: queue.edit(delivery.id, "mended"),
    "discard": lambda queue, delivery: queue.discard(delivery.id),
    "ack": lambda queue, delivery: queue.ack(delivery.id),
}
GONE = ("discard", "ack")
"""Acts that remove the file and write none."""


Doom = Callable[[int], None]
"""Prepares a child process to die: before its n-th step, or when a file reaches n bytes."""


def _at_a_step(step: int) -> None:
    left = step

    def count(frame: FrameType, event: str, called: Any) -> None:
        nonlocal left
        if event == "c_call" and called.__name__ in STEPS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def _in_a_write(size: int) -> None:
    """The kernel writes the first `size` bytes of a file and kills the process at the next one."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _killed(doom: Doom, n: int, act: Act, queue: DeliveryQueue, delivery: QueuedDelivery) -> bool:
    """Run the act in a doomed child. False: it came to its end before."""
    pid = os.fork()
    if pid == 0:
        try:
            doom(n)
            act(queue, delivery)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL, -signal.SIGXFSZ), code
    return code != 0


def _kill_everywhere(tmp_path: Path, name: str, doom: Doom, *, every: int) -> int:
    """The delivery is in one place, as it was or as it should be; a restart finds no rubbish.

    Returns how often the act was killed.
    """
    kills = 0
    while True:
        folder = tmp_path / str(kills)
        queue = DeliveryQueue(folder)
        delivery = queue.enqueue("telegram", "1", "precious")
        killed = _killed(doom, kills * every, ACTS[name], queue, delivery)
        again = DeliveryQueue(folder)
        found = [d for d in [*again.load_pending(), *again.load_failed()] if d.id == delivery.id]
        expected = 0 if name in GONE and not found else 1
        assert len(found) == expected, (name, kills)
        for each in found:
            assert each.content in ("precious", "mended")
            assert 0 <= each.retry_count <= each.max_retries + 1
        assert not again.broken()
        assert not list(folder.rglob("*.tmp"))
        if name == "enqueue":
            others = [d.content for d in again.load_pending() if d.id != delivery.id]
            assert others in ([], ["another"])
        if not killed:
            return kills
        kills += 1


@pytest.mark.parametrize("name", ACTS)
def test_killed_at_every_step(tmp_path: Path, name: str) -> None:
    kills = _kill_everywhere(tmp_path, name, _at_a_step, every=1)
    assert kills >= 2, "the act made no step at which it could have been killed"


@pytest.mark.parametrize("name", [name for name in ACTS if name not in GONE])
def test_killed_in_the_middle_of_a_write(tmp_path: Path, name: str) -> None:
    """A file is written whole or not at all: not the first half of it in the old one's place."""
    kills = _kill_everywhere(tmp_path, name, _in_a_write, every=40)
    assert kills >= 3, "the act wrote nothing in which it could have been killed"


SENDER = """
import os, sys, time
from pathlib import Path
from ackbone.delivery.files.delivery_queue import DeliveryQueue
from ackbone.delivery.files.delivery_runner import DeliveryRunner

folder, oracle, refuse = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
import random
out = os.open(oracle, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def send(channel, recipient, content):
    if random.random() < refuse:
        raise ConnectionError("away")
    time.sleep(0.001)
    os.write(out, f"{recipient} {content}\\n".encode())

queue = DeliveryQueue(folder)
runner = DeliveryRunner(queue, send, wait_scale=0.0005)
runner.start()
print("ready", flush=True)
while runner.failure is None:
    time.sleep(0.02)
"""


def test_a_sender_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """Everything arrives, in the order of its conversation; twice only what a kill made unknown."""
    count, kills = (2000, 30) if SOAK else (240, 6)
    folder, oracle = tmp_path / "delivery-queue", tmp_path / "oracle"
    seed = random.SystemRandom().randrange(1_000_000)
    print("seed", seed)
    chance = random.Random(seed)
    queue = DeliveryQueue(folder)
    for n in range(count):
        made = queue.enqueue("telegram", f"chat-{n % 20}", f"{n:06d}")
        made.max_retries = 1000
        queue._write_atomic(made)
    doubtful: dict[str, int] = {}
    killed = 0
    while queue.load_pending():
        child = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(folder), str(oracle), "0.05"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == "ready\n"
            if killed < kills:
                before = len(queue.load_pending())
                goal = before - chance.randrange(1, max(2, count // kills))
                _until(child, lambda goal=goal: len(queue.load_pending()) <= goal)  # type: ignore[misc]
                killed += 1
            else:
                _until(child, lambda: not queue.load_pending())
            child.kill()
            child.wait()
        for left in queue.load_pending():
            if left.sending_since > 0:
                doubtful[left.content] = doubtful.get(left.content, 0) + 1
    arrived = [line.split() for line in oracle.read_text().splitlines()]
    texts = [content for _, content in arrived]
    assert set(texts) == {f"{n:06d}" for n in range(count)}, "lost"
    for content in set(texts):
        assert texts.count(content) <= 1 + doubtful.get(content, 0), f"{content} came too often"
    for chat in {recipient for recipient, _ in arrived}:
        order = [content for recipient, content in arrived if recipient == chat]
        assert order == sorted(order), f"{chat} out of order"
    assert recovery_scan(queue) == {"pending": 0, "failed": 0, "oldest_pending": None}
    print(f"{count} sent, {killed} kills, {len(doubtful)} in doubt, {len(texts) - count} twice")


def _until(child: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert child.poll() is None, "the sender ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_writers_in_many_processes(tmp_path: Path) -> None:
    """Each of them is told that its delivery is taken; all of them are there, and are sent."""
    folder = tmp_path / "delivery-queue"
    DeliveryQueue(folder)
    code = (
        "import sys; from pathlib import Path\n"
        "from ackbone.delivery.files.delivery_queue import DeliveryQueue\n"
        "for n in range(50):\n"
        "    print(DeliveryQueue(Path(sys.argv[1])).enqueue('t', sys.argv[2], str(n)).id)"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(n)], stdout=subprocess.PIPE, text=True
        )
        for n in range(4)
    ]
    promised: list[str] = []
    for writer in writers:
        out, _ = writer.communicate(timeout=60)
        assert writer.returncode == 0
        promised += out.split()
    queue = DeliveryQueue(folder)
    assert sorted(d.id for d in queue.load_pending()) == sorted(promised)
    assert len(promised) == 200
    assert all(json.loads((folder / f"{i}.json").read_text())["id"] == i for i in promised[:5])


class Witness:
    """A `send_fn` that remembers what it was given, and fails now and then."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.taken: list[tuple[str, str, bool]] = []
        """Id, text, and whether it was marked as a repeat."""

    def __call__(
        self, channel: str, recipient: str, content: str, *, delivery_id: str, in_doubt: bool
    ) -> None:
        time.sleep(self._chance.random() * 0.005)
        mood = self._chance.random()
        if mood < 0.1:
            raise FinalError("refused")
        if mood < 0.25:
            raise TemporaryError("away")
        self.taken.append((delivery_id, content, in_doubt))
        if mood < 0.35:
            raise SendUnknown("no answer")

    def of(self, delivery_id: str) -> list[tuple[str, bool]]:
        return [(text, again) for name, text, again in self.taken if name == delivery_id]


class Person:
    """Edits, retries and discards deliveries beside the runner, by a queue object of its own."""

    def __init__(self, folder: Path, witness: Witness, chance: random.Random) -> None:
        self._queue = DeliveryQueue(folder)
        self._witness = witness
        self._chance = chance
        self.done: Counter[str] = Counter()
        self.texts: dict[str, str | None] = {}
        """What must go out; None: an attempt that was under way may have sent the text before."""
        self.discarded: dict[str, int | None] = {}
        """How often it had arrived by then; None: an attempt was under way."""

    def act(self, name: str) -> None:
        what = self._chance.choices(("edit", "retry", "discard"), (6, 3, 1))[0]
        try:
            if what == "edit":
                text = f"edit {self._chance.random()}"
                found = self._queue.edit(name, text)
                self.texts[name] = None if found.sending_since else text
            elif what == "retry":
                failed = [each.id for each in self._queue.load_failed()]
                self._queue.retry(self._chance.choice(failed or [name]))
            else:
                arrived = len(self._witness.of(name))
                found = self._queue.discard(name)
                self.discarded[name] = None if found.sending_since else arrived
            self.done[what] += 1
        except NotFound:
            self.done["refused"] += 1


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading a file and writing it again there is time enough for another process."""
    write = atomic_files.write

    def slow(path: Path, body: bytes, *, new: bool = False) -> bool:
        time.sleep(random.random() * 0.004)
        return write(path, body, new=new)

    monkeypatch.setattr(atomic_files, "write", slow)


@pytest.mark.usefixtures("slow_disk")
def test_a_person_and_a_runner_never_write_over_each_other(tmp_path: Path) -> None:
    """An edit in time goes out, a discarded delivery does not come back, and nothing goes twice
    without a mark."""
    seed = int(os.environ.get("ACKBONE_SEED", random.randrange(1_000_000)))
    print(f"seed {seed}")
    chance = random.Random(seed)
    names = [f"r{n:04}" for n in range(2000 if SOAK else 150)]
    witness = Witness(random.Random(seed))
    person = Person(tmp_path, witness, chance)
    feeder = DeliveryQueue(tmp_path)
    runner = DeliveryRunner(DeliveryQueue(tmp_path), witness, wait_scale=0.01)
    runner.start()
    for at, name in enumerate(names):
        feeder.put(QueuedDelivery(name, "chat", f"to {name}", "as it was", feeder.now()))
        person.act(chance.choice(names[max(0, at - 5) : at + 1]))
    deadline = time.monotonic() + 120
    while left := [path.stem for path in tmp_path.glob("*.json")]:
        assert time.monotonic() < deadline
        person.act(chance.choice(left))
    runner.stop()
    assert runner.failure is None
    failed = {each.id for each in feeder.load_failed()}
    for name in names:
        got = witness.of(name)
        assert sum(not again for _, again in got) <= 1, f"{name} went twice without a mark"
        if name in person.discarded:
            assert name not in failed, f"{name} came back"
            assert person.discarded[name] in (None, len(got)), f"{name} went all the same"
        elif name not in failed:
            assert got, f"{name} is lost"
            wanted = person.texts.get(name, "as it was")
            assert wanted in (None, got[-1][0]), f"{name} went out without its last edit"
    assert min(person.done[what] for what in ("edit", "retry", "discard")) > 0, "they never met"
    print(f"{len(names)} deliveries, {dict(person.done)}, {len(failed)} failed")
