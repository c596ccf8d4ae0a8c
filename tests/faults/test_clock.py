"""Somebody sets the clock, by an hour or a day, forwards or back, while workers run.

The workers are real processes under libfaketime: their wall clock is what a file says, their steady
clock is the machine's. Nothing live is reclaimed, nothing expires early, and what was due in
seconds does not wait for a day.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ackbone.app import App
from ackbone.config import load_config
from tests.faults.waiting import wait_until
from tests.servers.faketime import ClockFile

HOUR, DAY = 3600, 86_400
APP = Path(__file__).with_name("patient_app.py")
SETTINGS = {"WORKER__SHUTDOWN_TIMEOUT_S": "5"}
"""The usual lease: a machine that stands still for two seconds is another test's matter."""


class Fleet:
    """Two workers whose wall clock this test sets."""

    def __init__(self, home: Path) -> None:
        self.database = home / "ackbone.db"
        self.log = home / "workers.log"
        self.clock = ClockFile(home / "clock")
        signs = home / "signs"
        signs.mkdir()
        self.go = signs / "go"
        self._variables = {
            **os.environ,
            "ACKBONE_HOME": str(home),
            "ACKBONE_SIGNS": str(signs),
            **{f"ACKBONE__{name}": value for name, value in SETTINGS.items()},
            **self.clock.variables,
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with self.log.open("ab") as log:
            for _ in range(2):
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "ackbone.processes.worker_process", f"{APP}:app"],
                        env=self._variables,
                        stderr=log,
                        stdout=log,
                    )
                )

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=30)) as c:
            return c.execute(sql, values).fetchall()

    def status(self, message_id: str) -> object:
        found = self.ask("SELECT status FROM queue_executions WHERE message_id = ?", message_id)
        return found[0][0] if found else None

    def wait_for(self, message_id: str, status: str) -> None:
        def reached() -> bool:
            return self.status(message_id) == status

        try:
            wait_until(reached, f"{message_id} becomes {status}")
        except AssertionError as error:
            raise AssertionError(self._told(error, message_id)) from None

    def wait_for_event(self, message_id: str, kind: str) -> None:
        try:
            wait_until(lambda: (message_id,) in self.events(kind), f"{kind} of {message_id}")
        except AssertionError as error:
            raise AssertionError(self._told(error, message_id)) from None

    def _told(self, error: AssertionError, message_id: str) -> str:
        """What is known when something does not happen."""
        log = self.log.read_text()
        workers = self.ask("SELECT worker_id, name, state, started_at, ended_at FROM workers")
        steps = self.ask(
            "SELECT event_type, data, created_at, worker_id FROM event_log WHERE task_id = ?",
            message_id,
        )
        shown = log if len(log) < 8000 else f"{log[:6000]}\n…\n{log[-2000:]}"
        return f"{error}; it is {self.status(message_id)}\n{workers}\n{steps}\n{shown}"

    def noticed(self) -> set[int]:
        """Processes that said so."""
        lines = [line for line in self.log.read_text().splitlines() if "nothing expires" in line]
        return {json.loads(line)["pid"] for line in lines}

    def events(self, kind: str) -> list[tuple[object, ...]]:
        return self.ask("SELECT task_id FROM event_log WHERE event_type = ?", kind)


@pytest.fixture
def fleet(home: Path) -> Iterator[Fleet]:
    fleet = Fleet(home)
    yield fleet
    fleet.stop()


async def send_all(home: Path) -> None:
    async with App(load_config()) as app:
        await app.send("quick", {}, id="first", idempotency_key="used")
        await app.send("patient", {}, id="long", ordering_key="chat")
        await app.send("quick", {}, id="mortal", ordering_key="chat", ttl_s=600)
        await app.send("failing", {}, id="retried")
        await app.send("quick", {}, id="delayed", delay_s=6)
        await app.send("quick", {}, id="far", delay_s=1800)


@pytest.mark.parametrize("jump", [HOUR, DAY, -HOUR, -DAY], ids=["+1h", "+1d", "-1h", "-1d"])
async def test_the_clock_is_set(fleet: Fleet, home: Path, jump: int) -> None:
    await send_all(home)
    fleet.start()
    alive = "SELECT count(*) FROM workers WHERE state = 'alive' AND name LIKE 'patient%'"
    wait_until(lambda: fleet.ask(alive) == [(2,)], "both workers are up")
    fleet.wait_for("first", "succeeded")
    fleet.wait_for("long", "running")
    fleet.wait_for("mortal", "queued")
    fleet.wait_for_event("retried", "task.retried")
    (far_due,) = fleet.ask("SELECT due_at FROM messages WHERE message_id = 'far'")[0]
    (attempts,) = fleet.ask("SELECT attempt FROM queue_executions WHERE message_id = 'retried'")[0]

    fleet.clock.set(jump)

    # Work goes on: what was due in seconds is done in seconds, not in a day.
    fleet.wait_for("retried", "succeeded")
    fleet.wait_for("delayed", "succeeded")
    wait_until(lambda: len(fleet.noticed()) == 2, "both workers notice")
    assert attempts == 1
    # The long run is still the first one's, and what waits behind it has not expired.
    assert fleet.status("long") == "running"
    fleet.go.touch()
    fleet.wait_for("long", "succeeded")
    fleet.wait_for("mortal", "succeeded")
    fleet.wait_for("again", "duplicate")
    assert fleet.events("task.lost") == []
    assert fleet.events("task.expired") == []
    # What is due in half an hour is due in half an hour still, by the new clock.
    (moved_due,) = fleet.ask("SELECT due_at FROM messages WHERE message_id = 'far'")[0]
    assert isinstance(moved_due, int)
    assert isinstance(far_due, int)
    assert abs(moved_due - far_due - jump * 1_000_000) < 2_000_000
    (expires,) = fleet.ask("SELECT expires_at FROM idempotency_keys WHERE key = 'used'")[0]
    (done,) = fleet.ask("SELECT completed_at FROM queue_executions WHERE message_id = 'first'")[0]
    assert isinstance(expires, int)
    assert isinstance(done, int)
    assert abs(expires - done - (HOUR + jump) * 1_000_000) < 2_000_000
    assert [process.poll() for process in fleet.processes] == [None, None]
