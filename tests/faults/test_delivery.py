"""Replies to a receiver with moods, from a sender that is killed again and again: each ends sent or
failed with its reason, in the order of its conversation, twice only where nobody could know."""

from __future__ import annotations

import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ackbone.app import App
from ackbone.config import load_config
from ackbone.core.outbound.delivery import New
from tests.faults.waiting import wait_until

MOODS = (
    *[["ok"]] * 10,
    ["429", "ok"],
    ["429", "429", "ok"],
    ["500", "ok"],
    ["503", "500", "ok"],
    ["hang", "ok"],
    ["reset", "ok"],
    ["400"],
    ["410"],
    ["302"],
    ["500"],
)
SETTINGS = {
    "DELIVERY__WAIT_SCALE": "0.01",
    "DELIVERY__TIMEOUT_S": "0.5",
    "BREAKER__FAILURES": "1000000",  # one receiver for all: its moods are not an outage
    "WORKER__LEASE_S": "2",
    "LOG__LEVEL": "error",
}
ROOT = Path(__file__).parents[2]


class Request(NamedTuple):
    """A line of the receiver's log."""

    at: float
    id: str
    conversation: str
    n: int
    mood: str
    taken: bool


class Scene:
    """A receiver, a store full of deliveries, a sender that can be killed."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home / "requests.jsonl"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}/hook"
        command = [sys.executable, "-m", "tests.servers.moody_http", str(self.port), str(self.log)]
        self.receiver = subprocess.Popen(command, cwd=ROOT)
        wait_until(self._listens, "the receiver is there")
        self.sender: subprocess.Popen[bytes] | None = None
        self.variables = {
            "ACKBONE_HOME": str(home),
            **{f"ACKBONE__{name}": value for name, value in SETTINGS.items()},
        }

    def _listens(self) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self.port)) == 0

    def start(self) -> None:
        with (self.home / "sender.log").open("ab") as log:
            self.sender = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ackbone.processes.worker_process",
                    "tests/faults/delivery_app.py",
                ],
                cwd=ROOT,
                env={**os.environ, **self.variables},
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        assert self.sender is not None
        assert self.sender.poll() is None, (self.home / "sender.log").read_text()[-3000:]
        self.sender.kill()
        self.sender.wait()

    async def put(self, new: list[New]) -> None:
        config = load_config(environ={}, cwd=self.home, overrides={"home": str(self.home)})
        async with App(config) as app:
            deliveries = app.storage.deliveries(app.store)
            for start in range(0, len(new), 500):
                await deliveries.put(new[start : start + 500])

    def requests(self) -> list[Request]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [Request(**json.loads(line)) for line in lines]

    def has_met(self, wanted: int) -> bool:
        return len(self.requests()) >= wanted

    def rows(self, statement: str) -> list[Any]:
        with sqlite3.connect(self.home / "ackbone.db", timeout=30) as conn:
            return conn.execute(statement).fetchall()

    def waiting(self) -> int:
        ((n,),) = self.rows("SELECT count(*) FROM deliveries WHERE status NOT IN ('sent','failed')")
        return int(n)

    def close(self) -> None:
        for process in (self.sender, self.receiver):
            if process is not None:
                process.kill()
                process.wait()


@pytest.fixture
def scene(home: Path) -> Iterator[Scene]:
    scene = Scene(home)
    yield scene
    scene.close()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _made(scene: Scene, chance: random.Random, conversations: int, each: int) -> list[New]:
    """In the order of their conversations, these mixed."""
    new = []
    for n in range(each):
        for c in chance.sample(range(conversations), conversations):
            moods = chance.choice(MOODS)
            new.append(
                New(
                    id=f"{c:04}-{n:04}",
                    channel="webhook",
                    recipient=scene.url,
                    content=json.dumps({"n": n, "moods": moods}),
                    conversation=f"c{c}",
                )
            )
    return new


async def test_a_sender_that_is_killed_again_and_again(scene: Scene, soak: bool) -> None:
    seed = int(os.environ.get("ACKBONE_SEED", random.randrange(1_000_000)))
    print(f"seed {seed}")
    chance = random.Random(seed)
    conversations, each, kills = (250, 20, 30) if soak else (100, 10, 6)
    new = _made(scene, chance, conversations, each)
    half = len(new) // 2
    await scene.put(new[:half])
    cut: list[float] = []
    for n in range(kills):
        before = len(scene.requests())
        scene.start()
        if n == kills // 2:
            await scene.put(new[half:])
        # Killed while it sends: after some more requests, at a moment of its own.
        wanted = before + chance.randint(1, len(new) // kills)
        wait_until(partial(scene.has_met, wanted), "more requests")
        time.sleep(chance.random() * 0.05)
        scene.kill()
        cut.append(time.time())
    scene.start()
    wait_until(lambda: scene.waiting() == 0, "every delivery has ended", patience_s=300)
    _check(scene, new, cut)


def _check(scene: Scene, new: list[New], cut: list[float]) -> None:
    requests = scene.requests()
    rows = {
        row[0]: row[1:]
        for row in scene.rows(
            "SELECT id, status, last_error, retry_count, resent, calls FROM deliveries"
        )
    }
    assert set(rows) == {each.id for each in new}, "none lost, none invented"
    # By what the senders wrote down: one was killed in mid-send, or its answer came too late.
    doubted = {
        row[0]
        for row in scene.rows(
            "SELECT json_extract(data, '$.delivery_id') FROM event_log WHERE event_type ="
            " 'delivery.reclaimed' OR (event_type = 'delivery.waiting' AND"
            " json_extract(data, '$.error') LIKE '%no answer%')"
        )
    }
    by_id: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_id[request.id].append(request)
    doubles = 0
    for each in new:
        status, error, retries, resent, calls = rows[each.id]
        met = by_id[each.id]
        taken = [request for request in met if request.taken]
        moods = json.loads(each.content)["moods"]
        last = moods[-1]
        assert len(met) <= calls, f"{each.id}: every request is counted"
        if status == "sent":
            assert taken, f"{each.id} counts as sent and never arrived"
        else:
            assert last != "ok" or resent, f"{each.id} failed though it would have been taken"
            assert error, f"{each.id} failed without a reason"
        if len(taken) > 1:
            doubles += 1
            assert resent, f"{each.id} was taken {len(taken)} times and says nothing of it"
        if resent:
            unsure = [r for r in met[:-1] if r.mood in ("hang", "reset")]
            assert unsure or each.id in doubted, f"{each.id}: a repeat without a doubt"
        if set(moods) <= {"429", "ok"} and not resent:
            assert retries == 0, f"{each.id}: being asked to wait costs nothing"
    _check_order(requests)
    sent = sum(row[0] == "sent" for row in rows.values())
    marked = sum(row[3] > 0 for row in rows.values())
    print(
        f"{len(new)} deliveries, {len(cut)} kills, {len(requests)} requests: {sent} sent,"
        f" {len(new) - sent} failed, {marked} sent again in doubt, {doubles} of them arrived twice"
    )


def _check_order(requests: list[Request]) -> None:
    """Nothing of a conversation is tried before what came earlier has ended."""
    tries: dict[str, list[int]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: request.at):
        tries[request.conversation].append(request.n)
    for conversation, order in tries.items():
        assert order == sorted(order), f"{conversation}: {order}"
