"""The ledger's proof: whatever is changed, added or taken away before the last anchor is found."""

import asyncio
import contextlib
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from ackbone.core import events
from ackbone.core.errors import ConfigError, StoreError
from ackbone.core.store import Worker
from ackbone.sqlitefile.file import SqliteFile
from ackbone.store import ledger
from ackbone.store.anchors import AnchorFile, Anchors
from ackbone.store.ledger import GENESIS, ledger_key, link
from ackbone.store.ledger_verifier import LedgerReport
from ackbone.store.sqlite import seals as rows_of_seals
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.prune import Pruner
from ackbone.store.sqlite.seals import SqliteChainEnds
from ackbone.store.sqlite.store import SqliteStore
from ackbone.store.sqlite.verify import verify_ledger
from ackbone.testing import FakeClock

KEY = b"k" * 32
DAY_S = 86_400.0


class Book:
    """A store whose ledger is written as the engine writes it: several tenants, several workers."""

    def __init__(self, home: Path) -> None:
        self.path = home / "ackbone.db"
        self.anchor_file = home / "ledger.anchors"
        self.clock = FakeClock()
        self.store = SqliteStore(self.path, clock=self.clock)
        self.workers: list[Worker] = []
        ends = SqliteChainEnds(self.store)
        self.anchors = Anchors(self.store, ends, key=KEY, anchor_file=self.anchor_file)

    async def open(self) -> None:
        ensure_schema(self.path)
        await self.store.open()
        self.workers = [await self.store.register(f"w{n}") for n in range(2)]

    async def write(self, count: int, *, tenants: tuple[str, ...] = ("acme", "zeta")) -> None:
        """`count` events in each chain, the chains interleaved."""
        for n in range(count):
            for worker in self.workers:
                for tenant in tenants:
                    await self.one(worker, tenant, f"m{n}")

    async def one(self, worker: Worker, tenant: str, task: str) -> None:
        entry = (tenant, "orders", task, events.SUCCEEDED, {"status": "success", "text": "é"})
        now = self.clock.now_us()
        await self.store.file.write(
            lambda conn: self.store._ledger.write(conn, worker.worker_id, [entry], now)
        )

    async def anchor(self) -> None:
        self.clock.advance(60)
        assert await self.anchors.step(self.workers[0]) is not None

    def verify(self, key: bytes = KEY) -> LedgerReport:
        return verify_ledger(self.path, key, self.anchor_file)

    async def tamper(self, statement: str, *values: object) -> None:
        """What someone with the database, and without the key, might do."""

        def op(conn: sqlite3.Connection) -> None:
            assert conn.execute(statement, values).rowcount > 0, "nothing was changed"

        await self.store.file.write(op)

    async def recompute(self, tenant: str, worker_id: int) -> None:
        """Make a chain whole again after it was changed: anyone can."""

        def op(conn: sqlite3.Connection) -> None:
            previous = GENESIS
            found = conn.execute(
                "SELECT rowid, subscription, task_id, event_type, data, created_at FROM event_log"
                " WHERE tenant_id = ? AND worker_id = ? ORDER BY rowid",
                (tenant, worker_id),
            ).fetchall()
            for seq, (rowid, sub, task, kind, data, at) in enumerate(found, 1):
                previous = link(previous, (seq, tenant, sub, task, kind, data, at, worker_id))
                conn.execute(
                    "UPDATE event_log SET seq = ?, hash = ? WHERE rowid = ?", (seq, previous, rowid)
                )

        await self.store.file.write(op)

    def count(self, where: str = "1") -> int:
        with sqlite3.connect(self.path) as conn:
            found: int = conn.execute(f"SELECT count(*) FROM event_log WHERE {where}").fetchone()[0]
        conn.close()
        return found


@pytest.fixture
async def book(home: Path) -> AsyncIterator[Book]:
    book = Book(home)
    await book.open()
    yield book
    await book.store.close()


@pytest.fixture
async def signed(book: Book) -> Book:
    """Three anchors, and a few events that are not anchored yet."""
    for _ in range(3):
        await book.write(4)
        await book.anchor()
    await book.write(2)
    return book


def only(report: LedgerReport) -> tuple[str, str, int, int]:
    assert len(report.findings) == 1, [str(f) for f in report.findings]
    found = report.findings[0]
    return found.kind, found.tenant_id, found.worker_id, found.seq


