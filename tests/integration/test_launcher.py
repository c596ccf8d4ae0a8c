"""The process that workers are forked from, as the one that wants workers sees it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ackbone.processes import supervisor
from ackbone.processes.launcher import Launcher
from tests.faults.waiting import PATIENCE_S, wait_until

APP = """
import time
from pathlib import Path

Path({place!r}).with_suffix(".loaded").touch()
time.sleep(600)
"""


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


@pytest.fixture
def target(home: Path) -> Path:
    place = home / "slow.py"
    place.write_text(APP.format(place=str(place)))
    return place


def test_a_stop_right_after_the_fork_is_heard(launcher: Launcher, target: Path) -> None:
    """The launcher itself ignores the signal."""
    for _ in range(10):
        process = launcher.start([f"{target}:app"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


def test_the_number_of_a_process_is_used_again(launcher: Launcher, target: Path) -> None:
    """The kernel begins anew when it has given out all numbers."""
    launcher._codes = dict.fromkeys(range(2**22), 9)
    process = launcher.start([f"{target}:app"])
    assert process.poll() is None
    wait_until(target.with_suffix(".loaded").exists, "it runs")
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_one_that_ended_with_a_question_unread(launcher: Launcher, target: Path) -> None:
    process = launcher.start([f"{target}:app"])
    os.kill(launcher._process.pid, signal.SIGSTOP)
    launcher._sock.send(b"[]")
    launcher._process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGTERM, "its workers end with it"


def test_suspects_are_looked_after_when_the_launcher_is_gone(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that ended with the launcher would take all workers with it."""
    said: list[str] = []
    watching = supervisor.Supervisor(f"{target}:app", say=said.append)
    dead = watching._launcher = Launcher()
    dead._process.kill()
    dead._process.wait()
    (place,) = watching._places
    monkeypatch.setattr(place, "heard_of_suspects", lambda: True)
    watching._look_at_warden()
    warden = watching._warden.process
    assert warden is not None
    wait_until(target.with_suffix(".loaded").exists, "it runs")
    warden.kill()
    warden.wait(PATIENCE_S)
    watching._look_at_warden()
    dead.close()
    assert "workers are started without it" in said[0]
    assert "looks after messages which crashed their workers ended (killed by SIGKILL)" in said[1]
