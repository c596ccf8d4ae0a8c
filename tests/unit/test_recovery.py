"""`inspect` and `recover` on files that are damaged in every way but the log's."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.broker import Outgoing
from ackbone.core.errors import Conflict, NotFound, StoreCorrupt
from ackbone.sqlitefile.file import close_file, open_file
from ackbone.store.sqlite.migrate import PAGE_SIZE as PAGE
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.recovery import inspect, recover
from ackbone.store.sqlite.salvage import NUMBERS_LEFT_OUT
from ackbone.store.sqlite.store import SqliteStore
from ackbone.store.sqlite.verify import verify_ledger

MESSAGES = 600


@pytest.fixture
async def database(home: Path) -> Path:
    """A file with messages on many pages, closed and checkpointed."""
    path = home / "ackbone.db"
    ensure_schema(path)
    broker = SqliteBroker(path)
    await broker.open()
    batch = [
        Outgoing(id=f"m{n}", body=f'{{"n": {n}}}'.encode() + b" " * 300) for n in range(MESSAGES)
    ]
    await broker.publish("jobs", batch)
    await broker.close()
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return path


def leaf_pages(path: Path, table: str) -> list[int]:
    with closing(sqlite3.connect(path)) as conn:
        found = conn.execute(
            "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = 'leaf' ORDER BY pageno",
            (table,),
        )
        return [page for (page,) in found]


def ruin(path: Path, page: int) -> None:
    """Overwrite a page with noise."""
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(random.Random(page).randbytes(PAGE))


def ids(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as conn:
        return {name for (name,) in conn.execute("SELECT message_id FROM messages")}


def test_a_sound_file_is_left_alone(database: Path) -> None:
    before = database.read_bytes()
    report = recover(database, accept_loss=True)
    assert report.sound
    assert report.copy is None
    assert report.summary == f"{database} holds all of its 1 durable commits"
    assert database.read_bytes() == before
    rows = {table.name: table.rows for table in report.tables}
    assert rows["messages"] == MESSAGES


def test_there_must_be_a_file(home: Path) -> None:
    with pytest.raises(NotFound, match="no database"):
        inspect(home / "none.db")


def test_what_a_ruined_page_does_not_hold_is_saved(database: Path) -> None:
    pages = leaf_pages(database, "messages")
    assert len(pages) > 10
    for page in (pages[0], pages[len(pages) // 2], pages[-1]):
        ruin(database, page)
    damaged = database.read_bytes()
    report = inspect(database)
    assert not report.sound
    assert report.problems
    with pytest.raises(StoreCorrupt, match="Nothing was changed"):
        recover(database, accept_loss=False)
    assert database.read_bytes() == damaged

    mended = recover(database, accept_loss=True)

    assert mended.sound
    left = ids(database)
    lost = MESSAGES - len(left)
    per_page = MESSAGES // len(pages) + 2
    assert 0 < lost <= 3 * per_page
    assert mended.lost_rows == {"messages": lost}
    assert mended.copy is not None
    assert (Path(mended.copy) / "ackbone.db").read_bytes() == damaged
    close_file(open_file(database))
    assert not list(database.parent.glob("*.salvage*"))


def test_a_ruined_page_between_the_leaves_loses_only_what_is_below_it(database: Path) -> None:
    with closing(sqlite3.connect(database)) as conn:
        conn.executemany(
            "INSERT INTO messages (queue, message_id, sent_at, headers, body, body_crc)"
            " VALUES ('big', ?, 0, '{}', zeroblob(3000), 0)",
            [(f"b{n}",) for n in range(2000)],
        )
        conn.commit()
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        inner = conn.execute(
            "SELECT pageno FROM dbstat WHERE name = 'messages' AND pagetype = 'internal'"
            " ORDER BY length(path) DESC, pageno LIMIT 1"
        ).fetchone()[0]
        root = conn.execute("SELECT rootpage FROM sqlite_master WHERE name = 'messages'")
        assert inner != root.fetchone()[0]
    ruin(database, inner)
    mended = recover(database, accept_loss=True)
    assert mended.sound
    assert 0 < len(ids(database)) < MESSAGES + 2000
    assert sum(mended.lost_rows.values()) == MESSAGES + 2000 - len(ids(database))


def test_the_ledger_says_what_was_lost_and_still_verifies(database: Path) -> None:
    ruin(database, leaf_pages(database, "messages")[3])
    mended = recover(database, accept_loss=True)
    with closing(sqlite3.connect(database)) as conn:
        (data,) = conn.execute(
            "SELECT data FROM event_log WHERE event_type = 'ledger.recovered'"
        ).fetchone()
    event = json.loads(data)
    assert event["lost_rows"] == mended.lost_rows
    assert event["copy"] == Path(mended.copy or "").name
    verified = verify_ledger(database, b"k" * 32, database.with_name("anchors"))
    assert verified.ok, verified.findings
    assert verified.events == 1


def test_numbers_that_were_given_out_are_not_given_out_again(database: Path) -> None:
    with closing(sqlite3.connect(database)) as conn:
        (highest,) = conn.execute("SELECT max(seq) FROM messages").fetchone()
    ruin(database, leaf_pages(database, "messages")[-1])
    recover(database, accept_loss=True)
    with closing(sqlite3.connect(database)) as conn:
        (kept,) = conn.execute("SELECT max(seq) FROM messages").fetchone()
        new = conn.execute(
            "INSERT INTO messages (queue, message_id, sent_at, headers, body, body_crc)"
            " VALUES ('jobs', 'new', 0, '{}', x'', 0)"
        ).lastrowid
    assert kept < highest
    assert new is not None
    assert highest < new <= highest + NUMBERS_LEFT_OUT + 1


def test_a_file_without_a_readable_first_page_is_beyond_us_and_stays_as_it_is(
    database: Path,
) -> None:
    ruin(database, 1)
    damaged = database.read_bytes()
    report = inspect(database)
    assert report.commits is None
    assert "cannot be read" in report.summary
    with pytest.raises(StoreCorrupt):
        recover(database, accept_loss=True)
    assert database.read_bytes() == damaged
    assert not list(database.parent.glob("*.before-recovery-*"))


async def test_refuses_while_a_worker_is_alive(database: Path) -> None:
    ruin(database, leaf_pages(database, "messages")[3])
    store = SqliteStore(database)
    await store.open()
    worker = await store.register("alive")
    with pytest.raises(Conflict, match=f"worker {worker.worker_id} is alive"):
        recover(database, accept_loss=True)
    await store.leave(worker)
    await store.close()
    assert recover(database, accept_loss=True).sound


def test_refuses_while_another_process_has_it_open(database: Path) -> None:
    Path(f"{database}.witness").unlink()
    ruin(database, leaf_pages(database, "messages")[3])
    program = (
        "import sqlite3, sys; conn = sqlite3.connect(sys.argv[1]);"
        "conn.execute('SELECT count(*) FROM workers').fetchone(); print('open', flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(database)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(Conflict, match="open in another process"):
            recover(database, accept_loss=True)
        other.communicate("")
    assert not list(database.parent.glob("*.before-recovery-*"))
    assert recover(database, accept_loss=True).sound


def test_damaged_bodies_are_counted(database: Path) -> None:
    with closing(sqlite3.connect(database)) as conn:
        conn.execute("UPDATE messages SET body = CAST(body || 'x' AS BLOB) WHERE seq % 100 = 0")
        conn.commit()
    report = inspect(database)
    assert report.sound, "each bad body is dead-lettered when its turn comes: nothing to mend"
    bad = {table.name: table.bad_checksums for table in report.tables}
    assert bad["messages"] == MESSAGES // 100


def test_inspect_changes_nothing(database: Path) -> None:
    ruin(database, leaf_pages(database, "messages")[2])
    copy = database.with_name("before.db")
    shutil.copy(database, copy)
    inspect(database)
    assert database.read_bytes() == copy.read_bytes()
