"""The schema: what is agreed on, what migrations make, and that none of them stops halfway."""

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Dialect
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.schema import CreateIndex, CreateTable

from ackbone.core.errors import SchemaMismatch, StoreCorrupt, StoreUnavailable
from ackbone.store import revisions
from ackbone.store.revisions import HEAD
from ackbone.store.sqlite import migrate
from ackbone.store.sqlite.migrate import current_revision, ensure_schema
from tests import schema

NEXT = f"{int(HEAD) + 1:04}"
VICTIM = Path(__file__).with_name("migration_victim.py")

# ── what is agreed on ────────────────────────────────────────────────────────────────────────────

AGREED = """
CREATE TABLE idempotency_keys (
  key VARCHAR(255) PRIMARY KEY,
  tenant_id VARCHAR(64) NOT NULL DEFAULT 'default',
  value JSONB NOT NULL,
  created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
  expires_at TIMESTAMPTZ NOT NULL
);
CREATE INDEX idx_idempotency_keys_tenant_expires
  ON idempotency_keys (tenant_id, expires_at);

CREATE TABLE queue_executions (
  id UUID PRIMARY KEY,
  tenant_id VARCHAR(64) NOT NULL DEFAULT 'default',
  message_id VARCHAR(255) NOT NULL,
  queue_name VARCHAR(255) NOT NULL,
  event_name VARCHAR(255),
  status VARCHAR(20) NOT NULL,
  started_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
  completed_at TIMESTAMPTZ,
  duration_ms INTEGER,
  agent_run_id UUID,
  error_message TEXT,
  retry_count INTEGER DEFAULT 0
);
CREATE INDEX idx_queue_executions_tenant_message_id
  ON queue_executions (tenant_id, message_id);
CREATE INDEX idx_queue_executions_tenant_queue_started
  ON queue_executions (tenant_id, queue_name, started_at DESC);
CREATE INDEX idx_queue_executions_tenant_status
  ON queue_executions (tenant_id, status);

CREATE TABLE queue_metrics (
  id UUID PRIMARY KEY,
  tenant_id VARCHAR(64) NOT NULL DEFAULT 'default',
  queue_name VARCHAR(255) NOT NULL,
  metric_name VARCHAR(100) NOT NULL,
  metric_value DOUBLE PRECISION NOT NULL,
  timestamp TIMESTAMPTZ NOT NULL DEFAULT NOW(),
  tags JSONB
);
CREATE INDEX idx_queue_metrics_tenant_metric_time
  ON queue_metrics (tenant_id, queue_name, metric_name, timestamp DESC);
"""

NOW_US = "(CAST(strftime('%s', 'now') || substr(strftime('%f', 'now'), 4) || '000' AS INTEGER))"

# How each dialect spells an agreed type or default: times are integer microseconds on SQLite, ids
# 16 bytes, and JSON is kept as text (never jsonb, which refuses NUL and rewrites numbers).
SPELLINGS = {
    "sqlite": {
        "UUID": "BLOB",
        "TIMESTAMPTZ": "BIGINT",
        "JSONB": "TEXT",
        "DOUBLE PRECISION": "DOUBLE",
        "NOW()": NOW_US,
    },
    "postgresql": {
        "TIMESTAMPTZ": "TIMESTAMP WITH TIME ZONE",
        "JSONB": "JSON",
        "NOW()": "now()",
    },
}

# Everything else that differs, and why. More is an error, and so is less.
DEVIATIONS = {
    "idempotency_keys.value: bytes": "the result of a run is a body, and bodies are bytes",
    "idempotency_keys.value: nullable": "there is none while the key's message runs",
    "idempotency_keys.expires_at: nullable": "the window opens when the message is done",
    "idempotency_keys: primary key tenant_id, key, subscription": "one window per subscription",
    "idx_idempotency_keys_tenant_expires: partial": "what is not done does not expire",
    "queue_executions: no primary key": "its identity is the next one; PostgreSQL is told so",
    "idx_queue_executions_tenant_message_id: and subscription": "the identity of a task, once",
    "idx_queue_executions_tenant_status: partial": "the common states would cost every write",
}


class Col(NamedTuple):
    type: str
    nullable: bool
    default: str | None