# ── whole ────────────────────────────────────────────────────────────────────────────────────────


async def test_an_untouched_ledger_verifies(signed):
    seen: list[tuple[int, int]] = []
    report = verify_ledger(
        signed.path, KEY, signed.anchor_file, lambda done, total: seen.append((done, total))
    )
    assert report.ok, [str(f) for f in report.findings]
    assert (report.anchors, report.last_anchor, report.chains) == (3, 3, 5)
    assert report.events == 3 * (4 * 4 + 1) + 8
    assert report.not_yet_anchored == 8
    assert report.last_anchor_at_us == signed.clock.now_us()
    assert seen[-1] == (report.events, report.events)


async def test_one_batch_goes_on_with_the_chains_of_several_tenants(book):
    tenants = ["acme", "zeta", "acme", "acme", "zeta", "zeta", "acme"] * 10
    entries = [(t, "orders", f"m{n}", events.CLAIMED, {"n": n}) for n, t in enumerate(tenants)]
    worker_id, now = book.workers[0].worker_id, book.clock.now_us()
    for _ in range(2):
        await book.store.file.write(
            lambda conn: book.store._ledger.write(conn, worker_id, entries, now)
        )
    assert book.verify().findings == []
    with contextlib.closing(sqlite3.connect(book.path)) as conn:
        found = conn.execute("SELECT tenant_id, task_id FROM event_log ORDER BY rowid").fetchall()
    assert found == [(entry[0], entry[2]) for entry in entries] * 2


async def test_a_new_ledger_has_no_anchor_and_says_so(book):
    report = book.verify()
    assert report.ok
    assert report.events == 0
    assert any("no anchor yet" in note for note in report.notes)


async def test_nothing_moved_no_anchor(signed):
    await signed.anchor()
    signed.clock.advance(60)
    assert await signed.anchors.step(signed.workers[0]) is None
    assert signed.verify().anchors == 4


async def test_an_anchor_lists_only_what_moved(signed):
    await signed.anchor()
    await signed.one(signed.workers[1], "acme", "x")
    await signed.anchor()
    *_, last = AnchorFile(signed.anchor_file).read()
    chains = {head[:2] for head in ledger.read_anchor(last).chains}
    first, second = (w.worker_id for w in signed.workers)
    assert chains == {("acme", second), (ledger.TENANT, first)}


async def test_a_ledger_of_many_windows_is_anchored_exactly(book, monkeypatch):
    monkeypatch.setattr(rows_of_seals, "WINDOW", 7)
    await book.write(10)
    await book.anchor()
    await book.write(10)
    await book.anchor()
    report = book.verify()
    assert report.ok
    assert report.not_yet_anchored == 0


async def test_two_processes_that_anchor_at_once_make_one_chain_of_anchors(signed):
    ends = SqliteChainEnds(signed.store)
    other = Anchors(signed.store, ends, key=KEY, anchor_file=signed.anchor_file)
    signed.clock.advance(60)
    made = await asyncio.gather(
        signed.anchors.step(signed.workers[0]), other.step(signed.workers[1])
    )
    assert [anchor.n for anchor in made if anchor is not None][:1] == [4]
    report = signed.verify()
    assert report.ok, [str(f) for f in report.findings]


# ── changed ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "change",
    [
        "data = '{}'",
        "event_type = 'task.failed'",
        "task_id = 'other'",
        "created_at = created_at + 1",
        "subscription = 'else'",
        "data = x'00'",
    ],
)
async def test_an_edited_event_is_found(signed, change):
    worker = signed.workers[1].worker_id
    await signed.tamper(
        f"UPDATE event_log SET {change} WHERE tenant_id = 'acme' AND worker_id = ? AND seq = 5",
        worker,
    )
    assert only(signed.verify()) == ("changed", "acme", worker, 5)


async def test_an_edit_is_found_behind_the_last_anchor_too(signed):
    worker = signed.workers[0].worker_id
    await signed.tamper(
        "UPDATE event_log SET data = '{}' WHERE tenant_id = 'zeta' AND worker_id = ? AND seq = 14",
        worker,
    )
    assert only(signed.verify()) == ("changed", "zeta", worker, 14)


