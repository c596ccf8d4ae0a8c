"""A bot that merges: many texts to one chat within its limit, and a kill in mid-call."""

from __future__ import annotations

import json
import subprocess
import urllib.request

from ackbone.core.outbound.delivery import MERGE_MOST, New
from ackbone.delivery.channels.reply_text import BETWEEN, MARK
from tests.faults.test_delivery_limits import Scene, scene
from tests.faults.waiting import wait_until

__all__ = ["scene"]


def new(count: int) -> list[New]:
    return [
        New(id=f"{n:03}", channel="telegram", recipient="4711", content=f"text {n}")
        for n in range(count)
    ]


def sender(scene: Scene) -> subprocess.Popen[bytes]:
    return scene.send(3, ACKBONE_BOT_MERGES="1", ACKBONE__WORKER__LEASE_S="2")


def hang_after_the_next(scene: Scene) -> None:
    """The next message is taken, and its answer does not come."""
    request = urllib.request.Request(
        f"{scene.url}/_test/faults",
        json.dumps([{"kind": "hang", "after": True}]).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=30).close()


def texts(scene: Scene) -> list[str]:
    return [str(entry["text"]) for entry in scene.log()]


async def test_a_chat_that_takes_one_message_a_second_gets_many_texts(scene: Scene) -> None:
    count = 3 * MERGE_MOST
    await scene.put(new(count))
    sender(scene)
    wait_until(lambda: scene.has_taken(3), "three messages arrived")
    assert [text.count("text") for text in texts(scene)] == [MERGE_MOST] * 3
    assert BETWEEN.join(texts(scene)).split(BETWEEN) == [f"text {n}" for n in range(count)]
    assert all(entry["code"] == 200 for entry in scene.log()), "none too early"


async def test_killed_in_the_middle_of_a_call_all_of_them_are_repeated_and_marked(
    scene: Scene,
) -> None:
    await scene.put(new(3))
    hang_after_the_next(scene)
    killed = sender(scene)
    wait_until(lambda: len(scene.log()) == 1, "it is under way")
    await scene.put(new(4))
    killed.kill()
    killed.wait()
    sender(scene)
    wait_until(lambda: len(scene.log()) == 5, "the others arrived")
    assert texts(scene) == [
        BETWEEN.join(["text 0", "text 1", "text 2"]),
        *[f"{MARK}text {n}" for n in range(3)],
        "text 3",
    ]
