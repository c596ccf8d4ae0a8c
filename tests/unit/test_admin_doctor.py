"""Findings: each thing that `doctor` looks at, sound and broken."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ackbone.admin import doctor
from ackbone.core.broker import Capabilities, Durability, Identity
from ackbone.core.findings import Finding
from ackbone.core.records import QueueState, WorkerState
from ackbone.sqlitefile.wal import Witness
from ackbone.store.sqlite import checks
from ackbone.store.sqlite.migrate import PAGE_SIZE
from tests.unit.desk import open_desk

NOW_US = 1_800_000_000_000_000


@pytest.fixture
async def database(home: Path) -> Path:
    """A file with a message in each place that keeps bodies."""
    async with open_desk(home) as desk:
        await desk.app.send("bad", {"n": 1}, id="dead")
        await desk.app.send("unknown", {"n": 2}, id="parked")
        await desk.work()
        await desk.app.send("good", {"n": 3}, id="waiting")
    return home / "ackbone.db"


def test_an_old_sqlite_is_refused_and_a_risky_one_explained():
    assert checks.check_version((3, 34, 0)).finding is Finding.REFUSED
    risky = checks.check_version((3, 40, 1))
    assert risky.finding is Finding.OK
    assert "take turns" in risky.detail
    assert checks.check_version((3, 51, 3)).hint is None


def test_a_sound_database_is_sound(database: Path):
    for check in (
        checks.check_schema(database),
        checks.check_witness(database),
        checks.check_integrity(database),
        checks.check_bodies(database),
        checks.check_file_system(database),
    ):
        assert check.finding is Finding.OK, check


def test_commits_that_went_missing_are_found(database: Path):
    with closing(Witness(database)) as witness:
        commits = witness.read()
        assert commits is not None
        witness.write(commits + 3)
    check = checks.check_witness(database)
    assert check.finding is Finding.REFUSED
    assert "last 3 went missing" in check.detail
    assert "recover" in (check.hint or "")


def test_a_changed_body_is_found_in_each_table(database: Path):
    for table in ("messages", "queue_executions", "dead_letters"):
        with closing(sqlite3.connect(database, isolation_level=None)) as conn:
            changed = conn.execute(
                f"UPDATE {table} SET body = CAST(body || ' ' AS BLOB) WHERE body IS NOT NULL"
            ).rowcount
        assert changed == 1
    check = checks.check_bodies(database)
    assert check.finding is Finding.REFUSED
    assert "3 of 3" in check.detail
    for name in ("dead", "parked", "waiting"):
        assert name in check.detail


@pytest.mark.parametrize("damage", [b"\0" * 2000, b"\xff" * 2000, bytes(range(256)) * 8])
def test_a_damaged_page_is_found(database: Path, damage: bytes):
    with closing(sqlite3.connect(database)) as conn:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page = conn.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'idx_event_log_tenant_task'"
        ).fetchone()[0]
    with database.open("r+b") as file:
        file.seek((page - 1) * PAGE_SIZE + 8)
        file.write(damage)
    assert checks.check_integrity(database).finding is Finding.REFUSED


def test_a_schema_from_before_or_from_elsewhere_is_refused(database: Path, home: Path):
    with closing(sqlite3.connect(database, isolation_level=None)) as conn:
        conn.execute("UPDATE alembic_version SET version_num = '0000'")
    assert "ackbone migrate" in (checks.check_schema(database).hint or "")
    with closing(sqlite3.connect(database, isolation_level=None)) as conn:
        conn.execute("UPDATE alembic_version SET version_num = '9999'")
    newer = checks.check_schema(database)
    assert newer.finding is Finding.REFUSED
    assert "newer ackbone" in newer.detail
    with closing(sqlite3.connect(database, isolation_level=None)) as conn:
        conn.execute("UPDATE alembic_version SET version_num = 'ab12'")
    assert "another program" in checks.check_schema(database).detail
    empty = home / "empty.db"
    empty.touch()
    assert checks.check_schema(empty).finding is Finding.REFUSED


def test_an_open_home_is_named(home: Path):
    (home / "ackbone.db").touch(0o600)
    assert {check.finding for check in doctor.check_home(home)} == {Finding.OK}
    (home / "ackbone.db").chmod(0o644)
    assert {check.finding for check in doctor.check_home(home)} == {Finding.OK}
    home.chmod(0o755)
    folder, files = doctor.check_home(home)
    assert folder.finding is Finding.WARNING
    assert files.finding is Finding.REFUSED
    assert "chmod 600" in (files.hint or "")
    assert doctor.check_home(home / "none")[0].finding is Finding.OK


def test_space_is_told_for_a_folder_that_does_not_exist_yet(home: Path):
    check = doctor.check_space(home / "not" / "yet")
    assert str(home) in check.detail


def test_a_clock_that_was_set_back_is_told():
    assert doctor.check_clock(0, None).finding is Finding.REFUSED
    assert doctor.check_clock(NOW_US, NOW_US - 5).finding is Finding.OK
    back = doctor.check_clock(NOW_US, NOW_US + 3_600_000_000)
    assert back.finding is Finding.WARNING
    assert "3,600 s" in back.detail


def test_dead_workers_and_paused_queues_are_warnings():
    def worker(n: int, alive: bool) -> WorkerState:
        return WorkerState(worker_id=n, name="w", started_at_us=0, alive=alive, running=2)

    assert doctor.check_workers([]).finding is Finding.OK
    assert doctor.check_workers([worker(1, True)]).finding is Finding.OK
    assert "2 messages" in doctor.check_workers([worker(1, True), worker(2, False)]).detail
    assert "none is alive" in doctor.check_workers([worker(2, False)]).detail
    state = QueueState(queue="orders", parked=1, dead=2, paused_at_us=5)
    found = doctor.check_queues([state, QueueState(queue="quiet")])
    assert [check.finding for check in found] == [Finding.WARNING] * 3
    assert "orders" in found[0].detail
    assert "quiet" not in found[0].detail


def test_subscribers_need_a_channel():
    assert doctor.check_subscribers({}, {"ops"}) == []
    (sound,) = doctor.check_subscribers({"people": "ops"}, {"ops"})
    assert sound.finding is Finding.OK
    (silent,) = doctor.check_subscribers({"people": "ops", "dashboard": "webhook"}, {"ops"})
    assert silent.finding is Finding.WARNING
    assert "dashboard is notified by webhook" in silent.detail
    assert "channels.webhook" in (silent.hint or "")


def test_what_a_broker_cannot_do_is_named_for_the_queues_that_ask_for_it():
    able = Capabilities(
        durability=Durability.FSYNC, priority=True, ttl=True, ordered=True, max_body=1024
    )
    asked: dict[str, Any] = {"ordered": ["orders"], "with_ttl": ["offers"], "max_bytes": 1024}
    assert doctor.check_capabilities(able, **asked) == []

    bare = Capabilities(durability=Durability.FSYNC, identity=Identity.NONE, max_body=1000)
    found = doctor.check_capabilities(bare, **asked)
    order, size = (check for check in found if check.finding is Finding.WARNING)
    assert "orders" in order.detail
    assert "queues.orders.ordered" in (order.hint or "")
    assert "1,000 bytes" in size.detail
    assert (size.hint or "").endswith("max_message_bytes: 1000")
    names = [check.name for check in found if check.finding is Finding.OK]
    assert names == ["identity", "time to live", "priority"]

    with_parts = Capabilities(durability=Durability.FSYNC, parts=True)
    nothing: dict[str, Any] = {"ordered": ["orders"], "with_ttl": [], "max_bytes": 1}
    assert [check.name for check in doctor.check_capabilities(with_parts, **nothing)] == [
        "priority"
    ]


def test_settings_that_give_up_a_promise_are_named():
    (sound,) = doctor.check_settings(in_memory=False, dedup_may_stop=False)
    assert sound.finding is Finding.OK
    memory, dedup = doctor.check_settings(in_memory=True, dedup_may_stop=True)
    assert memory.finding is Finding.REFUSED
    assert "P4 off" in dedup.detail
    assert not doctor.healthy([memory])
    assert doctor.healthy([dedup])


def test_an_ok_has_no_advice():
    assert checks.check_version((3, 40, 1)).hint is None
    able = Capabilities(durability=Durability.FSYNC, identity=Identity.NONE)
    found = doctor.check_capabilities(able, ordered=[], with_ttl=[], max_bytes=1)
    (identity,) = [check for check in found if check.name == "identity"]
    assert identity.hint is None
    assert "set an id" in identity.detail
