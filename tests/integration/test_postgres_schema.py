"""The schema on PostgreSQL: made whole or not at all, refused with words that help."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ackbone.core.errors import SchemaMismatch, StoreUnavailable
from ackbone.store import revisions
from ackbone.store.postgres import migrate
from ackbone.store.postgres.migrate import current_revision, ensure_schema, upgrade
from ackbone.store.postgres.partitions import make_partitions
from ackbone.store.postgres.tenant_wall import TABLES
from ackbone.store.revisions import HEAD
from tests.schema import tables_of
from tests.servers.postgres import OutsidePostgres, PostgresServer

pytestmark = pytest.mark.xdist_group("postgres")
Server = PostgresServer | OutsidePostgres
VICTIM = Path(__file__).with_name("postgres_victim.py")
DIALECT = "postgresql"


@pytest.fixture
def empty(postgres: Server) -> Iterator[str]:
    name = postgres.new_database()
    yield postgres.url(name)
    postgres.drop(name)


def rows(url: str, statement: str) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as conn:
        return conn.execute(statement).fetchall()


def tables(url: str) -> set[str]:
    found = rows(url, "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND"
                      " relnamespace = 'public'::regnamespace")  # fmt: skip
    return {name for (name,) in found}


def test_an_empty_database_gets_its_tables(empty: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert current_revision(empty) is None
    assert ensure_schema(empty) is True
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith(f"made the tables (schema revision {HEAD})")
    assert current_revision(empty) == HEAD
    assert ensure_schema(empty) is False
    ours = {table.name for table, _ in tables_of(DIALECT)}
    assert {"queue_executions", "event_log", "workers"} <= ours
    assert "witness" not in ours
    months = {name for name in tables(empty) if name.startswith("event_log_2")}
    assert tables(empty) == ours | months | {"event_log_default", "alembic_version"}
    assert len(months) == 4


def test_indexes_are_those_of_the_tables(postgres_url: str) -> None:
    found = rows(postgres_url, "SELECT indexname FROM pg_indexes WHERE indexname LIKE 'idx\\_%'")
    wanted = {index.name for _, indexes in tables_of(DIALECT) for index in indexes}
    assert {name for (name,) in found} == wanted


def test_types_are_native(postgres_url: str) -> None:
    found = dict(
        rows(
            postgres_url,
            "SELECT table_name || '.' || column_name, data_type FROM information_schema.columns",
        )
    )
    assert found["queue_executions.id"] == "uuid"
    assert found["queue_executions.started_at"] == "timestamp with time zone"
    assert found["queue_executions.body"] == "bytea"
    assert found["event_log.data"] == "json"
    assert found["workers.worker_id"] == "bigint"
    assert "jsonb" not in found.values()


def test_events_stand_in_their_month_or_in_the_default(postgres_url: str) -> None:
    insert = (
        "INSERT INTO event_log (id, subscription, task_id, event_type, data, created_at, worker_id,"
        " seq, hash) VALUES (gen_random_uuid(), '', 't', 'e', '{}', %s, 1, 1, '')"
    )
    where = "SELECT tableoid::regclass::text FROM event_log ORDER BY created_at"
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        for moment in ("1999-12-31T23:59:59Z", "2500-01-01T00:00:00Z"):
            conn.execute(insert, (moment,))
        conn.execute(insert.replace("%s", "clock_timestamp()"))
        found = [name for (name,) in conn.execute(where)]
    assert found[0] == found[2] == "event_log_default"
    assert found[1].startswith("event_log_2")


def test_what_the_default_caught_moves_into_its_month(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        (name,) = conn.execute(
            "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', '\"event_log_\"YYYY_MM')"
        ).fetchone()  # type: ignore[misc]
        conn.execute(f"DROP TABLE {name}")
        conn.execute(
            "INSERT INTO event_log (id, subscription, task_id, event_type, data, created_at,"
            " worker_id, seq, hash) VALUES (gen_random_uuid(), '', 't', 'e', '{\"a\" :1}',"
            " clock_timestamp(), 1, 1, '')"
        )
        with conn.transaction():
            assert make_partitions(conn) == 1
            assert make_partitions(conn) == 0
        found = conn.execute("SELECT tableoid::regclass::text, data::text FROM event_log")
        assert found.fetchall() == [(name, '{"a" :1}')]


def test_a_kill_before_any_statement_leaves_the_old_schema_or_the_new(empty: str) -> None:
    """And the next one finishes, wherever the one before was killed."""
    old: list[Any] = [None, sorted(tables(empty)), []]
    done = subprocess.run(
        [sys.executable, VICTIM, empty], capture_output=True, text=True, check=True
    )
    *killed, (statement, *new) = json.loads(done.stdout)
    assert statement is None
    assert len(killed) > 90
    for statement, *left in killed:
        assert left == old, f"killed before {statement!r}"
    kinds = " ".join(statement for statement, *_ in killed)
    for kind in (
        "pg_try_advisory_lock",
        "CREATE TABLE event_log_default",
        "CREATE POLICY",
        "ENABLE ROW LEVEL SECURITY",
        "COMMIT",
    ):
        assert kind in kinds
    revision, names, walled = new
    assert revision == HEAD
    assert set(names) == tables(empty)
    assert set(walled) == {name for name in names if name in TABLES or "event_log_" in name}


def test_of_several_that_start_together_one_works(empty: str) -> None:
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(ensure_schema(empty))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 5 + [True]


def test_waiting_for_another_upgrade_ends(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", (migrate.LOCK,))
        with pytest.raises(StoreUnavailable, match="another process has been upgrading"):
            upgrade(empty, wait_s=0.1)
    assert upgrade(empty) is True


def test_an_older_schema_names_the_command(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revisions, "HEAD", "9999")
    with pytest.raises(SchemaMismatch, match="'ackbone migrate'"):
        ensure_schema(postgres_url)


def test_a_schema_from_before_the_first_revision_is_refused(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as conn:
        conn.execute("UPDATE alembic_version SET version_num = '0003'")
    for start in (ensure_schema, upgrade):
        with pytest.raises(SchemaMismatch, match=r"0003, which .* Give ackbone a new database"):
            start(postgres_url)


def test_a_newer_schema_is_refused(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as conn:
        conn.execute("UPDATE alembic_version SET version_num = '0907'")
    with pytest.raises(SchemaMismatch, match="newer ackbone has used this database"):
        ensure_schema(postgres_url)
    with psycopg.connect(postgres_url) as conn:
        conn.execute("UPDATE alembic_version SET version_num = 'ae1027a6acf'")
    with pytest.raises(SchemaMismatch, match="not one of ackbone's"):
        upgrade(postgres_url)


def test_somebody_elses_tables_are_refused(empty: str) -> None:
    with psycopg.connect(empty) as conn:
        conn.execute("CREATE TABLE queue_executions (a int)")
    with pytest.raises(SchemaMismatch, match="a database or a schema of its own"):
        ensure_schema(empty)


def test_a_role_without_permission_names_the_command(own_postgres: PostgresServer) -> None:
    role, name = f"weak_{os.getpid()}", own_postgres.new_database()
    own_postgres.execute(f"CREATE ROLE {role} LOGIN")
    try:
        with pytest.raises(StoreUnavailable, match="'ackbone migrate' with a role that owns"):
            ensure_schema(own_postgres.url(name, role=role))
        assert tables(own_postgres.url(name)) == set()
    finally:
        own_postgres.drop(name)
        own_postgres.execute(f"DROP ROLE {role}")


def test_away_and_nonsense_are_told_apart(postgres: Server) -> None:
    with pytest.raises(StoreUnavailable, match="has no database"):
        ensure_schema(postgres.url("no_such_database"))
    with pytest.raises(StoreUnavailable, match="is away") as caught:
        ensure_schema("postgresql://me:geheim@127.0.0.1:1/x")
    assert "geheim" not in str(caught.value)