async def test_a_deleted_event_is_found(signed):
    worker = signed.workers[0].worker_id
    await signed.tamper(
        "DELETE FROM event_log WHERE tenant_id = 'acme' AND worker_id = ? AND seq = 6", worker
    )
    report = signed.verify()
    assert only(report) == ("missing", "acme", worker, 7)
    assert "event 6 is missing" in str(report.findings[0])


async def test_two_swapped_events_are_found(signed):
    worker = signed.workers[0].worker_id
    rows = await signed.store.file.read(
        lambda conn: conn.execute(
            "SELECT rowid FROM event_log WHERE tenant_id = 'acme' AND worker_id = ?"
            " AND seq IN (2, 3)",
            (worker,),
        ).fetchall()
    )
    (low,), (high,) = rows
    for old, new in ((low, -1), (high, low), (-1, high)):
        await signed.tamper("UPDATE event_log SET rowid = ? WHERE rowid = ?", new, old)
    report = signed.verify()
    assert [(f.kind, f.seq) for f in report.findings] == [("missing", 3), ("repeated", 2)]
    assert all((f.tenant_id, f.worker_id) == ("acme", worker) for f in report.findings)


async def test_an_inserted_copy_is_found(signed):
    worker = signed.workers[0].worker_id
    await signed.tamper(
        "INSERT INTO event_log SELECT * FROM event_log WHERE tenant_id = 'acme' AND worker_id = ?"
        " AND seq = 3",
        worker,
    )
    assert only(signed.verify()) == ("repeated", "acme", worker, 3)


async def test_a_forged_chain_of_an_invented_worker_is_found(signed):
    """Whole in itself, in front of an anchor: but no anchor knows of it."""
    record = (1, "acme", "orders", "m1", events.SUCCEEDED, "{}", 1, 99)
    await signed.tamper("DELETE FROM event_log WHERE rowid = 1")  # makes room: rowids are dense
    await signed.tamper(
        "INSERT INTO event_log (rowid, id, tenant_id, subscription, task_id, event_type, data,"
        " created_at, worker_id, seq, hash) VALUES (1, x'00', ?, ?, ?, ?, ?, ?, ?, 1, ?)",
        *record[1:],
        link(GENESIS, record),
    )
    kinds = {(f.kind, f.worker_id) for f in signed.verify().findings}
    assert ("unsigned", 99) in kinds


async def test_a_chain_recomputed_without_the_key_is_found(signed):
    worker = signed.workers[1].worker_id
    await signed.tamper(
        "UPDATE event_log SET data = '{\"status\":\"failed\"}' WHERE tenant_id = 'acme'"
        " AND worker_id = ? AND seq = 6",
        worker,
    )
    await signed.recompute("acme", worker)
    report = signed.verify()
    assert {(f.kind, f.tenant_id, f.worker_id) for f in report.findings} == {
        ("changed", "acme", worker)
    }
    assert [f.seq for f in report.findings] == [8, 12]  # what anchors 2 and 3 signed


async def test_a_chain_recomputed_behind_the_last_anchor_is_named_as_not_yet_anchored(signed):
    worker = signed.workers[1].worker_id
    await signed.tamper(
        "UPDATE event_log SET data = '{}' WHERE tenant_id = 'acme' AND worker_id = ? AND seq = 13",
        worker,
    )
    await signed.recompute("acme", worker)
    report = signed.verify()
    assert report.ok
    assert report.not_yet_anchored == 8
    assert any("8 events are not yet anchored" in note for note in report.notes)


# ── cut ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_cut_behind_the_last_anchor_leaves_fewer_events_not_yet_anchored(signed):
    last = signed.count()
    await signed.tamper("DELETE FROM event_log WHERE rowid > ?", last - 5)
    report = signed.verify()
    assert report.ok
    assert report.not_yet_anchored == 3
    assert report.last_anchor_at_us is not None


async def test_a_chain_cut_before_the_last_anchor_is_found(signed):
    worker = signed.workers[1].worker_id
    await signed.tamper(
        "DELETE FROM event_log WHERE tenant_id = 'zeta' AND worker_id = ? AND seq > 9", worker
    )
    report = signed.verify()
    assert only(report) == ("missing", "zeta", worker, 12)
    assert "anchor 3 signed" in str(report.findings[0])


