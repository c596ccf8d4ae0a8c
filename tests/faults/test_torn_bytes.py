"""Bytes on disk that are not what was written: found, named, never passed over in silence."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from ackbone.app import App
from ackbone.config import Config, Worker
from ackbone.core.errors import StoreCorrupt
from ackbone.engine.context import Context
from ackbone.sqlitefile.file import close_file, open_file
from ackbone.store.sqlite.migrate import PAGE_SIZE, ensure_schema
from ackbone.store.sqlite.recovery import inspect, recover
from tests.conftest import SOAK
from tests.faults.waiting import until

SEEDS = 500 if SOAK else 50
SEEDS_PER_KILL = 10
WRITER = Path(__file__).with_name("durable_writer.py")
WAL_HEADER, FRAME_HEADER, PAGE = 32, 24, PAGE_SIZE


class Victim(NamedTuple):
    """The files of a writer that was killed."""

    database: Path
    accepted: list[str]
    """Ids it was given a yes for."""


def killed_writer(folder: Path, seed: int) -> Victim:
    """Kill a writer with -9 at some moment between two messages or within one."""
    rng = random.Random(seed)
    folder.mkdir()
    database = folder / "ackbone.db"
    ensure_schema(database)
    writer = subprocess.Popen(
        [sys.executable, str(WRITER), str(database)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    with writer.stdout as lines:
        accepted = [next(lines).strip() for _ in range(rng.randint(5, 60))]
        writer.kill()
        accepted += [line.strip() for line in lines if line.endswith("\n")]
    writer.wait()
    return Victim(database, accepted)


def commit_ends(wal: bytes) -> list[int]:
    """Where in the log each commit ends: after the frame that bears the database's new size."""
    salt = wal[16:24]
    ends = []
    for at in range(WAL_HEADER, len(wal) - FRAME_HEADER - PAGE + 1, FRAME_HEADER + PAGE):
        if wal[at + 8 : at + 16] != salt:
            break
        if int.from_bytes(wal[at + 4 : at + 8], "big") > 0:
            ends.append(at + FRAME_HEADER + PAGE)
    return ends


def copied(victim: Victim, folder: Path) -> Path:
    folder.mkdir()
    for part in ("", "-wal", ".witness"):
        shutil.copy(f"{victim.database}{part}", folder / f"ackbone.db{part}")
    return folder / "ackbone.db"


def message_ids(database: Path) -> set[str]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as conn:
        return {name for (name,) in conn.execute("SELECT message_id FROM messages")}


def opens(database: Path) -> None:
    close_file(open_file(database))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torn")


def damaged(wal: bytes, last: int, rng: random.Random) -> tuple[bytes, str]:
    """The log cut, or with one bit flipped, somewhere before the end of its last commit."""
    if rng.random() < 0.5:
        at = rng.randrange(last)
        return wal[:at], f"cut at {at} of {last}"
    at, bit = rng.randrange(last), rng.randrange(8)
    flipped = bytearray(wal)
    flipped[at] ^= 1 << bit
    return bytes(flipped), f"bit {bit} of byte {at} of {last} flipped"


