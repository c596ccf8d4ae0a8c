"""What is over and old goes; what is not, or is not yet, stays."""

import fcntl
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.ids import uuid7_bytes
from holdfast.sqlite import liveness
from holdfast.store.keep import Keep
from holdfast.store.migrate import ensure_schema
from holdfast.store.sqlite import retention
from holdfast.store.sqlite.retention import Retention
from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing import FakeClock

DAY_S = 86_400.0
DAY_US = 86_400_000_000
KEEP = Keep(tasks_days=30, metrics_days=7, deliveries_days=7, dead_letters_days=90)


class Attic:
    """A store with old and new rows in it."""

    def __init__(self, home: Path) -> None:
        self.clock = FakeClock()
        self.store = SqliteStore(home / "holdfast.db", clock=self.clock)

    async def put(self, statement: str, *rows: tuple[Any, ...]) -> None:
        await self.store.file.write(lambda conn: conn.executemany(statement, rows))

    async def all(self, statement: str) -> list[Any]:
        found = await self.store.file.read(lambda conn: conn.execute(statement).fetchall())
        return [row[0] if len(row) == 1 else row for row in found]

    def ago(self, days: float) -> int:
        return self.clock.now_us() - int(days * DAY_US)

    async def task(self, name: str, status: str, *, days: float, tenant: str = "acme") -> None:
        over = status not in ("parked", "running", "ready")
        await self.put(
            "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name,"
            " status, held, started_at, completed_at) VALUES (?, ?, 'q', ?, 'q', ?, 'store', ?, ?)",
            (
                uuid7_bytes(),
                tenant,
                name,
                status,
                self.ago(days),
                self.ago(days) if over else None,
            ),
        )

    async def letter(self, name: str, state: str, *, days: float) -> None:
        await self.put(
            "INSERT INTO dead_letters (id, tenant_id, subscription, message_id, queue_name, reason,"
            " state, failed_at, settled_at) VALUES (?, 'acme', 'q', ?, 'q', 'x', ?, ?, ?)",
            (
                uuid7_bytes(),
                name,
                state,
                self.ago(days),
                None if state == "open" else self.ago(days),
            ),
        )

    async def key(self, name: str, state: str, expires_in_s: float | None, tenant: str) -> None:
        expires = None if expires_in_s is None else self.clock.now_us() + int(expires_in_s * 1e6)
        await self.put(
            "INSERT INTO idempotency_keys (tenant_id, subscription, key, message_id, state,"
            " created_at, expires_at) VALUES (?, 'q', ?, ?, ?, 1, ?)",
            (tenant, name, name, state, expires),
        )

    async def sweep(self, keep: Keep = KEEP) -> dict[str, int]:
        worker = await self.store.register("sweeper")
        try:
            return await Retention(self.store, keep).step(worker)
        finally:
            await self.store.leave(worker)


@pytest.fixture
async def attic(home: Path) -> AsyncIterator[Attic]:
    attic = Attic(home)
    ensure_schema(attic.store.path)
    await attic.store.open()
    yield attic
    await attic.store.close()


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


async def test_no_key_goes_while_the_clock_is_in_doubt(attic):
    await attic.key("over", "done", -1, "acme")
    attic.store.expiry_paused = True
    assert (await attic.sweep())["idempotency_keys"] == 0
    attic.store.expiry_paused = False
    assert (await attic.sweep())["idempotency_keys"] == 1


