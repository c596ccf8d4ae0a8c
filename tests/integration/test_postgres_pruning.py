"""Pruning the ledger on PostgreSQL: what is old goes, and what is left is proven as before."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ackbone.core import events
from ackbone.core.clock import from_us
from ackbone.core.errors import StoreCorrupt
from ackbone.core.findings import Finding
from ackbone.pgserver.address import Address
from ackbone.store.ledger import TENANT
from ackbone.store.postgres import pruned_rows as rows_module
from ackbone.store.postgres import seals
from ackbone.store.postgres.checks import examine
from ackbone.store.postgres.migrate import ensure_schema
from ackbone.store.postgres.prune import Pruner
from ackbone.store.postgres.pruned_rows import pruned_rows
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.postgres.tenant_wall import admit_worker
from ackbone.store.postgres.verify import verify_ledger
from tests.servers.postgres import PostgresServer

from .pruning import DAY_S, KEY, PostgresBook

pytestmark = pytest.mark.xdist_group("postgres")


@pytest.fixture
async def book(postgres_url: str, home: Path) -> AsyncIterator[PostgresBook]:
    book = PostgresBook(postgres_url, home)
    await book.open()
    yield book
    await book.close()


@pytest.fixture
async def pruned(book: PostgresBook) -> PostgresBook:
    """Ten days, an anchor each; then everything older than three days is pruned."""
    await book.days(10)
    gone = await book.pruner(3.5).step(book.workers[1])
    assert gone.rows > 100
    assert gone.all
    return book


# ── what goes ────────────────────────────────────────────────────────────────────────────────────


async def test_a_pruned_ledger_verifies(pruned: PostgresBook) -> None:
    report = pruned.assert_whole()
    assert (report.pruned_before, report.anchors, report.last_anchor) == (7, 4, 10)
    assert report.chains == 6, "four of tenants; of the ledger, that of anchors and of checkpoints"
    assert pruned.left_over() == 5, "the ends of living chains"
    await pruned.write(3)
    await pruned.anchor()
    assert pruned.assert_whole().anchors == 5


async def test_pruning_again_takes_the_old_ends_and_the_old_checkpoint_away(
    pruned: PostgresBook,
) -> None:
    await pruned.days(6)
    pruner = pruned.pruner(3.5)
    assert (await pruner.step(pruned.workers[0])).rows > 0
    again = await pruner.step(pruned.workers[0])
    assert (again.rows, again.months) == (0, 0), "nothing is left to prune"
    assert pruned.assert_whole().pruned_before == 13
    assert pruned.left_over() <= 6
    await pruned.days(5)
    await pruner.step(pruned.workers[0])
    assert pruned.count(f"event_type = '{events.PRUNED}'") <= 2
    pruned.assert_whole()


async def test_months_that_are_over_are_dropped(book: PostgresBook) -> None:
    await book.days(27, each=1, apart=3)  # to the 23rd of March
    assert book.months()[:3] == ["01", "02", "03"]
    gone = await book.pruner(15).step(book.workers[0])
    assert gone.months == 2
    assert gone.rows > 0, "the first days of March"
    assert book.months()[0] == "03"
    assert book.left_over() == 5
    assert book.assert_whole().pruned_before == 22
    await book.days(1)
    book.assert_whole()


async def test_the_end_of_a_living_chain_is_kept_when_its_month_goes(book: PostgresBook) -> None:
    """All its events are older than the cut, and its writer forgot its end."""
    await book.write(3, tenants=("quiet",))
    await book.days(20, each=1, apart=3)
    assert (await book.pruner(10).step(book.workers[0])).months == 1
    assert book.count("tenant_id = 'quiet'") == 2
    found = {check.name: check for check in examine(book.url, deep=False)}
    assert found["partitions"].finding is Finding.OK, "that is where they belong"
    book.store._ledger._begun.clear()
    book.store._ledger._given_out.clear()
    await book.write(1, tenants=("quiet",))
    await book.anchor()
    book.assert_whole()
    assert book.count("tenant_id = 'quiet' AND seq = 4") == 2


async def test_a_row_that_no_anchor_signed_outlives_its_month(book: PostgresBook) -> None:
    """A server whose clock was wrong for a while."""
    await book.days(20, each=1, apart=3)
    book.rows(
        "INSERT INTO event_log SELECT id, 'odd', subscription, task_id, event_type, data,"
        " created_at, 99, 1, hash FROM event_log WHERE tenant_id = 'acme' AND seq = 2"
    )
    assert (await book.pruner(10).step(book.workers[0])).months == 1
    assert book.count("tenant_id = 'odd'") == 2
    assert not book.verify().ok, "and it is still said to be odd"


async def test_nothing_is_pruned_that_no_anchor_signed(book: PostgresBook) -> None:
    await book.write(10)
    book.clock.advance(30 * DAY_S)
    gone = await book.pruner(1).step(book.workers[0])
    assert (gone.rows, gone.months) == (0, 0)
    assert book.count() == 40


async def test_nothing_is_pruned_while_the_clock_is_in_doubt(book: PostgresBook) -> None:
    await book.days(6)
    book.store.expiry_paused = True
    gone = await book.pruner(2.5).step(book.workers[0])
    assert (gone.rows, gone.months) == (0, 0)
    book.store.expiry_paused = False
    assert (await book.pruner(2.5).step(book.workers[0])).rows > 0


async def test_rows_of_former_workers_go_with_their_events(book: PostgresBook) -> None:
    old = await book.store.register("old")
    await book.one(old, "acme")
    await book.store.leave(old)
    pruner = book.pruner(2.5)
    for _ in range(3):
        await book.days(4)
        await pruner.step(book.workers[0])
        book.assert_whole()
    known = [worker_id for (worker_id,) in book.rows("SELECT worker_id FROM workers ORDER BY 1")]
    assert known == [worker.worker_id for worker in book.workers]
    found = await seals.last_checkpoint(book.store)
    assert found is not None
    assert old.worker_id not in {worker_id for _, worker_id, *_ in found[1].chains}
    assert book.count(f"worker_id = {old.worker_id}") == 0


async def test_a_worker_that_ends_after_its_end_was_spared_leaves_a_whole_ledger(
    book: PostgresBook,
) -> None:
    """Its last row stayed for its sake; the checkpoint that forgets its chain must not leave it."""
    brief = await book.store.register("brief")
    await book.one(brief, "acme")
    await book.days(5)
    pruner = book.pruner(2.5)
    await pruner.step(book.workers[0])
    assert book.count(f"worker_id = {brief.worker_id}") == 1
    await book.store.leave(brief)
    await book.days(8, each=1)
    await pruner.step(book.workers[0])
    book.assert_whole()
    assert book.count(f"worker_id = {brief.worker_id}") == 0


async def test_many_spans_and_batches_leave_nothing_behind(
    book: PostgresBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BATCH", 7)
    await book.days(6, each=20)
    gone = await book.pruner(1.5).step(book.workers[0])
    assert gone.rows == 5 * 80 + 4 - 5, "five days and four anchors, but for the ends"
    book.assert_whole()


async def test_a_month_with_too_much_to_keep_goes_row_by_row(
    book: PostgresBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MOST_MOVED", 3)
    await book.write(2, tenants=("quiet", "still"))
    await book.days(20, each=1, apart=3)
    gone = await book.pruner(10).step(book.workers[0])
    assert (gone.months, gone.all) == (0, True)
    assert book.count("tenant_id IN ('quiet', 'still')") == 4
    assert book.left_over() == 9
    book.assert_whole()


async def test_who_may_not_drop_a_month_empties_it(
    own_postgres: PostgresServer, home: Path
) -> None:
    """A role of workers, which gets at the rows of a month by the ledger's name only."""
    role, name = f"agents_{os.getpid()}", own_postgres.new_database()
    own_postgres.execute(f"CREATE ROLE {role} LOGIN")
    ensure_schema(own_postgres.url(name))
    book = PostgresBook(own_postgres.url(name), home)
    await book.open()
    try:
        await book.days(20, each=1, apart=3)
        with psycopg.connect(book.url) as conn:
            admit_worker(conn, Address.from_url(book.url), role)
            conn.execute(f"GRANT USAGE ON SCHEMA fake TO {role}")
            conn.execute(f"GRANT SELECT ON fake.clock TO {role}")
        store = PostgresStore(own_postgres.url(name, role=role))
        await store.open()
        worker = await store.register("agent")
        gone = await Pruner(store, key=KEY, keep_days=10).step(worker)
        await store.close()
        assert gone.months == 0
        assert gone.rows > 50
        assert book.months()[0] == "01"
        assert book.left_over() == 5
        gone = await book.pruner(10).step(book.workers[0])
        assert (gone.rows, gone.months) == (0, 1), "its owner has only the shell to drop"
        assert book.left_over() == 5
    finally:
        await book.close()
        own_postgres.drop(name)
        own_postgres.execute(f"DROP ROLE {role}")


