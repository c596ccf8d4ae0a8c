"""A full disk: what cannot be kept is refused before it is accepted, and nothing else suffers.

The disk is a small tmpfs, filled up and freed again under a real worker.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ackbone.app import App
from ackbone.composition.background import relays_of
from ackbone.config import load_config
from ackbone.core.errors import StoreFull
from ackbone.store.sqlite.migrate import PAGE_SIZE
from tests.faults.waiting import PATIENCE_S, until
from tests.servers.stores import sqlite_store

APP = Path(__file__).with_name("patient_app.py")
LEASE_S = 2.0
DISK = "8m"


@pytest.fixture
def disk(home: Path) -> Iterator[Path]:
    """A small file system of this test alone, as ACKBONE_HOME."""
    place = home / "disk"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode != 0:
        why = f"a full disk takes a tmpfs of our own, and mounting one takes root: {mount.stderr}"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


class Worker:
    """One worker process on the small disk."""

    def __init__(self, home: Path, disk: Path) -> None:
        self.database = disk / "ackbone.db"
        self.log = home / "worker.log"
        signs = home / "signs"
        signs.mkdir()
        self.go = signs / "go"
        variables = {
            **os.environ,
            "ACKBONE_HOME": str(disk),
            "ACKBONE_SIGNS": str(signs),
            "ACKBONE__WORKER__LEASE_S": str(LEASE_S),
        }
        command = [sys.executable, "-m", "ackbone.processes.worker_process", f"{APP}:app"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)

    def ask(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=30)) as c:
            return c.execute(sql, values).fetchall()

    def status(self, message_id: str) -> object:
        found = self.ask("SELECT status FROM queue_executions WHERE message_id = ?", message_id)
        return found[0][0] if found else None

    def beat(self) -> float:
        """The uptime that the worker last wrote into its sign of life."""
        signs = [p for p in Path(f"{self.database}.workers").iterdir() if p.name.isdigit()]
        return max(float(struct.unpack("<d", sign.read_bytes()[:8])[0]) for sign in signs)

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@pytest.fixture
def worker(home: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setenv("ACKBONE_HOME", str(disk))
    worker = Worker(home, disk)
    yield worker
    worker.stop()


def fill(disk: Path, *, leave: int = 32 * PAGE_SIZE) -> Path:
    """A file that takes every byte that is left, but for a few pages."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65_536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
        file.truncate(file.tell() - leave)
    return filler


async def send_until_refused(app: App) -> tuple[list[str], list[str]]:
    """Send until there is no room, and some more; returns the accepted and the refused."""
    accepted: list[str] = []
    refused: list[str] = []
    while len(refused) < 5:
        name = f"m{len(accepted) + len(refused)}"
        try:
            await app.send("quick", {"text": "x" * 500}, id=name)
            accepted.append(name)
        except StoreFull:
            refused.append(name)
    return accepted, refused


async def test_a_full_disk_refuses_and_goes_on_when_there_is_room(
    worker: Worker, disk: Path
) -> None:
    async with App(load_config()) as app:
        await app.send("patient", {}, id="long")
        await until(lambda: worker.status("long") == "running", "the worker begins")
        filler = fill(disk)
        accepted, refused = await send_until_refused(app)
        print(f"{len(accepted)} accepted on the last pages, {len(refused)} refused")

        # The run ends while nothing can be written; the lease is kept all the same.
        worker.go.touch()
        begun = worker.beat()
        await until(
            lambda: worker.beat() > begun + 1.5 * LEASE_S,
            "the worker's lease is renewed on a full disk",
        )
        assert worker.process.poll() is None
        assert worker.ask("SELECT 1 FROM event_log WHERE event_type = 'task.lost'") == []
        with pytest.raises(StoreFull, match="nothing was written"):
            await app.send("quick", {"text": "x" * 500}, id="still-full")

        filler.unlink()
        await app.send("quick", {}, id="after")
        for name in ("long", "again", *accepted, "after"):
            await until(lambda n=name: worker.status(n) == "succeeded", f"{name} succeeds")  # type: ignore[misc]
    assert worker.process.poll() is None, "the worker went on without a restart"
    ids = {name for (name,) in worker.ask("SELECT message_id FROM queue_executions")}
    ids |= {name for (name,) in worker.ask("SELECT message_id FROM messages")}
    assert ids == {"long", "again", *accepted, "after"}, "what was refused must not be there"
    finals = worker.ask(
        "SELECT task_id, count(*) FROM event_log WHERE event_type = 'task.succeeded' GROUP BY 1"
    )
    assert all(count == 1 for _, count in finals)
    (attempts,) = worker.ask("SELECT attempt FROM queue_executions WHERE message_id = 'long'")[0]
    assert attempts == 1
    assert worker.stop() == 0