async def test_a_table_cut_back_to_an_earlier_anchor_is_found_by_the_file(signed):
    anchors = await signed.store.file.read(
        lambda conn: conn.execute(
            "SELECT rowid FROM event_log WHERE event_type = ? ORDER BY rowid", (events.ANCHOR,)
        ).fetchall()
    )
    await signed.tamper("DELETE FROM event_log WHERE rowid > ?", anchors[1][0])
    report = signed.verify()
    assert only(report)[0] == "anchor_file"
    assert "anchor 3 is not in the ledger" in str(report.findings[0])


async def test_writing_goes_on_after_a_cut_and_the_cut_stays_visible(signed, caplog):
    anchors = await signed.store.file.read(
        lambda conn: conn.execute(
            "SELECT rowid FROM event_log WHERE event_type = ? ORDER BY rowid", (events.ANCHOR,)
        ).fetchall()
    )
    await signed.tamper("DELETE FROM event_log WHERE rowid > ?", anchors[1][0])
    signed.store._ledger._heads.clear()  # as after a restart
    await signed.write(1)
    await signed.anchor()
    assert "the ledger was cut" in caplog.text
    texts = [str(f) for f in signed.verify().findings]
    assert any("anchor 4 does not follow anchor 2" in text for text in texts)
    assert any("anchor 3 is not in the ledger" in text for text in texts)


# ── anchors ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_dropped_anchor_is_found(signed):
    await signed.tamper(
        "DELETE FROM event_log WHERE event_type = ? AND json_extract(data, '$.n') = 2",
        events.ANCHOR,
    )
    kinds = {f.kind for f in signed.verify().findings}
    assert {"missing", "anchor", "anchor_file"} <= kinds


async def test_another_key_is_named(signed):
    report = signed.verify(b"x" * 32)
    assert {f.kind for f in report.findings} == {"unsigned", "anchor_file"}
    assert ledger.key_id(KEY) in str(report.findings[0])
    assert report.anchors == 0


async def test_a_forged_anchor_is_found(signed):
    """Chains and all are consistent: only the signature is not."""
    worker = signed.workers[0].worker_id
    data = msgspec.json.encode(
        {"n": 3, "at": 1, "chains": [], "previous": "", "key_id": "", "mac": ""}
    )
    await signed.tamper(
        "UPDATE event_log SET data = ? WHERE event_type = ? AND json_extract(data, '$.n') = 3",
        data.decode(),
        events.ANCHOR,
    )
    await signed.recompute(ledger.TENANT, worker)
    assert "unsigned" in {f.kind for f in signed.verify().findings}


async def test_lines_lost_from_the_anchor_file_are_found(signed):
    lines = signed.anchor_file.read_bytes().splitlines(keepends=True)
    signed.anchor_file.write_bytes(lines[0] + lines[2])
    assert "anchors 2 are missing" in str(signed.verify().findings[0])
    signed.anchor_file.write_bytes(lines[0])
    assert "anchors 2 to 3 are missing" in str(signed.verify().findings[0])
    signed.anchor_file.write_bytes(lines[1] + lines[0] + lines[2])
    assert not signed.verify().ok
    signed.anchor_file.unlink()
    assert "does not exist" in str(signed.verify().findings[0])


async def test_an_anchor_whose_line_a_crash_kept_back_is_written_by_the_next_step(signed):
    lines = signed.anchor_file.read_bytes().splitlines(keepends=True)
    signed.anchor_file.write_bytes(b"".join(lines[:2]) + lines[2][:40])  # torn
    report = signed.verify()
    assert report.ok
    assert any("anchor 3 is not yet in the anchor file" in note for note in report.notes)
    assert any("torn" in note for note in report.notes)
    await signed.anchor()
    assert signed.anchor_file.read_bytes().startswith(b"".join(lines))
    report = signed.verify()
    assert report.ok
    assert report.anchors == 4
    assert report.notes == []


async def test_a_long_last_line_is_read_whole(home):
    file = AnchorFile(home / "a")
    chains = tuple(("t" * 60, n, n, "ab" * 32) for n in range(2000))
    anchors = [
        ledger.Anchor(n=n, at=n, chains=chains, previous="", key_id="k").sealed(KEY) for n in (1, 2)
    ]
    file.append(anchors[:1])
    file.append(anchors[1:])
    assert file.last() == 2
    assert [ledger.read_anchor(line) for line in file.read()] == anchors


