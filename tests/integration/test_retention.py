"""What is over and old goes; what is not, or is not yet, stays."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ackbone.core.clock import from_us
from ackbone.core.ids import uuid7_bytes
from ackbone.pgserver.connections import _SETTINGS
from ackbone.sqlitefile import sharing
from ackbone.store.postgres.prune import DELETE_TASKS, PostgresOldRows
from ackbone.store.postgres.sql import SQL as POSTGRES_SQL
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.retention import BATCH, Keep, Retention
from ackbone.store.sqlite import prune
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.prune import SqliteOldRows, WorkerFiles
from ackbone.store.sqlite.store import SqliteStore
from ackbone.testing import FakeClock
from tests.servers.postgres_clock import ServerClock
from tests.servers.stores import STORES

DAY_S = 86_400.0
DAY_US = 86_400_000_000
KEEP = Keep(tasks_days=30, metrics_days=7, deliveries_days=7, dead_letters_days=90)


class Attic:
    """A store with old and new rows in it, of either kind."""

    clock: FakeClock
    store: Any

    async def put(self, table: str, *rows: dict[str, Any]) -> None:
        raise NotImplementedError

    async def all(self, statement: str) -> list[Any]:
        raise NotImplementedError

    async def sweep(self, keep: Keep = KEEP) -> dict[str, int]:
        raise NotImplementedError

    def at(self, us: int) -> Any:
        """A moment as this store keeps it."""
        raise NotImplementedError

    def row_id(self) -> Any:
        raise NotImplementedError

    def ago(self, days: float) -> Any:
        return self.at(self.clock.now_us() - int(days * DAY_US))

    async def task(self, name: str, status: str, *, days: float, tenant: str = "acme") -> None:
        over = status not in ("parked", "running", "ready")
        ended = self.ago(days) if over else None
        await self.put(
            "queue_executions",
            {
                "id": self.row_id(), "tenant_id": tenant, "subscription": "q", "message_id": name,
                "queue_name": "q", "status": status, "held": "store", "started_at": self.ago(days),
                "completed_at": ended,
            },
        )  # fmt: skip

    async def letter(self, name: str, state: str, *, days: float) -> None:
        settled = None if state == "open" else self.ago(days)
        await self.put(
            "dead_letters",
            {
                "id": self.row_id(), "tenant_id": "acme", "subscription": "q", "message_id": name,
                "queue_name": "q", "reason": "x", "state": state, "failed_at": self.ago(days),
                "settled_at": settled,
            },
        )  # fmt: skip

    async def key(self, name: str, state: str, expires_in_s: float | None, tenant: str) -> None:
        now_us = self.clock.now_us()
        expires = None if expires_in_s is None else self.at(now_us + int(expires_in_s * 1e6))
        await self.put(
            "idempotency_keys",
            {
                "tenant_id": tenant, "subscription": "q", "key": name, "message_id": name,
                "state": state, "created_at": self.at(1), "expires_at": expires,
            },
        )  # fmt: skip


class FileAttic(Attic):
    store: SqliteStore

    def __init__(self, home: Path) -> None:
        self.clock = FakeClock()
        self.store = SqliteStore(home / "ackbone.db", clock=self.clock)

    async def put(self, table: str, *rows: dict[str, Any]) -> None:
        names = list(rows[0])
        values = ", ".join("?" * len(names))
        statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({values})"
        given = [tuple(row.values()) for row in rows]
        await self.store.file.write(lambda conn: conn.executemany(statement, given))

    async def all(self, statement: str) -> list[Any]:
        found = await self.store.file.read(lambda conn: conn.execute(statement).fetchall())
        return [row[0] if len(row) == 1 else row for row in found]

    async def sweep(self, keep: Keep = KEEP) -> dict[str, int]:
        worker = await self.store.register("sweeper")
        try:
            return await Retention(self.store, SqliteOldRows(self.store), keep).step(worker)
        finally:
            await self.store.leave(worker)

    def at(self, us: int) -> int:
        return us

    def row_id(self) -> bytes:
        return uuid7_bytes()


class ServerAttic(Attic):
    clock: ServerClock
    store: PostgresStore

    def __init__(self, url: str) -> None:
        self.clock = ServerClock(url)
        self.store = PostgresStore(url, clock=self.clock)
        self._conn = psycopg.connect(url, autocommit=True)

    async def put(self, table: str, *rows: dict[str, Any]) -> None:
        names = list(rows[0])
        values = ", ".join(["%s"] * len(names))
        statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({values})"
        with self._conn.cursor() as cursor:
            cursor.executemany(statement, [tuple(row.values()) for row in rows])

    async def all(self, statement: str) -> list[Any]:
        found = self._conn.execute(statement).fetchall()
        return [row[0] if len(row) == 1 else row for row in found]

    async def sweep(self, keep: Keep = KEEP) -> dict[str, int]:
        worker = await self.store.register("sweeper")
        try:
            return await Retention(self.store, PostgresOldRows(self.store), keep).step(worker)
        finally:
            await self.store.leave(worker)

    def at(self, us: int) -> datetime:
        return from_us(us)

    def row_id(self) -> uuid.UUID:
        return uuid.UUID(bytes=uuid7_bytes())

    def close(self) -> None:
        self._conn.close()
        self.clock.close()


@pytest.fixture
async def on_file(home: Path) -> AsyncIterator[FileAttic]:
    attic = FileAttic(home)
    ensure_schema(attic.store.path)
    await attic.store.open()
    yield attic
    await attic.store.close()


@pytest.fixture
async def on_server(postgres_url: str) -> AsyncIterator[ServerAttic]:
    attic = ServerAttic(postgres_url)
    await attic.store.open()
    yield attic
    await attic.store.close()
    attic.close()


@pytest.fixture(params=STORES)
def attic(request: pytest.FixtureRequest) -> Attic:
    name = "on_file" if request.param == "sqlite" else "on_server"
    found: Attic = request.getfixturevalue(name)
    return found


async def test_keys_go_when_their_window_is_over_and_never_while_they_run(attic):
    for tenant in ("acme", "beta", "zeta"):
        await attic.key("over", "done", -1, tenant)
        await attic.key("now", "done", 0, tenant)
        await attic.key("valid", "done", 1, tenant)
        await attic.key("runs", "running", None, tenant)
    gone = await attic.sweep()
    assert gone["idempotency_keys"] == 6
    assert sorted(await attic.all("SELECT tenant_id, key FROM idempotency_keys")) == [
        (tenant, key) for tenant in ("acme", "beta", "zeta") for key in ("runs", "valid")
    ]


async def test_nothing_goes_while_the_clock_is_in_doubt(attic):
    """Set by a year for a minute, it would take the memory of every message with it: a copy that
    comes again then would run again."""
    await attic.key("over", "done", -1, "acme")
    await attic.task("over", "succeeded", days=365)
    await attic.letter("over", "discarded", days=365)
    attic.store.expiry_paused = True
    assert not any((await attic.sweep()).values())
    assert await attic.all("SELECT message_id FROM queue_executions") == ["over"]
    attic.store.expiry_paused = False
    gone = await attic.sweep()
    assert [gone[t] for t in ("idempotency_keys", "queue_executions", "dead_letters")] == [1, 1, 1]


class SetAtTheNextTransaction(FakeClock):
    """Somebody sets the clock after retention has looked at it, before its transaction begins."""

    jump_s: float | None = None

    def now_us(self) -> int:
        if self.jump_s is not None and threading.current_thread().name.startswith("ackbone-"):
            jump_s, self.jump_s = self.jump_s, None
            self.jump_wall(jump_s)
        return super().now_us()


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S], ids=["+1d", "-1d"])
async def test_a_key_that_moves_with_the_clock_is_not_measured_by_the_old_one(home, jump_s):
    attic = FileAttic(home)
    attic.clock = SetAtTheNextTransaction()
    attic.store = SqliteStore(home / "ackbone.db", clock=attic.clock)
    ensure_schema(attic.store.path)
    await attic.store.open()
    await attic.key("valid", "done", 3600, "acme")
    await attic.put("send_windows", {"key": "telegram", "state": "{}", "ends_at": attic.ago(-0.01)})
    worker = await attic.store.register("sweeper")
    attic.clock.jump_s = jump_s
    gone = await Retention(attic.store, SqliteOldRows(attic.store), KEEP).step(worker)
    assert not any(gone.values()), gone
    assert await attic.all("SELECT key FROM idempotency_keys") == ["valid"]
    await attic.store.close()


async def test_only_ended_tasks_go_with_their_effects(attic):
    for status in ("succeeded", "failed", "rejected", "expired", "discarded", "duplicate"):
        await attic.task(f"old {status}", status, days=31)
        await attic.task(f"new {status}", status, days=29)
    for status in ("parked", "running", "ready"):
        await attic.task(f"old {status}", status, days=300)
    await attic.task("dead, open", "failed", days=300)
    await attic.letter("dead, open", "open", days=300)
    await attic.put(
        "effects",
        *(
            {
                "tenant_id": "acme", "subscription": "q", "message_id": name, "name": "charge",
                "state": "done", "worker_id": 1, "epoch": 1, "created_at": attic.at(1),
            }
            for name in ("old succeeded", "new succeeded", "old parked")
        ),
    )  # fmt: skip
    assert (await attic.sweep())["queue_executions"] == 6
    left = await attic.all("SELECT message_id FROM queue_executions")
    assert {name for name in left if name.startswith("old")} == {
        "old parked",
        "old running",
        "old ready",
    }
    assert "dead, open" in left
    assert sum(name.startswith("new") for name in left) == 6
    assert set(await attic.all("SELECT message_id FROM effects")) == {
        "new succeeded",
        "old parked",
    }


async def test_answered_approvals_go_after_their_tasks(attic):
    for state in ("approved", "rejected", "expired", "pending"):
        for name, days in (("old", 31), ("new", 29)):
            await attic.put(
                "approvals",
                {
                    "id": attic.row_id(), "tenant_id": "acme", "subscription": "q",
                    "message_id": f"{name} {state}", "queue_name": "q", "payload_sha256": b"",
                    "rule": "r", "state": state, "asked_at": attic.ago(days),
                    "expires_at": attic.ago(days),
                    "answered_at": None if state == "pending" else attic.ago(days),
                },
            )  # fmt: skip
    await attic.task("old approved", "parked", days=31)
    assert (await attic.sweep())["approvals"] == 2
    left = await attic.all("SELECT message_id FROM approvals")
    assert {name for name in left if name.startswith("old")} == {"old approved", "old pending"}
    assert sum(name.startswith("new") for name in left) == 4


async def test_settled_letters_sent_replies_and_metrics_go_by_their_own_times(attic):
    for state in ("open", "replayed", "discarded"):
        await attic.letter(f"old {state}", state, days=91)
        await attic.letter(f"new {state}", state, days=89)
    await attic.put(
        "deliveries",
        *(
            {
                "id": name, "channel": "terminal", "recipient": "x", "content": "x",
                "status": name.split()[1], "due_at": attic.at(1), "created_at": attic.ago(9),
                "last_attempt_at": None if tried is None else attic.ago(tried),
            }
            for name, tried in (
                ("old sent", 8), ("just sent", 1), ("old pending", None), ("old failed", 8),
                ("old discarded", 8),
            )
        ),
    )  # fmt: skip
    await attic.put(
        "queue_metrics",
        *(
            {
                "id": attic.row_id(), "queue_name": "q", "metric_name": name, "metric_value": 1,
                "timestamp": attic.ago(days),
            }
            for name, days in (("old", 8), ("new", 6))
        ),
    )  # fmt: skip
    await attic.put(
        "send_windows",
        *(
            {"key": name, "state": "{}", "ends_at": attic.ago(days)}
            for name, days in (("old", 1.1), ("new", 0.9))
        ),
    )
    await attic.put(
        "sources",
        *(
            {"subscription": "q", "part": name, "adopted_at": at}
            for name, at in (("", None), ("old", attic.ago(1.1)), ("new", attic.ago(0.9)))
        ),
    )
    gone = await attic.sweep()
    assert gone == {
        "idempotency_keys": 0,
        "quotas": 0,
        "queue_executions": 0,
        "approvals": 0,
        "deliveries": 2,
        "send_windows": 1,
        "sources": 1,
        "dead_letters": 2,
        "queue_metrics": 1,
    }
    assert "old open" in await attic.all("SELECT message_id FROM dead_letters")
    assert set(await attic.all("SELECT id FROM deliveries")) == {
        "just sent",
        "old pending",
        "old failed",
    }
    assert await attic.all("SELECT metric_name FROM queue_metrics") == ["new"]
    assert await attic.all("SELECT key FROM send_windows") == ["new"]
    assert set(await attic.all("SELECT part FROM sources")) == {"", "new"}


async def test_what_has_no_limit_is_kept_for_ever(attic):
    await attic.task("ancient", "succeeded", days=10_000)
    await attic.letter("ancient", "replayed", days=10_000)
    assert await attic.sweep(Keep()) == {
        "idempotency_keys": 0,
        "send_windows": 0,
        "sources": 0,
    }
    assert await attic.all("SELECT message_id FROM queue_executions") == ["ancient"]


async def crowd(attic: Attic) -> None:
    """2700 tasks that are to go; 300 unfinished ones between them, 1500 too young."""
    tasks = [
        (f"t{n % 3}", f"m{n}", "parked" if n % 10 == 0 else "succeeded", 40) for n in range(3000)
    ]
    tasks += [("t", f"young{n}", "succeeded", 1) for n in range(1500)]
    await attic.put(
        "queue_executions",
        *(
            {
                "id": attic.row_id(), "tenant_id": tenant, "subscription": "q", "message_id": name,
                "queue_name": "q", "status": status, "held": "store",
                "started_at": attic.ago(days), "completed_at": attic.ago(days),
            }
            for tenant, name, status, days in tasks
        ),
    )  # fmt: skip


async def test_many_rows_go(attic):
    await crowd(attic)
    assert (await attic.sweep())["queue_executions"] == 2700
    assert (await attic.all("SELECT count(*) FROM queue_executions")) == [1800]


async def test_many_rows_go_in_small_transactions(on_file, monkeypatch):
    """Rows too young or unfinished lie between; every page and batch is crossed."""
    monkeypatch.setattr(prune, "PAGE", 700)
    await crowd(on_file)
    sizes: list[int] = []
    write = on_file.store.file.write

    async def counting(op: Any, **options: Any) -> Any:
        result = await write(op, **options)
        if isinstance(result, int):
            sizes.append(result)
        return result

    monkeypatch.setattr(on_file.store.file, "write", counting)
    assert (await on_file.sweep())["queue_executions"] == 2700
    assert max(sizes) <= 500
    assert (await on_file.all("SELECT count(*) FROM queue_executions")) == [1800]


async def test_a_row_that_is_needed_again_meanwhile_stays(on_file, monkeypatch):
    """Between the look and the deletion an operator opens the letter of a task again."""
    await on_file.task("m", "failed", days=40)
    await on_file.letter("m", "replayed", days=40)
    rows = SqliteOldRows(on_file.store)
    page = rows._page

    async def reopening(*args: Any) -> Any:
        found = await page(*args)
        await on_file.store.file.write(
            lambda conn: conn.execute("UPDATE dead_letters SET state = 'open'")
        )
        return found

    monkeypatch.setattr(rows, "_page", reopening)
    worker = await on_file.store.register("w")
    gone = await Retention(on_file.store, rows, KEEP).step(worker)
    assert gone["queue_executions"] == 0
    assert await on_file.all("SELECT message_id FROM queue_executions") == ["m"]


async def test_files_of_dead_processes_are_removed_and_those_of_the_living_stay(on_file):
    living = await on_file.store.register("living")
    folder = on_file.store.file.workers_folder
    long_ago = 1_000_000_000
    for name in ("901", "902", "903"):
        (folder / name).write_bytes(b"\0" * 64)
    os.utime(folder / "901", (long_ago, long_ago))
    os.utime(folder / "902", (long_ago, long_ago))  # locked below: someone holds it
    held = os.open(folder / "902", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.utime(folder / str(living.worker_id), (long_ago, long_ago))
    wake = Path(f"{on_file.store.path}.wake")
    gone = wake / "1-dead"
    there = wake / "2-alive"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(gone))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as alive:
        alive.bind(str(there))
        await WorkerFiles(on_file.store).step(living)
        names = {path.name for path in folder.iterdir()}
        assert {path.name for path in wake.iterdir()} >= {"2-alive"}
        alive.setblocking(False)
        with pytest.raises(BlockingIOError):
            alive.recv(16)  # to be looked at wakes nobody
    os.close(held)
    assert names == {"902", "903", str(living.worker_id)}, "903 may be one that is being made"
    assert not gone.exists()


def test_a_sweep_of_nothing_is_nothing(home):
    assert sharing.sweep(home / "nowhere", set()) == 0


@pytest.mark.xdist_group("postgres")
@pytest.mark.parametrize(
    ("statement", "values"),
    [
        (DELETE_TASKS, "'{}', 'default', 'q'"),
        (POSTGRES_SQL.maintenance.delete_expired_keys, "'{}', 'default'"),
    ],
    ids=["tasks", "keys"],
)
def test_a_batch_costs_the_same_however_much_is_to_go(
    postgres_url: str, statement: str, values: str
) -> None:
    """Sorted for each batch, a million rows would take longer than a statement may."""
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO queue_executions (id, subscription, message_id, queue_name, status, held,"
            " started_at, completed_at) SELECT gen_random_uuid(), 's', md5(n::text), 'q',"
            " 'succeeded', 'store', t, t FROM generate_series(1, 20000) n,"
            " LATERAL (SELECT now() - n % 100 * interval '1 day') old(t)"
        )
        conn.execute(
            "INSERT INTO idempotency_keys (subscription, key, message_id, state, expires_at)"
            " SELECT 's', md5(n::text), 'm' || n, 'done', now() - n % 100 * interval '1 day'"
            " FROM generate_series(1, 20000) n"
        )
        conn.execute("ANALYZE")
        for name, value in _SETTINGS.items():
            conn.execute("SELECT set_config(%s, %s, false)", (name, value))
        conn.execute(f"PREPARE p AS {statement}")
        values = values.format(time.time_ns() // 1000 - 30 * DAY_US)
        explained = conn.execute(f"EXPLAIN EXECUTE p({values})")
        plan = "\n".join(row[0] for row in explained)
        assert "Sort" not in plan, plan
        assert len(conn.execute(f"EXECUTE p({values})").fetchall()) == BATCH
