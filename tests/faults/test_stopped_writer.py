"""A process that stands still while it holds the write lock of the SQLite file.

Commands that only read do not need the lock. Commands that write give up in time and name the
process. Ctrl+C and SIGTERM end every one of them at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import pytest

from ackbone.core.errors import StoreUnavailable
from ackbone.sqlitefile.file import close_file, open_file
from ackbone.sqlitefile.sharing import Turnstile
from tests.faults.conftest import MakeFleet
from tests.faults.harness import PATIENCE_S, TARGET, Fleet

HOLDER = Path(__file__).with_name("stopped_writer.py")
SEND_TIMEOUT_S = 2.0
AT_ONCE_S = 15.0
"""Far below any wait that a stuck command would make, and enough for a slow machine."""
READING: Sequence[Sequence[str]] = (
    ("stats",),
    ("doctor",),
    ("dlq", "list"),
    ("parked", "list"),
    ("trace", "first"),
    ("tail", "--no-follow"),
    ("deliveries", "list"),
    ("approvals", "list"),
    ("queues", "list"),
    ("config", "show"),
)
WRITING: Sequence[Sequence[str]] = (
    ("send", "--type", "work", "--payload", "{}"),
    ("queues", "pause", "default"),
)


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    """One message was sent, so there is a database."""
    fleet = make_fleet(SEND_TIMEOUT_S=SEND_TIMEOUT_S)
    sent = _command(fleet, "send", "--type", "work", "--id", "first", "--payload", "{}")
    _, said = sent.communicate(timeout=PATIENCE_S)
    assert sent.returncode == 0, said
    return fleet


@pytest.fixture
def holder(fleet: Fleet) -> Iterator[subprocess.Popen[str]]:
    with _stopped_writer(fleet) as holder:
        yield holder


@contextmanager
def _stopped_writer(fleet: Fleet) -> Iterator[subprocess.Popen[str]]:
    """A process that is stopped in the middle of its write transaction."""
    command = [sys.executable, str(HOLDER), str(fleet.database)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert _pipe(holder.stdout).readline() == "holding\n"
            fleet.wait_for(lambda: _state(holder.pid) == "T", "the holder stands still")
            yield holder
        finally:
            holder.kill()


def test_commands_that_read_need_no_lock(fleet: Fleet, holder: subprocess.Popen[str]) -> None:
    running = {words: _command(fleet, *words) for words in READING}
    ends = {words: each.communicate(timeout=PATIENCE_S) for words, each in running.items()}
    failed = {w: ends[w] for w, each in running.items() if each.returncode and w != ("doctor",)}
    assert not failed
    said = ends[("doctor",)][0]
    assert f"kill -CONT {holder.pid}" in said


def test_commands_that_write_name_the_process(fleet: Fleet, holder: subprocess.Popen[str]) -> None:
    begun = time.monotonic()
    running = {words: _command(fleet, *words) for words in WRITING}
    for words, each in running.items():
        _, said = each.communicate(timeout=PATIENCE_S)
        took = time.monotonic() - begun
        print(words, f"{took:.1f} s", said)
        assert each.returncode == 6
        assert f"process {holder.pid} (" in said
        assert "stopped (state T)" in said
        assert f"kill -CONT {holder.pid}" in said
        assert "Nothing was written" in said
    holder.send_signal(signal.SIGCONT)
    assert _pipe(holder.stdout).readline() == "committed\n"
    assert holder.wait(PATIENCE_S) == 0
    assert fleet.rows("SELECT message_id FROM messages") == [("first",)]
    assert fleet.rows("SELECT count(*) FROM sources WHERE paused_at IS NOT NULL") == [(0,)]


async def test_what_did_not_get_its_turn_in_time_is_not_written_later(
    fleet: Fleet, holder: subprocess.Popen[str]
) -> None:
    def add(role: str) -> Callable[[sqlite3.Connection], object]:
        return lambda conn: conn.execute("INSERT INTO roles (role) VALUES (?)", (role,))

    file = open_file(Path(fleet.database))
    try:
        with pytest.raises(StoreUnavailable, match=f"kill -CONT {holder.pid}"):
            await file.write(add("late"), within_s=0.2)
        kept = asyncio.create_task(file.write(add("patient")))
        with pytest.raises(StoreUnavailable, match="Nothing was written"):
            await file.write(add("late, too"), within_s=0.2)
        holder.send_signal(signal.SIGCONT)
        await kept
        await file.write(add("next"), within_s=PATIENCE_S)
    finally:
        await asyncio.to_thread(close_file, file)
    assert fleet.rows("SELECT role FROM roles WHERE role <> 'clock' ORDER BY role") == [
        ("next",),
        ("patient",),
    ]


def test_an_upgrade_of_the_schema_gives_up_in_time(
    fleet: Fleet, holder: subprocess.Popen[str]
) -> None:
    with (
        closing(Turnstile(Path(fleet.database))) as turnstile,
        pytest.raises(StoreUnavailable, match=f"kill -CONT {holder.pid}"),
        turnstile.within(0.2),
    ):
        raise AssertionError("the lock is held")
    holder.send_signal(signal.SIGCONT)
    assert holder.wait(PATIENCE_S) == 0
    with closing(Turnstile(Path(fleet.database))) as turnstile, turnstile.within(PATIENCE_S):
        pass  # the thread that gave up has left the lock


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        (WRITING[0], signal.SIGINT, 130),
        (WRITING[1], signal.SIGTERM, 143),
        (("run", TARGET), signal.SIGTERM, 0),
    ],
)
def test_a_signal_ends_a_command_that_waits(
    fleet: Fleet,
    holder: subprocess.Popen[str],
    words: Sequence[str],
    number: signal.Signals,
    code: int,
) -> None:
    waiting = _command(fleet, *words, SEND_TIMEOUT_S=300)
    fleet.wait_for(lambda: _waits(fleet, holder.pid), "it waits for the lock")
    begun = time.monotonic()
    waiting.send_signal(number)
    _, said = waiting.communicate(timeout=PATIENCE_S)
    took = time.monotonic() - begun
    print(f"{took:.1f} s", said)
    assert waiting.returncode == code
    assert took < AT_ONCE_S
    assert "Traceback" not in said
    assert "never retrieved" not in said


def test_a_worker_that_waits_logs_the_process_and_goes_on(fleet: Fleet) -> None:
    """A worker that is already up keeps its claims, names the process, and says when it is over."""
    fleet.start()
    log = fleet.home / "worker-1.log"
    with _stopped_writer(fleet) as holder:
        named = f"kill -CONT {holder.pid}"
        fleet.wait_for(lambda: named in log.read_text(), "the worker names the process")
        holder.send_signal(signal.SIGCONT)
        fleet.wait_for(lambda: "can be written again" in log.read_text(), "it is over")
        assert holder.wait(PATIENCE_S) == 0
    assert log.read_text().count(named) == 1


def _command(fleet: Fleet, *words: str, **settings: object) -> subprocess.Popen[str]:
    own = {f"ACKBONE__{name}": str(value) for name, value in settings.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "ackbone", *words],
        env={**fleet.environment, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _waits(fleet: Fleet, holder: int) -> bool:
    """Whether a process waits for the gate or the lock that the holder has."""
    inodes = {str(os.stat(f"{fleet.database}.{part}").st_ino) for part in ("gate", "lock")}
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(
        fields[1] == "->" and fields[5] != str(holder) and fields[6].split(":")[2] in inodes
        for fields in waiting
    )


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
