"""Whatever is written, signed, pruned and forgotten, in whatever order: the ledger is whole, and
nothing young is gone."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ackbone.store.postgres.partitions import PartitionMaker
from tests.integration.pruning import DAY_S, PostgresBook
from tests.servers.postgres import OutsidePostgres, PostgresServer

pytestmark = pytest.mark.xdist_group("postgres")

tenants = st.sampled_from(["acme", "zeta", "quiet"])
acts = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 3), tenants),
    st.tuples(st.just("anchor")),
    st.tuples(st.just("wait"), st.sampled_from([0.3, 1.0, 2.5, 20.0, 45.0])),
    st.tuples(st.just("prune"), st.sampled_from([0.5, 3.0, 25.0])),
    st.tuples(st.just("replace"), st.integers(0, 3)),
    st.tuples(st.just("forget")),
)


@settings(max_examples=20)
@given(st.lists(acts, min_size=5, max_size=40))
def test_what_is_left_is_proven(
    postgres: PostgresServer | OutsidePostgres,
    postgres_template: str,
    plan: list[tuple[object, ...]],
) -> None:
    name = postgres.new_database(template=postgres_template)
    home = Path(tempfile.mkdtemp(prefix="ab-", dir="/tmp"))
    try:
        asyncio.run(_follow(PostgresBook(postgres.url(name), home), plan))
    finally:
        shutil.rmtree(home)
        postgres.drop(name)


async def _follow(book: PostgresBook, plan: list[tuple[object, ...]]) -> None:
    await book.open()
    book.workers += [await book.store.register(f"w{n}") for n in (2, 3)]
    try:
        for act in [*plan, ("write", 0, "acme"), ("anchor",), ("wait", 9.0), ("prune", 3.0)]:
            match act:
                case ("write", int(at), str(tenant)):
                    await book.one(book.workers[at], tenant)
                case ("anchor",):
                    book.clock.advance(90)
                    await book.anchors.step(book.workers[0])
                case ("wait", float(days)):
                    book.clock.advance(days * DAY_S)
                    await PartitionMaker(book.store).step(book.workers[0])
                case ("prune", float(days)):
                    await _prune(book, days)
                case ("replace", int(at)):
                    await book.store.leave(book.workers[at])
                    book.workers[at] = await book.store.register(f"w{at}")
                case ("forget",):  # as a process that did not give its numbers out itself
                    book.store._ledger._begun.clear()
                    book.store._ledger._given_out.clear()
        book.assert_whole()
    finally:
        await book.close()


async def _prune(book: PostgresBook, days: float) -> None:
    young = (
        "SELECT id FROM event_log WHERE event_type <> 'ledger.pruned' AND created_at >="
        f" fake.clock_timestamp() - {days} * interval '1 day' ORDER BY 1"
    )
    before = book.rows(young)
    gone = await book.pruner(days).step(book.workers[1])
    assert gone.all
    assert book.rows(young) == before
    book.assert_whole()