async def test_an_anchor_file_that_cannot_be_written_is_the_stores_error(book):
    book.anchor_file.mkdir()
    await book.write(1)
    with pytest.raises(StoreError, match="anchor file"):
        await book.anchors.step(book.workers[0])


# ── pruning ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def pruned(book: Book) -> Book:
    """Ten days, an anchor each; then everything older than three days is pruned."""
    for _ in range(10):
        await book.write(40)
        await book.anchor()
        book.clock.advance(DAY_S)
    gone = await Pruner(book.store, key=KEY, keep_days=3.5).step(book.workers[1])
    assert gone > 500
    return book


async def test_a_pruned_ledger_verifies(pruned):
    report = pruned.verify()
    assert report.ok, [str(f) for f in report.findings]
    assert report.pruned_before == 7
    assert report.anchors == 4
    assert report.chains == 6
    assert pruned.count("created_at < 1") == 0
    await pruned.write(3)
    await pruned.anchor()
    assert pruned.verify().ok


async def test_pruning_again_takes_the_old_checkpoint_away(pruned):
    for _ in range(6):
        await pruned.write(5)
        await pruned.anchor()
        pruned.clock.advance(DAY_S)
    pruner = Pruner(pruned.store, key=KEY, keep_days=3.5)
    assert await pruner.step(pruned.workers[0]) > 0
    assert await pruner.step(pruned.workers[0]) == 0, "nothing is left to prune"
    report = pruned.verify()
    assert report.ok, [str(f) for f in report.findings]
    assert report.pruned_before == 13
    (rows,) = await pruned.store.file.read(
        lambda conn: conn.execute(
            "SELECT count(*) FROM event_log WHERE rowid < ?", (rows_of_seals.anchor_row(conn, 13),)
        ).fetchone()
    )
    assert rows <= 6, "only the ends of living chains stay"


async def test_a_gap_without_a_checkpoint_is_found(pruned):
    await pruned.tamper("DELETE FROM event_log WHERE event_type = ?", events.PRUNED)
    assert "missing" in {f.kind for f in pruned.verify().findings}


async def test_a_forged_checkpoint_is_found(pruned):
    """Somebody who prunes more than was signed for, and says so without the key."""
    worker = pruned.workers[1].worker_id
    await pruned.tamper(
        "UPDATE event_log SET data = json_set(data, '$.anchor', 9) WHERE event_type = ?",
        events.PRUNED,
    )
    await pruned.recompute(ledger.TENANT, worker)
    assert "checkpoint" in {f.kind for f in pruned.verify().findings}


async def test_more_deleted_than_the_checkpoint_says_is_found(pruned):
    worker = pruned.workers[0].worker_id
    (first,) = await pruned.store.file.read(
        lambda conn: conn.execute(
            "SELECT min(seq) FROM event_log WHERE tenant_id = 'acme' AND worker_id = ?"
            " AND seq > 280",
            (worker,),
        ).fetchone()
    )
    await pruned.tamper(
        "DELETE FROM event_log WHERE tenant_id = 'acme' AND worker_id = ? AND seq = ?",
        worker,
        first,
    )
    assert ("missing", "acme", worker) in {
        (f.kind, f.tenant_id, f.worker_id) for f in pruned.verify().findings
    }


async def test_what_a_crash_left_of_pruned_events_does_not_matter_and_goes_next_time(book):
    for _ in range(6):
        await book.write(10)
        await book.anchor()
        book.clock.advance(DAY_S)
    pruner = Pruner(book.store, key=KEY, keep_days=3.5)
    found = await book.store.file.read(pruner._cut)
    assert found is not None
    await book.store.write(
        lambda tx, change: pruner._write(tx, change, *found), worker_id=book.workers[0].worker_id
    )
    before = book.count()
    await book.tamper("DELETE FROM event_log WHERE rowid < 30")
    report = book.verify()  # killed in the middle of the deletions
    assert report.ok, [str(f) for f in report.findings]
    assert any("still there" in note for note in report.notes)
    assert await pruner.step(book.workers[0]) > 0
    assert book.count() < before
    assert book.verify().ok