async def test_a_file_that_is_opened_on_a_full_disk_loses_nothing(
    home: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACKBONE_HOME", str(disk))
    async with App(load_config()) as app:
        await app.send("quick", {}, id="kept")
        filler = fill(disk)
        accepted, _ = await send_until_refused(app)
    with closing(sqlite3.connect(disk / "ackbone.db")) as conn:
        found = {name for (name,) in conn.execute("SELECT message_id FROM messages")}
    assert found == {"kept", *accepted}
    filler.unlink()
    async with App(load_config()) as app:
        await app.send("quick", {}, id="again")


@pytest.mark.parametrize("database", ["new", "used"])
async def test_wherever_the_room_ends_a_start_says_so(
    disk: Path, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    """A little more room each time: every file that a start makes is once the one without."""
    home = disk / "home"
    monkeypatch.setenv("ACKBONE_HOME", str(home))
    refused: list[str] = []
    for leave in range(0, 128 * PAGE_SIZE, 4096):
        shutil.rmtree(home, ignore_errors=True)
        if database == "used":
            await open_and_register()
        filler = fill(disk, leave=leave)
        try:
            await open_and_register()
        except StoreFull as error:
            refused.append(str(error))
        else:
            break
        finally:
            filler.unlink()
    else:
        pytest.fail("there was never enough room")
    print(f"{len(refused)} starts were refused")
    assert len(refused) > 1
    assert all(f"no room left on the disk of {home}" in words for words in refused)


async def open_and_register() -> None:
    """What every worker process does when it starts."""
    async with App(load_config()) as app:
        relays_of(app, spawn_solo=False)
        worker = await app.store.register("starting")
        await app.store.leave(worker)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["send", "--type", "quick"], 6),
        (["stats"], 6),
        (["dev", f"{APP}:app"], 6),
        (["run", f"{APP}:app", "--until-idle"], 1),
    ],
)
async def test_commands_on_a_full_disk_say_so_and_where(
    disk: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    monkeypatch.setenv("ACKBONE_HOME", str(disk))
    monkeypatch.setenv("ACKBONE_SIGNS", str(disk))
    await open_and_register()
    fill(disk, leave=0)
    done = subprocess.run(
        [sys.executable, "-m", "ackbone", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert f"no room left on the disk of {disk / 'ackbone.db'}" in done.stderr
    assert "disk I/O error" not in done.stderr


async def test_a_run_that_begins_on_a_full_disk_waits_for_room(
    home: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACKBONE_HOME", str(disk))
    monkeypatch.setenv("ACKBONE_SIGNS", str(disk))
    await open_and_register()
    filler = fill(disk, leave=0)
    log = home / "run.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ackbone", "run", f"{APP}:app"], stdout=output, stderr=output
        )
    try:
        # More often than starts may fail for other reasons.
        await until(lambda: log.read_text().count("another one starts") > 5, "it tries again")
        filler.unlink()
        async with App(load_config()) as app:
            await app.send("quick", {}, id="after")
            status = "SELECT status FROM queue_executions WHERE message_id = 'after'"
            await until(
                lambda: sqlite_store(app).file.read_sync(
                    lambda conn: conn.execute(status).fetchone() == ("succeeded",)
                ),
                "it works now",
            )
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