class Shape(NamedTuple):
    columns: dict[str, dict[str, Col]]
    keys: dict[str, list[str]]
    indexes: dict[str, tuple[str, str]]
    """name: (table and columns, condition)"""


def parse(script: str) -> Shape:
    """The few forms of CREATE TABLE and CREATE INDEX that occur here."""
    shape = Shape({}, {}, {})
    script = re.sub(r"^--.*$", "", script, flags=re.M)
    # As SQLite adds columns: all on one line, behind the others.
    script = re.sub(
        r"\n, ([\w (),]+)\)(?=;|$)",
        lambda added: ",\n" + added[1].replace(", ", ",\n") + "\n)",
        script,
        flags=re.M,
    )
    for name, body in re.findall(r"CREATE TABLE (\w+) \(\n(.*?)\n\)(?:;|$)", script, re.S):
        columns = shape.columns[name] = {}
        for line in re.split(r",\s*\n", body):
            text = line.strip()
            key = re.match(r"(?:CONSTRAINT \w+ )?PRIMARY KEY \(([^)]*)\)", text)
            if key:
                shape.keys[name] = key[1].replace('"', "").split(", ")
                continue
            column, rest = text.split(" ", 1)
            column = column.strip('"')
            nullable = "NOT NULL" not in rest and "PRIMARY KEY" not in rest
            if "PRIMARY KEY" in rest:
                shape.keys[name] = [column]
            rest = re.sub(r" ?(NOT NULL|PRIMARY KEY|AUTOINCREMENT)", "", rest)
            kind, _, default = rest.partition("DEFAULT ")
            columns[column] = Col(kind.strip(), nullable, default.strip() or None)
    for name, target, where in re.findall(
        r"CREATE (?:UNIQUE )?INDEX (\w+)\s+ON (\w+ \([^)]*\))(?:\s+WHERE ([^;]*))?", script
    ):
        shape.indexes[name] = (target, where)
    return shape


def dump(path: Path) -> str:
    with closing(sqlite3.connect(path)) as conn:
        rows = conn.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return ";\n".join(row[0] for row in rows) + ";"


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "ackbone.db"
    assert ensure_schema(path) is True
    return path


@pytest.fixture
def conn(db: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(db)) as conn:
        yield conn


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_tables_are_as_agreed(dialect: str, db: Path) -> None:
    ours = parse(
        dump(db)
        if dialect == "sqlite"
        else "".join(f"{each};\n" for each in revisions.statements(dialect))
    )
    agreed = parse(AGREED)
    assert [len(agreed.columns[table]) for table in sorted(agreed.columns)] == [5, 12, 7]
    assert len(agreed.indexes) == 5
    spell = SPELLINGS[dialect]
    found: set[str] = set()
    for table, columns in agreed.columns.items():
        for name, want in columns.items():
            have = ours.columns[table][name]
            kind = spell.get(want.type, want.type)
            if dialect == "postgresql" and kind in ("VARCHAR(64)", "VARCHAR(255)"):
                kind += ' COLLATE "C"'  # ids and names: compared byte by byte
            if have.type in ("BLOB", "BYTEA") and kind in ("TEXT", "JSON"):
                found.add(f"{table}.{name}: bytes")
            else:
                assert have.type == kind, f"{table}.{name}"
            if have.nullable and not want.nullable:
                found.add(f"{table}.{name}: nullable")
            else:
                assert have.nullable == want.nullable, f"{table}.{name}"
            default = want.default and spell.get(want.default, want.default)
            assert have.default == default, f"{table}.{name}"
        if table not in ours.keys:
            found.add(f"{table}: no primary key")
        elif ours.keys[table] != agreed.keys[table]:
            found.add(f"{table}: primary key {', '.join(ours.keys[table])}")
    for index, (target, _) in agreed.indexes.items():
        made, first = ours.indexes[index][0].removesuffix(")"), target.removesuffix(")")
        assert made.startswith(first)
        if made != first:
            found.add(f"{index}: and {made.removeprefix(first + ', ')}")
        if ours.indexes[index][1]:
            found.add(f"{index}: partial")
    assert found == set(DEVIATIONS)
    assert ours.indexes["idx_queue_executions_tenant_status"][1] == (
        "status <> 'running' AND status <> 'succeeded' AND status <> 'duplicate'"
    )