async def test_a_living_chain_that_was_quiet_goes_on_where_it_stood(book):
    """All its events are older than the cut, and its writer forgot its end (a rollback)."""
    await book.write(3, tenants=("quiet",))
    for _ in range(6):
        await book.write(10)
        await book.anchor()
        book.clock.advance(DAY_S)
    await Pruner(book.store, key=KEY, keep_days=2.5).step(book.workers[0])
    book.store._ledger._heads.clear()
    await book.write(1, tenants=("quiet",))
    await book.anchor()
    report = book.verify()
    assert report.ok, [str(f) for f in report.findings]
    assert book.count("tenant_id = 'quiet' AND seq = 4") == 2


async def test_rows_of_former_workers_go_with_their_events(book):
    old = await book.store.register("old")
    await book.one(old, "acme", "x")
    await book.store.leave(old)
    for _ in range(8):
        await book.write(10)
        await book.anchor()
        book.clock.advance(DAY_S)
    await Pruner(book.store, key=KEY, keep_days=2.5).step(book.workers[0])

    def known(file: SqliteFile) -> list[int]:
        return file.read_sync(
            lambda conn: [w for (w,) in conn.execute("SELECT worker_id FROM workers")]
        )

    assert known(book.store.file) == [w.worker_id for w in book.workers]
    report = book.verify()
    assert report.ok, [str(f) for f in report.findings]
    assert ("acme", old.worker_id) not in {
        head[:2]
        for _, checkpoint in [
            await book.store.file.read(rows_of_seals.last_checkpoint) or (0, None)
        ]
        if checkpoint is not None
        for head in checkpoint.chains
    }


async def test_an_anchor_that_signed_a_long_ended_chain_is_kept_with_its_end(book):
    """No process ran for days: the first anchor then tells of workers that are long gone."""
    old = await book.store.register("old")
    await book.one(old, "acme", "x")
    await book.store.leave(old)
    book.clock.advance(3 * DAY_S)
    await book.anchor()
    for _ in range(3):
        book.clock.advance(DAY_S)
        await book.write(1)
        await book.anchor()
    pruner = Pruner(book.store, key=KEY, keep_days=2.5)
    assert await pruner.step(book.workers[0]) > 0
    report = book.verify()
    assert report.ok, [str(f) for f in report.findings]
    assert report.pruned_before == 1


async def test_a_tenant_s_first_event_costs_no_search_through_the_ledger(book):
    """With many tenants such searches would hold up every writer of the file."""
    await book.write(300)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    def watched(conn: sqlite3.Connection) -> None:
        conn.set_progress_handler(count, 100)
        entry: events.Entry = ("newcomer", "q", "m", events.SUCCEEDED, {})
        try:
            book.store._ledger.write(conn, book.workers[0].worker_id, [entry], 1)
        finally:
            conn.set_progress_handler(None, 100)

    await book.store.file.write(watched)
    assert steps < 10
    assert book.verify().ok


async def test_nothing_is_pruned_that_no_anchor_signed(book):
    await book.write(10)
    book.clock.advance(30 * DAY_S)
    assert await Pruner(book.store, key=KEY, keep_days=1).step(book.workers[0]) == 0
    assert book.count() == 40


# ── key ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_made_once_and_only_its_owner_may_read_it(home):
    path = home / "keys" / "ledger.key"
    key = ledger_key(path, environ={}, create=True)
    assert len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ledger_key(path, environ={}, create=True) == key
    assert [p.name for p in path.parent.iterdir()] == ["ledger.key"]


def test_the_variable_wins(home):
    text = "a key from the environment"
    assert ledger_key(home / "x", environ={"ACKBONE_LEDGER_KEY": text}) == text.encode()
    with pytest.raises(ConfigError, match="at least 16"):
        ledger_key(home / "x", environ={"ACKBONE_LEDGER_KEY": "short"})


def test_a_missing_or_open_key_is_named(home, caplog):
    with pytest.raises(ConfigError, match="no ledger key"):
        ledger_key(home / "nowhere", environ={})
    path = home / "open"
    path.write_bytes(b"z" * 32)
    path.chmod(0o644)
    ledger_key(path, environ={})
    assert "can be read by others" in caplog.text