async def test_only_ended_tasks_go_with_their_effects(attic):
    for status in ("succeeded", "failed", "rejected", "expired", "discarded", "duplicate"):
        await attic.task(f"old {status}", status, days=31)
        await attic.task(f"new {status}", status, days=29)
    for status in ("parked", "running", "ready"):
        await attic.task(f"old {status}", status, days=300)
    await attic.task("dead, open", "failed", days=300)
    await attic.letter("dead, open", "open", days=300)
    await attic.put(
        "INSERT INTO effects (tenant_id, subscription, message_id, name, state, worker_id, epoch,"
        " created_at) VALUES ('acme', 'q', ?, 'charge', 'done', 1, 1, 1)",
        ("old succeeded",),
        ("new succeeded",),
        ("old parked",),
    )
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
                "INSERT INTO approvals (id, tenant_id, subscription, message_id, queue_name,"
                " payload_sha256, rule, state, asked_at, expires_at, answered_at)"
                " VALUES (?, 'acme', 'q', ?, 'q', x'00', 'r', ?, ?, ?, ?)",
                (
                    uuid7_bytes(),
                    f"{name} {state}",
                    state,
                    attic.ago(days),
                    attic.ago(days),
                    None if state == "pending" else attic.ago(days),
                ),
            )
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
        "INSERT INTO deliveries (id, channel, recipient, content, status, due_at, created_at,"
        " last_attempt_at) VALUES (?, 'terminal', 'x', 'x', ?, 1, ?, ?)",
        ("old sent", "sent", attic.ago(9), attic.ago(8)),
        ("just sent", "sent", attic.ago(9), attic.ago(1)),
        ("old pending", "pending", attic.ago(9), None),
        ("old failed", "failed", attic.ago(9), attic.ago(8)),
    )
    await attic.put(
        "INSERT INTO queue_metrics (id, queue_name, metric_name, metric_value, timestamp)"
        " VALUES (?, 'q', ?, 1, ?)",
        (uuid7_bytes(), "old", attic.ago(8)),
        (uuid7_bytes(), "new", attic.ago(6)),
    )
    gone = await attic.sweep()
    assert gone == {
        "idempotency_keys": 0,
        "quotas": 0,
        "queue_executions": 0,
        "approvals": 0,
        "deliveries": 1,
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


async def test_what_has_no_limit_is_kept_for_ever(attic):
    await attic.task("ancient", "succeeded", days=10_000)
    await attic.letter("ancient", "replayed", days=10_000)
    assert await attic.sweep(Keep()) == {"idempotency_keys": 0}
    assert await attic.all("SELECT message_id FROM queue_executions") == ["ancient"]


async def test_many_rows_go_in_small_transactions(attic, monkeypatch):
    """Rows too young or unfinished lie between; every page and batch is crossed."""
    monkeypatch.setattr(retention, "PAGE", 700)
    await attic.put(
        "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name, status,"
        " held, started_at, completed_at) VALUES (x'00', ?, 'q', ?, 'q', ?, 'store', ?, ?)",
        *(
            (
                f"t{n % 3}",
                f"m{n}",
                "parked" if n % 10 == 0 else "succeeded",
                attic.ago(40),
                attic.ago(40),
            )
            for n in range(3000)
        ),
        *(("t", f"young{n}", "succeeded", attic.ago(1), attic.ago(1)) for n in range(1500)),
    )
    sizes: list[int] = []
    write = attic.store.file.write

    async def counting(op: Any, *, durable: bool = True) -> Any:
        result = await write(op, durable=durable)
        if isinstance(result, int):
            sizes.append(result)
        return result

    monkeypatch.setattr(attic.store.file, "write", counting)
    assert (await attic.sweep())["queue_executions"] == 2700
    assert max(sizes) <= 500
    assert (await attic.all("SELECT count(*) FROM queue_executions")) == [1800]


async def test_a_row_that_is_needed_again_meanwhile_stays(attic, monkeypatch):
    """Between the look and the deletion an operator opens the letter of a task again."""
    await attic.task("m", "failed", days=40)
    await attic.letter("m", "replayed", days=40)
    rule = Retention(attic.store, KEEP)
    page = rule._page

    async def reopening(*args: Any) -> Any:
        found = await page(*args)
        await attic.put("UPDATE dead_letters SET state = ?", ("open",))
        return found

    monkeypatch.setattr(rule, "_page", reopening)
    worker = await attic.store.register("w")
    gone = await rule.step(worker)
    assert gone["queue_executions"] == 0
    assert await attic.all("SELECT message_id FROM queue_executions") == ["m"]


async def test_files_of_dead_processes_are_removed_and_those_of_the_living_stay(attic):
    living = await attic.store.register("living")
    folder = attic.store.file.workers_folder
    long_ago = 1_000_000_000
    for name in ("901", "902", "903"):
        (folder / name).write_bytes(b"\0" * 64)
    os.utime(folder / "901", (long_ago, long_ago))
    os.utime(folder / "902", (long_ago, long_ago))  # locked below: someone holds it
    held = os.open(folder / "902", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.utime(folder / str(living.worker_id), (long_ago, long_ago))
    wake = Path(f"{attic.store.path}.wake")
    gone = wake / "1-dead"
    there = wake / "2-alive"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(gone))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as alive:
        alive.bind(str(there))
        attic.store.file.tidy({living.worker_id})
        names = {path.name for path in folder.iterdir()}
        assert {path.name for path in wake.iterdir()} >= {"2-alive"}
        alive.setblocking(False)
        with pytest.raises(BlockingIOError):
            alive.recv(16)  # to be looked at wakes nobody
    os.close(held)
    assert names == {"902", "903", str(living.worker_id)}, "903 may be one that is being made"
    assert not gone.exists()


def test_a_sweep_of_nothing_is_nothing(home):
    assert liveness.sweep(home / "nowhere", set()) == 0
