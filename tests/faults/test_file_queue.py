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
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from holdfast.delivery.file_queue import DeliveryQueue
from holdfast.delivery.queued import QueuedDelivery
from holdfast.delivery.recovery import recovery_scan
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
    "ack": lambda queue, delivery: queue.ack(delivery.id),
}


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
        expected = 0 if name == "ack" and not found else 1
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


@pytest.mark.parametrize("name", [name for name in ACTS if name != "ack"])
def test_killed_in_the_middle_of_a_write(tmp_path: Path, name: str) -> None:
    """A file is written whole or not at all: not the first half of it in the old one's place."""
    kills = _kill_everywhere(tmp_path, name, _in_a_write, every=40)
    assert kills >= 3, "the act wrote nothing in which it could have been killed"


SENDER = """
import os, sys, time
from pathlib import Path
from holdfast.delivery.file_queue import DeliveryQueue
from holdfast.delivery.runner import DeliveryRunner

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
        "from holdfast.delivery.file_queue import DeliveryQueue\n"
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
