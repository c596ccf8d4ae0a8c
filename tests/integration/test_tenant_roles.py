"""Roles around the wall: how workers and the API get theirs, what each may do, who is refused."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from ackbone import App, Context
from ackbone.backends import storage_of
from ackbone.composition.background import relays_of
from ackbone.config import Breaker, Config, Queue, Worker
from ackbone.core.approvals import ApprovalFilter
from ackbone.core.errors import Conflict, NotFound, StoreUnavailable
from ackbone.core.notices import Notices
from ackbone.core.records import LetterFilter
from ackbone.pgserver.connections import _SETTINGS
from ackbone.store import parked
from ackbone.store.operations import StoreOperations
from ackbone.store.parked import Answering
from ackbone.store.postgres import key_rows, task_rows, tenant_wall
from ackbone.store.postgres.migrate import admit, ensure_schema, tend, upgrade
from ackbone.store.postgres.records import PostgresRecords
from ackbone.store.postgres.sql import SQL
from ackbone.store.postgres.store import PostgresStore
from tests.integration.tenancy import Estate, bind, estate
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.xdist_group("postgres")


@pytest.fixture
def place(own_postgres: PostgresServer) -> Iterator[Estate]:
    with estate(own_postgres) as found:
        yield found


@pytest.fixture
def worker_url(place: Estate) -> str:
    role = place.role("agents")
    assert admit(place.owner, worker=role) == [(role, "worker", False)]
    return place.url(role)


def rows(url: str, statement: str, *values: Any) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as conn:
        return conn.execute(statement, values).fetchall()


def config(home: Path, url: str) -> Config:
    return Config(
        home=home,
        broker="sqlite",
        store=url,
        worker=Worker(lease_s=2.0),
        breaker=Breaker(failures=1000),
        queues={"q": Queue(ordered=False, ack_policy="dlq")},
    )


# ── workers ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_role_of_workers_does_all_of_the_work(home: Path, worker_url: str) -> None:
    app = App(config(home, worker_url))

    @app.on("t", queue="q", retries=0)
    async def work(ctx: Context) -> int:
        if ctx.payload == "bad":
            raise ValueError("no")
        await ctx.reply("done", channel="terminal", recipient="me")
        await ctx.once("effect", lambda: 1)
        return 1

    async with app:
        for tenant in ("a", "b"):
            for n in range(20):
                await app.send("t", n, queue="q", tenant_id=tenant, idempotency_key=f"k{n % 10}")
            await app.send("t", "bad", queue="q", tenant_id=tenant)
        worker = app.worker(relays=relays_of(app, spawn_solo=False))
        await worker.begin()
        async with asyncio.timeout(30):
            await app.idle(worker)
        await worker.drain()
        assert worker.failure is None
    by_status = (
        "SELECT tenant_id, status, count(*) FROM queue_executions GROUP BY 1, 2 ORDER BY 1, 2"
    )
    assert rows(worker_url, by_status) == [
        (tenant, status, count)
        for tenant in ("a", "b")
        for status, count in (("duplicate", 10), ("failed", 1), ("succeeded", 10))
    ]


def test_statements_are_planned_as_for_the_owner(place: Estate, worker_url: str) -> None:
    """The policy of workers says true: nothing of it is left in a plan."""
    hot = (
        (task_rows.FIND, 3),
        (task_rows.CLAIM_READY["all"], 6),
        (task_rows.CLAIM_READY["but"], 7),
        (task_rows.ALL_DONE, 9),
        (task_rows.OTHERS, 20),
        (key_rows.KEEP, 6),
        (key_rows.WAITING_FOR, 3),
        (SQL.claims.stuck, 0),
        (SQL.workers.running_of_the_gone, 0),
    )
    with psycopg.connect(place.owner, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO queue_executions (id, subscription, message_id, queue_name, status, held,"
            " worker_id, lane, lane_seq, idem_key, due_at) SELECT gen_random_uuid(), 's', 'm' || n,"
            " 'q', (ARRAY['succeeded', 'running', 'ready', 'queued', 'waiting_key'])[1 + n % 5],"
            " 'store', n % 50, 'l' || n % 100, n, 'k' || n, now() FROM generate_series(1, 5000) n"
        )
        conn.execute("ANALYZE")
    for statement, parameters in hot:
        owners, workers = (_plan(url, statement, parameters) for url in (place.owner, worker_url))
        assert workers == owners


def _plan(url: str, statement: str, parameters: int) -> list[str]:
    with psycopg.connect(url, autocommit=True) as conn:
        for name, value in _SETTINGS.items():
            conn.execute("SELECT set_config(%s, %s, false)", (name, value))
        conn.execute(f"PREPARE p AS {statement}")
        nulls = f"({', '.join(['NULL'] * parameters)})" if parameters else ""
        return [line for (line,) in conn.execute(f"EXPLAIN EXECUTE p{nulls}")]


async def test_a_role_that_is_bound_does_not_start(home: Path, place: Estate) -> None:
    role = place.role("agents")
    place.superuser(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    place.superuser(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}")
    for start in (App(config(home, place.url(role))).open, _reading(home, place.url(role))):
        with pytest.raises(StoreUnavailable, match=f"ackbone migrate --worker-role {role}"):
            await start()
    found = {each.name: each for each in _examined(home, place.url(role))}
    assert found["tenants"].finding == "refused"
    assert f"--worker-role {role}" in found["tenants"].hint
    admit(place.owner, worker=role)
    await _reading(home, place.url(role))()
    found = {each.name: each for each in _examined(home, place.url(role))}
    assert (found["tenants"].finding, found["rights"].finding) == ("ok", "ok")
    assert found["partitions"].finding == "warning", "only the owner makes them"
    place.superuser(f"REVOKE DELETE ON messages FROM {role}")
    found = {each.name: each for each in _examined(home, place.url(role))}
    assert found["rights"].finding == "refused"
    assert "DELETE on messages" in found["rights"].detail


def _reading(home: Path, url: str) -> Any:
    async def read() -> None:
        async with storage_of(config(home, url)).reading() as records:
            await records.queues()

    return read


def _examined(home: Path, url: str) -> Any:
    return storage_of(config(home, url)).examine(deep=True)


def test_a_table_without_the_wall_is_refused_by_doctor(home: Path, place: Estate) -> None:
    assert [e.finding for e in _examined(home, place.owner) if e.name == "tenants"] == ["ok"]
    with psycopg.connect(place.owner, autocommit=True) as conn:
        conn.execute("DROP POLICY tenant_wall ON effects")
        conn.execute("ALTER TABLE event_log_default DISABLE ROW LEVEL SECURITY")
        conn.execute("ALTER TABLE quotas DISABLE ROW LEVEL SECURITY")
    (found,) = [each for each in _examined(home, place.owner) if each.name == "tenants"]
    assert found.finding == "refused"
    assert "effects, event_log_default, quotas" in found.detail


def test_several_roles_of_workers_and_their_members_pass(place: Estate) -> None:
    first, second = place.role("first"), place.role("second")
    member = place.role("member", f"IN ROLE {second}")
    heir = place.role("heir", f"NOINHERIT IN ROLE {first}")
    for role in (first, second, first):
        admit(place.owner, worker=role)
    for role, sees in ((first, True), (second, True), (member, True), (heir, False)):
        with psycopg.connect(place.url(role)) as conn:
            assert (tenant_wall.bound_tables(conn) == []) is sees, role


def test_workers_work_on_tables_that_came_later(worker_url: str, place: Estate) -> None:
    with psycopg.connect(place.owner, autocommit=True) as conn:
        conn.execute("DROP POLICY workers ON quotas")
        conn.execute(f"REVOKE ALL ON quotas FROM {conninfo_to_dict(worker_url)['user']}")
    with psycopg.connect(worker_url, autocommit=True) as conn:
        assert tenant_wall.bound_tables(conn) == ["quotas"]
        tend(place.owner)
        assert tenant_wall.bound_tables(conn) == []
        conn.execute("INSERT INTO quotas (name, window_us, window_start) VALUES ('n', 1, now())")
        assert conn.execute("DELETE FROM quotas").rowcount == 1


def test_who_may_write_tasks_from_the_start_is_a_worker(own_postgres: PostgresServer) -> None:
    """A role that gets its rights with the tables (default privileges) sees all tenants."""
    with estate(own_postgres) as place:
        agents, reader = place.role("agents"), place.role("reader")
        with psycopg.connect(place.owner) as conn:
            conn.execute("DROP SCHEMA public CASCADE")
            conn.execute("CREATE SCHEMA public")
            conn.execute(f"GRANT USAGE ON SCHEMA public TO {agents}, {reader}")
            given = "ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT"
            conn.execute(f"{given} SELECT ON TABLES TO {agents}, {reader}")
            conn.execute(f"{given} INSERT, UPDATE, DELETE ON TABLES TO {agents}")
        assert upgrade(place.owner) is True
        for role, bound in ((agents, []), (reader, list(tenant_wall.TABLES))):
            with psycopg.connect(place.url(role)) as conn:
                assert tenant_wall.bound_tables(conn) == bound
        assert ensure_schema(place.url(agents)) is False
        with psycopg.connect(place.url(agents)) as conn:
            conn.execute("INSERT INTO send_windows VALUES ('k', '{}', now())")
            conn.execute(
                "INSERT INTO deliveries (id, channel, recipient, content, due_at, created_at)"
                " VALUES ('r', 'c', 'ann', 'x', now(), now())"
            )


# ── the API's role ───────────────────────────────────────────────────────────────────────────────


def test_it_has_what_is_written_and_nothing_else(place: Estate) -> None:
    role = place.role("pages")
    place.superuser(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    place.superuser(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}")
    admit(place.owner, api=role)
    found: dict[str, set[str]] = {}
    for table, right in rows(
        place.owner,
        "SELECT oid::regclass::text, privilege_type FROM pg_class, aclexplode(relacl)"
        " WHERE grantee = %s::regrole",
        role,
    ):
        found.setdefault(table, set()).add(right)
    for table, right, columns in rows(
        place.owner,
        "SELECT attrelid::regclass::text, privilege_type, string_agg(attname, ', ' ORDER BY attnum)"
        " FROM pg_attribute, aclexplode(attacl) WHERE grantee = %s::regrole GROUP BY 1, 2",
        role,
    ):
        found.setdefault(table, set()).add(f"{right} ({columns})")
    assert {table: {_in_order(r) for r in rights} for table, rights in found.items()} == {
        table: {_in_order(r) for r in rights} for table, rights in tenant_wall.API_RIGHTS.items()
    }
    with psycopg.connect(place.url(role)) as conn:
        bind(conn, "a")
        for table in tenant_wall.TABLES:
            with pytest.raises(errors.InsufficientPrivilege), conn.transaction():
                conn.execute(f"TRUNCATE {table}")
        for table in (
            "workers",
            "sources",
            "roles",
            "send_windows",
            "queue_metrics",
            "event_log_default",
        ):
            with pytest.raises(errors.InsufficientPrivilege), conn.transaction():
                conn.execute(f"SELECT * FROM {table}")


def _in_order(right: str) -> str:
    verb, _, columns = right.partition(" (")
    return f"{verb} {sorted(columns.rstrip(')').split(', '))}" if columns else verb


@asynccontextmanager
async def asked(place: Estate, home: Path) -> AsyncIterator[tuple[PostgresStore, list[str]]]:
    """A store with one parked, one dead and one finished message of each of two tenants, by a
    worker that asked for approval of the first; and the names of the two tenants."""
    tenants = ["a", "b"]
    rules = home / "rules.yaml"
    rules.write_text(
        "rules:\n- {name: big, match: {payload: 'amount > 9'}, then: approve, reason: much}\n"
        "- {name: few, match: {}, then: quota, window: hour, limits: {runs: 1000}}\n"
    )
    settings = config(home, place.owner)
    app = App(Config(**{**_fields(settings), "rules": rules}))

    @app.on("t", queue="q", retries=0)
    async def work(ctx: Context) -> None:
        if ctx.payload.get("bad"):
            raise ValueError("no")
        await ctx.reply("done", channel="terminal", recipient="me")
        await ctx.once("effect", lambda: 1)

    async with app:
        for tenant in tenants:
            for kind, payload in (
                ("parked", {"amount": 10}),
                ("dead", {"amount": 1, "bad": True}),
                ("fine", {"amount": 1}),
            ):
                await app.send(
                    "t", payload, queue="q", id=f"{kind}-{tenant}", tenant_id=tenant,
                    idempotency_key=kind,
                )  # fmt: skip
        worker = app.worker(relays=relays_of(app, spawn_solo=False))
        await worker.begin()
        async with asyncio.timeout(30):
            await app.idle(worker)
        await worker.drain()
        assert isinstance(app.store, PostgresStore)
        yield app.store, tenants


def _fields(settings: Config) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


@asynccontextmanager
async def as_api(place: Estate, tenant: str) -> AsyncIterator[PostgresStore]:
    """A store as the API will have it: under its role, each transaction bound to one tenant."""
    role = place.role(f"pages_{tenant}")
    admit(place.owner, api=role)
    place.superuser(f"ALTER ROLE {role} SET ackbone.tenant_id = '{tenant}'")
    told = Notices(results="results", dead_letters="letters", on_ack=False)
    store = PostgresStore(place.url(role), notices=lambda _: told)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def test_pages_show_one_tenant(place: Estate, home: Path) -> None:
    async with asked(place, home), as_api(place, "a") as store:
        records = PostgresRecords(store)
        (letter,) = await records.letters(LetterFilter(), limit=9)
        assert (letter.tenant_id, letter.message_id) == ("a", "dead-a")
        assert await records.letters_named("dead-b", tenant_id=None) == []
        assert await records.letters_of("b", "dead-b") == []
        ((_, parked),) = await records.parked(limit=9)
        assert parked.message_id == "parked-a"
        for kind in ("parked", "dead", "fine"):
            for tenant, seen in (("a", 1), ("b", 0)):
                name = f"{kind}-{tenant}"
                assert len(await records.tasks(None, name)) == seen
                assert len(await records.tasks(tenant, name)) == seen
                assert len(await records.find(name, tenant_id=None, limit=9)) == seen
                assert bool(await records.events_of(tenant, name)) == bool(seen)
        assert await records.tasks_like("", tenant_id="b", status=None, limit=9) == []
        assert len(await records.tasks_like("", tenant_id=None, status=None, limit=9)) == 3
        assert len(await records.effects_of("a", "fine-a")) == 1
        assert await records.effects_of("b", "fine-b") == []
        assert len(await records.replies_of("a", "fine-a")) == 1
        assert await records.replies_of("b", "fine-b") == []
        (approval,) = await records.approvals(ApprovalFilter(), limit=9)
        assert approval.message_id == "parked-a"
        assert {use.tenant_id for use in await records.quota_use()} == {"a"}
        assert sum(each.count for each in await records.counts()) == 3
        assert sum(each.count for each in await records.reply_counts()) == 1
        assert {e.tenant_id for e in await records.events_after(0, limit=999)} == {"a"}


@pytest.mark.parametrize("answer", ["approve", "reject"])
async def test_approvals_are_answered_for_one_tenant(
    place: Estate, home: Path, answer: str
) -> None:
    async with asked(place, home) as (engine, _), as_api(place, "a") as store:
        ids = {
            each.tenant_id: each.id
            for each in await PostgresRecords(engine).approvals(ApprovalFilter(), limit=9)
        }
        act = getattr(parked, answer)
        async with StoreOperations(engine, by="api"):  # gives a number, and keeps it alive
            number = rows(place.owner, "SELECT max(worker_id) FROM workers")[0][0]
            said = Answering(by="anna", note="", now_us=1, expiry_us=1)
            with pytest.raises(NotFound, match="no approval"):
                await store.write(
                    lambda tx, change: act(tx, change, ids["b"], said), worker_id=number
                )
            await store.write(lambda tx, change: act(tx, change, ids["a"], said), worker_id=number)
    task = "SELECT message_id, status FROM queue_executions WHERE message_id ~ 'parked' ORDER BY 1"
    became = {"approve": "ready", "reject": "rejected"}[answer]
    assert rows(place.owner, task) == [("parked-a", became), ("parked-b", "parked")]
    states = "SELECT tenant_id, state FROM approvals ORDER BY 1"
    state = {"approve": "approved", "reject": "rejected"}[answer]
    assert rows(place.owner, states) == [("a", state), ("b", "pending")]
    told = rows(place.owner, "SELECT tenant_id, queue_name FROM outbox ORDER BY 2")
    letters = rows(place.owner, "SELECT message_id FROM dead_letters WHERE reason = 'rejected'")
    freed = rows(place.owner, "SELECT 1 FROM idempotency_keys WHERE message_id = 'parked-a'") == []
    if answer == "reject":
        assert told == [("a", "letters"), ("a", "results")]
        assert letters == [("parked-a",)]
    assert freed == (answer == "reject")


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


def test_roles_that_it_would_not_bind_are_refused(place: Estate) -> None:
    agents = place.role("agents")
    admit(place.owner, worker=agents)
    owner = conninfo_to_dict(place.owner)["user"]
    for role, why in (
        (place.role("root", "SUPERUSER"), "superuser"),
        (place.role("bypass", "BYPASSRLS"), "BYPASSRLS"),
        (str(owner), "owns the tables"),
        (place.role("deputy", f"NOINHERIT IN ROLE {owner}"), "owns the tables, or is a member"),
        (agents, "role of the workers"),
        (place.role("aide", f"IN ROLE {agents}"), "role of the workers, or a member"),
    ):
        with pytest.raises(Conflict, match=why):
            admit(place.owner, api=role)
    place.superuser(f"ALTER ROLE {owner} CREATEROLE")
    with pytest.raises(Conflict, match="cannot be the name of a role"):
        admit(place.owner, api="pg_pages")


def test_roles_are_made_by_who_may(place: Estate) -> None:
    owner = conninfo_to_dict(place.owner)["user"]
    agents, pages = place.reserve("agents"), place.reserve("pages")
    with pytest.raises(
        StoreUnavailable, match=f"Ask its administrator for 'CREATE ROLE .*{agents}"
    ):
        admit(place.owner, worker=agents, api=pages)
    place.superuser(f"ALTER ROLE {owner} CREATEROLE")
    assert admit(place.owner, worker=agents, api=pages) == [
        (agents, "worker", True),
        (pages, "api", True),
    ]
    assert admit(place.owner, worker=agents, api=pages) == [
        (agents, "worker", False),
        (pages, "api", False),
    ]
    with psycopg.connect(place.url(agents)) as conn:
        assert tenant_wall.bound_tables(conn) == []
    with psycopg.connect(place.url(pages)) as conn:
        assert tenant_wall.bound_tables(conn) == list(tenant_wall.TABLES)


def test_only_the_owner_gives_rights(place: Estate) -> None:
    agents, pages = place.role("agents"), place.role("pages")
    admit(place.owner, worker=agents)
    with pytest.raises(StoreUnavailable, match=f"{agents} does not own the tables"):
        admit(place.url(agents), api=pages)
    place.superuser("REVOKE USAGE ON SCHEMA public FROM PUBLIC")
    place.superuser("ALTER SCHEMA public OWNER TO CURRENT_USER")
    owner = conninfo_to_dict(place.owner)["user"]
    place.superuser(f"GRANT USAGE ON SCHEMA public TO {owner}")
    with pytest.raises(StoreUnavailable, match="may not enter the schema public"):
        admit(place.owner, api=pages)
    assert rows(place.owner, "SELECT has_table_privilege(%s, 'approvals', 'SELECT')", pages) == [
        (False,)
    ]


def test_both_are_given_or_none(place: Estate) -> None:
    agents, root = place.role("agents"), place.role("root", "SUPERUSER")
    with pytest.raises(Conflict):
        admit(place.owner, worker=agents, api=root)
    assert rows(place.owner, "SELECT 1 FROM pg_policy WHERE polname = 'workers'") == []


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def command(home: Path, url: str, *arguments: str) -> tuple[int, list[Any], str]:
    """In a process of its own, as an operator runs it: exit code, JSON lines, what was said."""
    file = home / "ackbone.yaml"
    file.write_text(f"broker: sqlite\nstore: {url}\n")
    done = subprocess.run(
        [sys.executable, "-m", "ackbone", *arguments, "--json", "--config", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ACKBONE_HOME": str(home)},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, lines, done.stderr


def test_migrate_gives_roles_their_rights(home: Path, place: Estate) -> None:
    agents, pages = place.role("agents"), place.role("pages")
    code, lines, said = command(
        home, place.owner, "migrate", "--worker-role", agents, "--api-role", pages
    )
    assert (code, said) == (0, "")
    assert lines[-2:] == [
        {"role": agents, "kind": "worker", "made": False},
        {"role": pages, "kind": "api", "made": False},
    ]
    assert command(home, place.url(agents), "stats")[0] == 0
    code, _, said = command(home, place.url(pages), "stats")
    assert (code, f"--worker-role {pages}" in said) == (6, True)
    code, _, said = command(home, place.owner, "migrate", "--check", "--api-role", pages)
    assert (code, "--check changes nothing" in said) == (2, True)
    code, _, said = command(
        home, place.owner, "migrate", "--worker-role", agents, "--api-role", agents
    )
    assert (code, "give two roles" in said) == (2, True)
    code, _, said = command(home, "sqlite", "migrate", "--api-role", pages)
    assert (code, "files have no roles" in said) == (3, True)


def test_migrate_makes_the_months_ahead_of_a_schema_that_is_new(home: Path, place: Estate) -> None:
    """Where workers do not own the tables, it is all that makes them."""
    with psycopg.connect(place.owner, autocommit=True) as conn:
        months = conn.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits"
            " WHERE inhparent = 'event_log'::regclass ORDER BY 1"
        ).fetchall()
        conn.execute(f"DROP TABLE {months[-2][0]}")
    assert command(home, place.owner, "migrate")[0] == 0
    with psycopg.connect(place.owner, autocommit=True) as conn:
        assert tenant_wall.open_tables(conn) == []
        assert conn.execute("SELECT to_regclass(%s)", months[-2]).fetchone() != (None,)
    assert tend(place.owner) == 0
