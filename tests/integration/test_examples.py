"""The examples, as a newcomer runs them: real processes, until nothing is left to do.

The same files run on each broker. `trigger.py` brings a queue of its own.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ackbone import App
from tests.integration.conftest import on_every_broker, stored

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE_S = 90.0


class Shelf:
    """Sends to an example, runs it, and asks what became of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._running: list[subprocess.Popen[bytes]] = []

    def send(self, *messages: tuple[str, Any, dict[str, Any]]) -> list[str]:
        async def all_of_them() -> list[str]:
            async with App() as app:
                return [(await app.send(kind, body, **opts)).id for kind, body, opts in messages]

        return asyncio.run(all_of_them())

    def start(self, example: str, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "ackbone.processes.worker_process",
            f"{EXAMPLES / example}:app",
        ]
        child = subprocess.Popen([*command, *options], env={**os.environ, **environment})
        self._running.append(child)
        return child

    def run(self, example: str, **environment: str) -> None:
        """The example's worker, until idle."""
        child = self.start(example, "--until-idle", **environment)
        assert child.wait(PATIENCE_S) == 0

    def rows(self, sql: str, *values: Any) -> list[Any]:
        return stored(self.home, sql, *values)

    def statuses(self) -> dict[str, str]:
        return dict(self.rows("SELECT message_id, status FROM queue_executions"))

    def replies(self) -> list[str]:
        return [text for (text,) in self.rows("SELECT content FROM deliveries ORDER BY seq")]

    def until(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end, f"did not happen: {what}"
            time.sleep(0.02)

    def close(self) -> None:
        for child in self._running:
            if child.poll() is None:
                child.kill()
            child.wait()


@pytest.fixture
def shelf(home: Path, broker: str) -> Iterator[Shelf]:
    made = Shelf(home)
    yield made
    made.close()


@on_every_broker
def test_echo_answers(shelf: Shelf) -> None:
    (sent,) = shelf.send(("chat", {"text": "hi"}, {}))
    shelf.run("echo.py")
    assert shelf.statuses() == {sent: "succeeded"}
    assert shelf.replies() == ["You said: hi"]


@on_every_broker
def test_chat_keeps_each_conversation_in_order(shelf: Shelf) -> None:
    texts = ["hello", "how are you?", "fine", "and you?", "bye"]
    people = ("ada", "bo")
    shelf.send(
        *(("said", {"text": text}, {"ordering_key": who}) for text in texts for who in people)
    )
    shelf.run("chat.py")
    assert set(shelf.statuses().values()) == {"succeeded"}
    for who in people:
        said = [reply for reply in shelf.replies() if reply.startswith(who)]
        assert said == [f"{who}: {text}" for text in texts]


@on_every_broker
def test_shop_refuses_what_is_no_order(shelf: Shelf) -> None:
    (sent,) = shelf.send(("order", {"amount": "lots"}, {}))
    shelf.run("shop.py", SHOP_CHARGES=str(shelf.home / "charges.log"))
    assert shelf.statuses() == {sent: "failed"}
    assert shelf.rows("SELECT reason FROM dead_letters") == [("final_error",)]
    assert not (shelf.home / "charges.log").exists()


@on_every_broker
def test_shop_charges_once_though_its_worker_is_killed(shelf: Shelf) -> None:
    """Killed between the charge and the commit: taken up again, not charged again."""
    charges = shelf.home / "charges.log"
    # It waits long enough to be killed, and lets the second run end soon: the file says when.
    (order,) = shelf.send(("order", {"customer": "ada", "amount": 42, "think_s": 3}, {}))
    first = shelf.start("shop.py", SHOP_CHARGES=str(charges))
    done = "SELECT 1 FROM effects WHERE message_id = ? AND state = 'done'"
    shelf.until(lambda: bool(shelf.rows(done, order)), "the charge is recorded")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert shelf.statuses()[order] == "running", "it was killed before its commit"
    shelf.run("shop.py", SHOP_CHARGES=str(charges))
    assert set(shelf.statuses().values()) == {"succeeded"}
    assert len(shelf.statuses()) == 2, "the order and its parcel"
    (charge,) = charges.read_text().splitlines()
    assert json.loads(charge) == {"key": f"{order}:charge", "customer": "ada", "amount": 42}
    assert len(shelf.replies()) == 1
    kinds = [kind for (kind,) in shelf.rows("SELECT event_type FROM event_log")]
    assert kinds.count("task.reclaimed") == 1
    assert kinds.count("effect.begun") == 1


def test_trigger_greets_once_and_buries_what_is_no_json(home: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "trigger.py")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    greeting, acked, dead = ran.stdout.splitlines()
    assert greeting == "greeting: hello, Ada"
    assert acked == "acknowledged: m-1, m-2"
    assert dead.startswith("dead: m-3: Failed to parse JSON")