# ── not alone ────────────────────────────────────────────────────────────────────────────────────


async def test_two_that_prune_at_once_make_one_checkpoint(book: PostgresBook) -> None:
    await book.days(20, each=1, apart=3)
    other = PostgresStore(book.url)
    await other.open()
    worker = await other.register("other")
    pruners = [(book.pruner(10), book.workers[0]), (Pruner(other, key=KEY, keep_days=10), worker)]
    for _ in range(3):
        await asyncio.gather(*(pruner.step(by) for pruner, by in pruners))
    await other.close()
    assert book.count(f"event_type = '{events.PRUNED}'") == 1
    assert book.left_over() == 5
    book.assert_whole()


async def test_a_checkpoint_is_not_written_behind_another_one_s_back(book: PostgresBook) -> None:
    await book.days(6)
    pruner = book.pruner(2.5)
    anchor = await pruner._next(None)
    assert anchor is not None
    checkpoint = await pruner._checkpoint(None, anchor)
    for _ in range(2):  # the second looked before the first had written
        await book.store.write(
            lambda tx, change: pruner._write(tx, change, checkpoint, ""),
            worker_id=book.workers[1].worker_id,
        )
    assert book.count(f"event_type = '{events.PRUNED}'") == 1


async def test_while_one_prunes_another_does_nothing(book: PostgresBook) -> None:
    await book.days(6)
    async with pruned_rows(book.store.database) as first:
        assert first is not None
        assert (await book.pruner(2.5).step(book.workers[0])).rows == 0
    assert book.count(f"event_type = '{events.PRUNED}'") == 0
    assert (await book.pruner(2.5).step(book.workers[0])).rows > 0