def test_every_business_table_has_a_tenant_and_its_indexes_begin_with_it(db: Path) -> None:
    shape = parse(dump(db))
    machinery = {
        "alembic_version",
        "workers",
        "sources",
        "roles",
        "send_windows",
        "messages",
        "witness",
    }
    for table, columns in shape.columns.items():
        if table not in machinery:
            assert columns["tenant_id"] == Col("VARCHAR(64)", False, "'default'"), table
    # The engine's own indexes look at one state over all tenants, and are partial or tiny.
    engine = {
        "idx_tasks_ready",
        "idx_tasks_running",
        "idx_outbox_due",
        "idx_tasks_parked",
        "idx_approvals_pending",
        "idx_deliveries_due",
        "idx_deliveries_lane",
        "idx_deliveries_put_off",
        "idx_deliveries_sending",
        "idx_sources_paused",
        *(name for name in shape.indexes if name.startswith("idx_messages_")),
    }
    others = {n for n, (target, _) in shape.indexes.items() if "(tenant_id" not in target}
    assert others == engine


def test_values_keep_their_kind(conn: sqlite3.Connection) -> None:
    before = int(time.time() * 1000) * 1000
    conn.execute(
        "INSERT INTO queue_executions (id, subscription, message_id, queue_name, status, held)"
        " VALUES (?, 's', 42, 'q', 'running', 'broker')",
        (b"\0" * 16,),
    )
    row = conn.execute(
        "SELECT tenant_id, typeof(id), typeof(message_id), typeof(started_at), started_at,"
        " retry_count, typeof(body) FROM queue_executions"
    ).fetchone()
    assert row[:4] == ("default", "blob", "text", "integer")
    assert before <= row[4] <= time.time() * 1_000_000
    assert row[5:] == (0, "null")
    conn.execute(
        "INSERT INTO queue_metrics (id, queue_name, metric_name, metric_value) VALUES (?,?,?,?)",
        (b"1" * 16, "q", "depth", 3),
    )
    assert conn.execute("SELECT typeof(metric_value) FROM queue_metrics").fetchone() == ("real",)
    assert conn.execute("SELECT id, commits FROM witness").fetchall() == [(1, 0)]


# ── the first revision, tests/schema.py and a new file are the same thing ────────────────────────


def statements(made: list[str]) -> set[str]:
    """CREATE statements, without what only looks different."""
    plain = [re.sub(r"\s+", " ", each).replace('"', "").strip() for each in made]
    plain = [each.replace("( ", "(").replace(" )", ")") for each in plain]
    apart = ("alembic_version", "PARTITION OF")
    return {
        each
        for each in plain
        if each.startswith("CREATE") and not any(word in each for word in apart)
    }


def tables(dialect: Dialect) -> list[str]:
    made: list[CreateTable | CreateIndex] = []
    for table, indexes in schema.tables_of(dialect.name):
        made += [CreateTable(table), *map(CreateIndex, indexes)]
    return [str(each.compile(dialect=dialect)) for each in made]


@pytest.mark.parametrize("dialect", [SQLiteDialect(), PGDialect()], ids=["sqlite", "postgresql"])
def test_migrations_make_what_schema_says(dialect: Dialect) -> None:
    made = statements(revisions.statements(dialect.name))
    assert made == statements(tables(dialect))
    assert len(made) > 25


def test_alembic_makes_the_same_file(
    tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "make_tables", lambda conn: None)
    slow = tmp_path / "slow.db"
    assert ensure_schema(slow) is True
    assert statements(dump(slow).split(";")) == statements(dump(db).split(";"))
    with closing(sqlite3.connect(slow)) as conn:
        assert conn.execute("SELECT * FROM alembic_version").fetchall() == [(HEAD,)]
        assert conn.execute("SELECT * FROM witness").fetchall() == [(1, 0)]