@pytest.mark.parametrize("kill", range(SEEDS // SEEDS_PER_KILL))
def test_a_damaged_log_is_refused_with_the_gap_named(folder: Path, kill: int) -> None:
    victim = killed_writer(folder / f"writer-{kill}", kill)
    for seed in range(kill * SEEDS_PER_KILL, (kill + 1) * SEEDS_PER_KILL):
        rng = random.Random(seed)
        database = copied(victim, folder / f"seed-{seed}")
        log = Path(f"{database}-wal")
        wal = log.read_bytes()
        # The last commit may be one that was not answered any more: up to the one before, each
        # was accepted, and its witness written.
        last = commit_ends(wal)[len(victim.accepted) - 1]
        broken, what = damaged(wal, last, rng)
        log.write_bytes(broken)
        print(f"seed {seed}: {len(victim.accepted)} accepted, {what}")
        _is_refused_then_recovered(database, broken, set(victim.accepted))


def _is_refused_then_recovered(database: Path, log: bytes, accepted: set[str]) -> None:
    report = inspect(database)
    assert report.gap > 0
    assert not report.sound
    with pytest.raises(
        StoreCorrupt, match=rf"the last {report.gap} went missing.*recover"
    ) as error:
        opens(database)
    assert str(report.commits) in str(error.value)
    assert Path(f"{database}-wal").read_bytes() == log, "a refused file must stay as it is"
    left = message_ids(database)
    assert left < accepted

    with pytest.raises(StoreCorrupt, match="Nothing was changed"):
        recover(database, accept_loss=False)
    assert Path(f"{database}-wal").read_bytes() == log
    mended = recover(database, accept_loss=True)
    assert mended.sound
    assert mended.lost_commits == report.gap
    assert mended.copy is not None
    assert (Path(mended.copy) / "ackbone.db-wal").read_bytes() == log
    opens(database)
    assert message_ids(database) == left
    assert recovery_events(database) == [(report.gap, {})]


def recovery_events(database: Path) -> list[tuple[int, dict[str, int]]]:
    with closing(sqlite3.connect(database)) as conn:
        found = conn.execute("SELECT data FROM event_log WHERE event_type = 'ledger.recovered'")
        events = [json.loads(data) for (data,) in found]
    return [(event["lost_commits"], event["lost_rows"]) for event in events]


def test_a_log_cut_behind_the_last_witnessed_commit_is_fine(folder: Path) -> None:
    victim = killed_writer(folder / "fine", 4711)
    database = copied(victim, folder / "fine-cut")
    log = Path(f"{database}-wal")
    wal = log.read_bytes()
    last = commit_ends(wal)[len(victim.accepted) - 1]
    log.write_bytes(wal[:last] + b"\0" * 100)
    opens(database)
    assert message_ids(database) >= set(victim.accepted)
    assert inspect(database).gap == 0


# -- a bit in a stored body -----------------------------------------------------------------------

MARK = "the-one-whose-body-is-hit-"


def flip_in_body(database: Path, rng: random.Random) -> None:
    """Flip one bit in the middle of the marked body, wherever a page holds it."""
    with closing(sqlite3.connect(database)) as conn:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    data = bytearray(database.read_bytes())
    offset, bit = rng.randrange(len(MARK)), rng.randrange(8)
    at, hits = data.find(MARK.encode()), 0
    while at >= 0:
        data[at + offset] ^= 1 << bit
        hits += 1
        at = data.find(MARK.encode(), at + len(MARK))
    assert hits
    database.write_bytes(data)


@pytest.fixture
def config(home: Path) -> Config:
    return Config(home=home, worker=Worker(lease_s=5.0, shutdown_timeout_s=5.0))


def outcome_of(database: Path, message_id: str) -> tuple[str, str | None]:
    with closing(sqlite3.connect(database)) as conn:
        status = conn.execute(
            "SELECT status FROM queue_executions WHERE message_id = ?", (message_id,)
        ).fetchone()
        letter = conn.execute(
            "SELECT reason FROM dead_letters WHERE message_id = ?", (message_id,)
        ).fetchone()
    return status[0], letter[0] if letter else None


def finals(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as conn:
        found = conn.execute(
            "SELECT message_id FROM queue_executions WHERE status IN ('succeeded', 'failed')"
        ).fetchall()
    return [name for (name,) in found]


@pytest.mark.parametrize("seed", range(20 if SOAK else 3))
async def test_a_flipped_body_in_the_queue_is_never_run(config: Config, seed: int) -> None:
    ran: list[str] = []

    async def handler(ctx: Context) -> None:
        ran.append(ctx.message.id)

    async with App(config) as app:
        await app.send("job", {"text": "before"}, id="before")
        await app.send("job", {"text": MARK}, id="hit")
        await app.send("job", {"text": "after"}, id="after")
    flip_in_body(config.store_file, random.Random(seed))
    assert [t.bad_checksums for t in inspect(config.store_file).tables if t.name == "messages"] == [
        1
    ]
    app = App(config)
    app.on("job")(handler)
    await app.work(until_idle=True)
    assert sorted(ran) == ["after", "before"]
    assert outcome_of(config.store_file, "hit") == ("failed", "undecodable")


@pytest.mark.parametrize("seed", range(20 if SOAK else 3))
async def test_a_flipped_body_in_the_store_is_never_run(config: Config, seed: int) -> None:
    ran: list[str] = []

    async def handler(ctx: Context) -> None:
        ran.append(ctx.message.id)

    async with App(config) as app:
        await app.send("job", {"text": MARK}, id="hit")
        await app.send("job", {"text": "other"}, id="other")
    await App(config).work(until_idle=True)  # no handler: the store keeps them, parked
    assert outcome_of(config.store_file, "hit") == ("parked", None)
    flip_in_body(config.store_file, random.Random(seed))
    app = App(config)
    app.on("job")(handler)
    async with app:
        worker = app.worker()
        await worker.begin()
        await until(lambda: len(finals(config.store_file)) == 2, "both messages end")
        await worker.drain()
    assert ran == ["other"]
    assert outcome_of(config.store_file, "hit") == ("failed", "body_corrupt")