async def test_a_reader_keeps_its_months_and_holds_up_nobody(
    book: PostgresBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "TRIES", 2)
    await book.days(20, each=1, apart=3)
    pruner = book.pruner(10)
    with psycopg.connect(book.url) as reader:
        reader.execute("SELECT count(*) FROM event_log")  # as `ledger verify` does, for long
        gone = await pruner.step(book.workers[0])
        assert (gone.months, gone.all) == (0, False)
        assert book.months()[0] == "01"
        async with asyncio.timeout(20):
            await book.write(1)
        book.assert_whole()
    gone = await pruner.step(book.workers[0])
    assert (gone.months, gone.all) == (1, True)
    assert book.months()[0] == "02"
    book.assert_whole()


async def test_a_sender_that_holds_the_deliveries_does_not_hold_up_an_anchor(
    book: PostgresBook,
) -> None:
    held, free = asyncio.Event(), asyncio.Event()

    async def hold(tx: Any, change: Any) -> None:
        await tx.hold_deliveries()
        held.set()
        await free.wait()

    await book.write(1)
    holding = asyncio.create_task(book.store.write(hold, worker_id=book.workers[1].worker_id))
    await held.wait()
    anchoring = asyncio.create_task(book.anchors.step(book.workers[0]))
    done, _ = await asyncio.wait([anchoring], timeout=10)
    free.set()
    await asyncio.gather(holding, anchoring)
    assert done, "the anchor waited for the lock of deliveries"


async def test_work_goes_on_while_months_are_dropped(book: PostgresBook) -> None:
    await book.days(20, each=1, apart=3)
    done = asyncio.Event()

    async def write() -> int:
        n = 0
        while not done.is_set():
            await book.one(book.workers[1], "busy")
            n += 1
        return n

    writing = asyncio.create_task(write())
    gone = await book.pruner(10).step(book.workers[0])
    done.set()
    written = await writing
    assert gone.months == 1
    assert book.count("tenant_id = 'busy'") == written > 0
    book.assert_whole()