def test_head_is_the_newest_revision() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(revisions.MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert script.get_heads() == [HEAD]
    assert {each.revision for each in script.walk_revisions()} == revisions.known_revisions()


def test_the_first_revision_says_which_tables_are_exceptions() -> None:
    (first,) = (revisions.MIGRATIONS / "versions").glob("0007_*.sql")
    text = first.read_text(encoding="utf-8")
    for table in ("idempotency_keys", "queue_executions", "event_log", "alembic_version"):
        assert re.search(rf"^-- \d\. `{table}`", text, re.M), table


# ── ensure_schema ────────────────────────────────────────────────────────────────────────────────


def test_new_file(tmp_path: Path) -> None:
    path = tmp_path / "home" / "ackbone.db"
    assert current_revision(path) is None
    assert not path.parent.exists()
    assert ensure_schema(path) is True
    assert current_revision(path) == HEAD
    assert not Path(f"{path}-wal").exists() or not Path(f"{path}-wal").stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert conn.execute("PRAGMA page_size").fetchone() == (migrate.PAGE_SIZE,)
        assert conn.execute("PRAGMA auto_vacuum").fetchone() == (0,)


def test_empty_file_is_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "ackbone.db"
    path.touch()
    assert current_revision(path) is None
    assert ensure_schema(path) is True


def test_second_run_changes_nothing(db: Path) -> None:
    before = db.read_bytes()
    assert ensure_schema(db) is False
    assert db.read_bytes() == before


def test_file_without_its_log_and_index(db: Path) -> None:
    for end in ("-wal", "-shm", ".migrate.lock", ".gate", ".lock"):
        Path(f"{db}{end}").unlink(missing_ok=True)
    assert current_revision(db) == HEAD
    assert ensure_schema(db) is False


@pytest.mark.parametrize(
    "name",
    ["with space/hold fast.db", "邮件/ünï ✉.db", "100%20/50%.db", "a?b#c/d&e=f?.db", "';--.db"],
)
def test_any_path(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert ensure_schema(path) is True
    assert ensure_schema(path) is False
    assert path.is_file()


def test_both_names_of_a_file_are_one_file(tmp_path: Path, db: Path) -> None:
    other = tmp_path / "link.db"
    other.symlink_to(db)
    assert ensure_schema(other) is False


def test_a_start_imports_neither_alembic_nor_sqlalchemy(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from ackbone.store.sqlite.migrate import ensure_schema\n"
        "path = Path(sys.argv[1]); print(ensure_schema(path), ensure_schema(path))\n"
        "print(sorted({'alembic', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.db"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["True False", "[]"]


def test_newer_schema_is_refused(db: Path) -> None:
    with closing(sqlite3.connect(db)) as conn, conn:
        conn.execute("UPDATE alembic_version SET version_num = '0907'")
    Path(f"{db}.migrate.lock").unlink()
    before = db.read_bytes()
    with pytest.raises(SchemaMismatch) as caught:
        ensure_schema(db)
    text = str(caught.value)
    assert str(db) in text
    assert "revision 0907" in text
    assert f"up to {HEAD}" in text
    assert "Install that version" in text
    assert "Nothing was changed" in text
    assert db.read_bytes() == before
    assert not Path(f"{db}.migrate.lock").exists()


def test_another_programs_revision_is_refused(db: Path) -> None:
    with closing(sqlite3.connect(db)) as conn, conn:
        conn.execute("UPDATE alembic_version SET version_num = 'ae1027a6acf'")
    with pytest.raises(SchemaMismatch, match="'ae1027a6acf', which is not one of ackbone's"):
        ensure_schema(db)


@pytest.mark.parametrize("table", ["messages", "bookmarks", "alembic_version"])
def test_another_programs_file_is_refused(tmp_path: Path, table: str) -> None:
    path = tmp_path / "places.sqlite"
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute(f"CREATE TABLE {table} (version_num TEXT)")
    before = path.read_bytes()
    with pytest.raises(SchemaMismatch, match=f"not ackbone's \\({table}\\)"):
        ensure_schema(path)
    assert path.read_bytes() == before


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ackbone.db"
    path.write_bytes(b"not a database, but long enough for a header " * 30)
    with pytest.raises(StoreCorrupt, match="not a database"):
        ensure_schema(path)
    with pytest.raises(StoreUnavailable):
        ensure_schema(tmp_path)  # a folder


def test_waiting_for_another_upgrade_ends(tmp_path: Path) -> None:
    path = tmp_path / "ackbone.db"
    lock = Path(f"{path}.migrate.lock")
    with migrate._locked(lock, 0), pytest.raises(StoreUnavailable, match=re.escape(str(lock))):
        ensure_schema(path, wait_s=0.05)
    assert ensure_schema(path) is True


def test_a_file_that_another_program_reads_waits_its_turn(tmp_path: Path) -> None:
    path = tmp_path / "ackbone.db"
    path.touch()
    reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM sqlite_master").fetchall()  # keeps a shared lock
    with pytest.raises(StoreUnavailable, match="write-ahead"):
        ensure_schema(path, wait_s=0.05)
    later = threading.Timer(0.2, reader.close)
    later.start()
    assert ensure_schema(path, wait_s=20) is True
    later.join()


def test_a_failing_statement_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ackbone.db"
    with monkeypatch.context() as patched:
        patched.setattr(migrate, "statements", lambda dialect: ["CREATE TABLE a (b)"] * 2)
        with pytest.raises(StoreUnavailable, match="already exists"):
            ensure_schema(path)
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    assert ensure_schema(path) is True


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A later ackbone: one more revision, whose statement can be chosen."""
    folder = tmp_path / "50% later"
    shutil.copytree(revisions.MIGRATIONS, folder)
    file = folder / "versions" / f"{NEXT}_later.py"
    monkeypatch.setattr(revisions, "MIGRATIONS", folder)
    monkeypatch.setattr(revisions, "HEAD", NEXT)
    return file


REVISION = f"""
from alembic import op
revision, down_revision = "{NEXT}", "{HEAD}"
def upgrade():
    op.execute("ALTER TABLE roles ADD COLUMN note TEXT")
    op.execute("{{statement}}")
"""


@pytest.mark.parametrize("revision", ["0001", "0006"])
def test_a_file_from_before_the_first_revision_is_refused(db: Path, revision: str) -> None:
    with closing(sqlite3.connect(db)) as conn, conn:
        conn.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    before = db.read_bytes()
    with pytest.raises(SchemaMismatch) as caught:
        ensure_schema(db)
    text = str(caught.value)
    assert f"{db} has schema revision {revision}" in text
    assert f"upgrades from {revisions.FIRST} on" in text
    assert "Give ackbone a new file" in text
    assert "Nothing was changed" in text
    assert db.read_bytes() == before


def test_older_schema_is_upgraded_with_its_rows(db: Path, second: Path) -> None:
    with closing(sqlite3.connect(db)) as conn, conn:
        conn.execute("INSERT INTO roles (role) VALUES ('reaper')")
    second.write_text(REVISION.format(statement="UPDATE roles SET note = role"))
    assert ensure_schema(db) is True
    assert current_revision(db) == NEXT
    assert ensure_schema(db) is False
    with closing(sqlite3.connect(db)) as conn:
        assert conn.execute("SELECT role, note FROM roles").fetchall() == [("reaper", "reaper")]


def test_failed_upgrade_leaves_the_old_schema(db: Path, second: Path) -> None:
    before = dump(db)
    second.write_text(REVISION.format(statement="UPDATE roles SET missing = 1"))
    with pytest.raises(StoreUnavailable, match="no such column"):
        ensure_schema(db)
    assert dump(db) == before
    assert current_revision(db) == HEAD


def test_new_file_goes_on_where_the_first_revision_ends(tmp_path: Path, second: Path) -> None:
    second.write_text(REVISION.format(statement="UPDATE roles SET note = role"))
    path = tmp_path / "new.db"
    assert ensure_schema(path) is True
    assert current_revision(path) == NEXT


# ── killed, and at once ──────────────────────────────────────────────────────────────────────────


def victim(*args: object) -> Any:
    done = subprocess.run(
        [sys.executable, VICTIM, *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("mode", "at_least"), [("tables", 40), ("alembic", 40), ("upgrade", 12)])
def test_killed_at_any_statement(tmp_path: Path, mode: str, at_least: int) -> None:
    killed = victim("kill", tmp_path, mode)
    assert len(killed) >= at_least
    assert any("CREATE INDEX" in each["statement"] for each in killed)
    for each in killed:
        assert each["left"] in ("old", "new"), each
        assert each["again"] is (each["left"] == "old"), each
        assert each["end"] == "new", each
    commit = [each for each in killed if "COMMIT" in each["statement"]]
    assert [each["left"] for each in commit] == ["old"]


def test_many_processes_at_once(tmp_path: Path, soak: bool) -> None:
    rounds = 200 if soak else 10
    for codes in victim("race", tmp_path, 8, rounds):
        assert sorted(codes) == [10, *[11] * 7]