# ── kills ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_kill_at_any_statement_loses_nothing_and_is_made_up_for(
    book: PostgresBook,
) -> None:
    await book.write(2, tenants=("quiet",))
    await book.days(20, each=1, apart=3)
    young = "SELECT id FROM event_log WHERE event_type <> %s AND created_at >= %s ORDER BY 1"
    asked = (young, events.PRUNED, from_us(book.clock.now_us() - int(10 * DAY_S * 1e6)))
    before = book.rows(*asked)
    victim = str(Path(__file__).with_name("pruning_victim.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, victim, book.url, str(book.anchor_file), stdout=subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    killed = [json.loads(line) for line in out.splitlines()]
    assert [each for each in killed if each["found"]] == []
    for statement in ("WITH heads", "ALTER TABLE", "INSERT INTO event_log SELECT", "DROP TABLE"):
        assert any(each["before"].startswith(statement) for each in killed), (statement, killed)
    assert book.rows(*asked) == before
    assert book.months()[0] == "02"
    assert book.left_over() == 7
    await book.days(1)
    book.assert_whole()


# ── fraud ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_gap_without_a_checkpoint_is_found(pruned: PostgresBook) -> None:
    pruned.rows("DELETE FROM event_log WHERE event_type = %s", events.PRUNED)
    assert "missing" in {each.kind for each in pruned.verify().findings}


async def test_a_forged_checkpoint_is_found_and_not_followed(pruned: PostgresBook) -> None:
    """Somebody who lets more go than was signed for, and says so without the key."""
    pruned.rows(
        "UPDATE event_log SET data = jsonb_set(data::jsonb, '{anchor}', '9')::json"
        " WHERE event_type = %s",
        events.PRUNED,
    )
    assert "checkpoint" in {each.kind for each in pruned.verify().findings}
    before = pruned.count()
    await pruned.days(3)
    with pytest.raises(StoreCorrupt, match="checkpoint 9 was changed"):
        await pruned.pruner(3.5).step(pruned.workers[0])
    assert pruned.count() > before


async def test_a_changed_anchor_is_not_sealed_by_a_checkpoint(book: PostgresBook) -> None:
    await book.days(8)
    book.rows(
        "UPDATE event_log SET data = jsonb_set(data::jsonb, '{chains,0,2}', '1')::json"
        " WHERE event_type = %s AND (data ->> 'n')::int = 3",
        events.ANCHOR,
    )
    before = book.count()
    with pytest.raises(StoreCorrupt, match="anchor 3 was changed"):
        await book.pruner(3.5).step(book.workers[0])
    assert book.count() == before


async def test_more_deleted_than_the_checkpoint_says_is_found(pruned: PostgresBook) -> None:
    worker = pruned.workers[0].worker_id
    found = await seals.last_checkpoint(pruned.store)
    assert found is not None
    (head,) = [h for h in found[1].chains if h[:2] == ("acme", worker)]
    pruned.rows(
        "DELETE FROM event_log WHERE tenant_id = 'acme' AND worker_id = %s AND seq = %s",
        worker,
        head[2] + 1,
    )
    assert ("missing", "acme", worker) in {
        (each.kind, each.tenant_id, each.worker_id) for each in pruned.verify().findings
    }


async def test_the_anchor_at_the_cut_must_be_there(pruned: PostgresBook) -> None:
    pruned.rows(
        "DELETE FROM event_log WHERE event_type = %s AND (data ->> 'n')::int = 7", events.ANCHOR
    )
    kinds = {(each.kind, each.tenant_id) for each in pruned.verify().findings}
    assert ("checkpoint", TENANT) in kinds


async def test_seals_of_a_lost_key_go_like_everything_else(book: PostgresBook) -> None:
    await book.days(5)
    book.anchor_file.unlink()
    new = b"n" * 32
    book.anchors._key = new
    await book.days(8)
    await Pruner(book.store, key=new, keep_days=2.5).step(book.workers[0])
    report = verify_ledger(book.url, new, book.anchor_file)
    assert report.ok, [str(each) for each in report.findings]
