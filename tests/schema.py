"""The tables in SQLAlchemy Core, as a second description that the migrations are compared with.

"Exception 1" and so on are those that `ackbone.store.revisions` lists.

Both dialects have the same tables, but for what belongs to one of them alone (`info={"only": …}`):
the witness of SQLite; the beats of workers on PostgreSQL, where no locked file says
who is alive; there an index that finds events by time, and a number for the order of replies.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    TIMESTAMP,
    BigInteger,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateColumn
from sqlalchemy.sql.compiler import DDLCompiler, SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

metadata = MetaData()


def name(length: int) -> TypeEngine[Any]:
    """A short text that is compared byte by byte, on PostgreSQL, too: the order of a language is
    of no use in ids and keys, and costs at every step through an index."""
    return String(length).with_variant(String(length, collation="C"), "postgresql")


TENANT = name(64)
NAME = name(255)


def moment() -> TypeEngine[Any]:
    """A point in time: integer microseconds on SQLite, TIMESTAMPTZ on PostgreSQL."""
    return BigInteger().with_variant(TIMESTAMP(timezone=True), "postgresql")


def row_id() -> TypeEngine[Any]:
    """An id we mint for a row: 16 bytes on SQLite, uuid on PostgreSQL."""
    return LargeBinary(16).with_variant(Uuid(), "postgresql")


def json_text() -> TypeEngine[Any]:
    """JSON kept as text (never jsonb: it refuses NUL and rewrites numbers)."""
    return Text().with_variant(postgresql.JSON(), "postgresql")


class now(FunctionElement[Any]):
    """The default of a `moment`, for rows written by hand: our own statements name their time."""

    inherit_cache = True


@compiles(now)
def _now(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    return "now()"


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    # Seconds, their three decimals and three zeros; SQLite's clock has milliseconds.
    return "CAST(strftime('%s', 'now') || substr(strftime('%f', 'now'), 4) || '000' AS INTEGER)"


@compiles(CreateColumn)
def _column_of_another(element: CreateColumn, compiler: DDLCompiler, **kw: Any) -> str | None:
    dialect = compiler.dialect.name
    if element.element.info.get("only", dialect) != dialect:
        return None
    text: str = compiler.visit_create_column(element, **kw)
    return text


def tables_of(dialect: str) -> list[tuple[Table, list[Index]]]:
    """The tables that a database of this dialect has, each with its indexes."""
    return [
        (table, [each for each in table.indexes if each.info.get("only", dialect) == dialect])
        for table in metadata.sorted_tables
        if table.info.get("only", dialect) == dialect
    ]


def tenant() -> Column[str]:
    return Column("tenant_id", TENANT, nullable=False, server_default=text("'default'"))


# Exception 1: the business key is the primary key.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    tenant(),
    Column("subscription", NAME, nullable=False),
    Column("key", NAME, nullable=False),
    Column("message_id", NAME, nullable=False),
    Column("state", String(20), nullable=False),
    Column("value", LargeBinary),
    Column("created_at", moment(), nullable=False, server_default=now()),
    Column("expires_at", moment()),
    PrimaryKeyConstraint("tenant_id", "key", "subscription"),
)

# Exception 2: identity is (tenant_id, subscription, message_id). This is the tasks table.
queue_executions = Table(
    "queue_executions",
    metadata,
    Column("id", row_id(), nullable=False),
    tenant(),
    Column("subscription", NAME, nullable=False),
    Column("message_id", NAME, nullable=False),
    Column("queue_name", NAME, nullable=False),
    Column("event_name", NAME),
    Column("status", String(20), nullable=False),
    Column("held", String(10), nullable=False),
    Column("worker_id", BigInteger),
    Column("epoch", Integer, nullable=False, server_default=text("0")),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("crashes", Integer, nullable=False, server_default=text("0")),
    Column("priority", Integer, nullable=False, server_default=text("1")),
    Column("due_at", moment()),
    Column("lane", NAME),
    Column("lane_seq", BigInteger),
    Column("idem_key", NAME),
    Column("created_at", moment()),
    Column("expires_at", moment()),
    Column("started_at", moment(), nullable=False, server_default=now()),
    Column("completed_at", moment()),
    Column("duration_ms", Integer),
    Column("agent_run_id", row_id()),
    Column("error_message", Text),
    Column("retry_count", Integer, server_default=text("0")),
    Column("parked_kind", String(40)),
    Column("correlation_id", NAME),
    Column("trace_id", NAME),
    Column("history", json_text()),
    Column("body", LargeBinary),
    Column("body_info", json_text()),
    Column("body_crc", BigInteger),
    Column("body_sha256", LargeBinary(32)),
    Column("result", LargeBinary),
    Column("cancel_at", moment()),
    Column("lost_by", Text),  # the worker that died while it ran it, until the next claim
    # The identity, and on PostgreSQL the primary key: one index for both costs half.
    Index(
        "idx_queue_executions_tenant_message_id",
        "tenant_id",
        "message_id",
        "subscription",
        unique=True,
    ),
    Index(
        "idx_queue_executions_tenant_queue_started",
        "tenant_id",
        "queue_name",
        text("started_at DESC"),
    ),
)

# Not `NOT IN (…)`: SQLite builds its list anew for every row that is written, 12 µs a message.
NOT_COMMON = text("status <> 'running' AND status <> 'succeeded' AND status <> 'duplicate'")
NOT_FINAL = text(
    "lane IS NOT NULL AND status <> 'succeeded' AND status <> 'failed' AND status <> 'rejected'"
    " AND status <> 'expired' AND status <> 'discarded' AND status <> 'duplicate'"
)


def _partial(name: str, *columns: object, where: str, only: str | None = None) -> Index:
    condition = text(where)
    return Index(
        name,
        *columns,  # type: ignore[arg-type]
        info={} if only is None else {"only": only},
        sqlite_where=condition,
        postgresql_where=condition,
    )


_partial(
    "idx_idempotency_keys_tenant_expires",
    idempotency_keys.c.tenant_id,
    idempotency_keys.c.expires_at,
    where="state = 'done'",
)
_partial(
    "idx_queue_executions_tenant_status",
    queue_executions.c.tenant_id,
    queue_executions.c.status,
    where=NOT_COMMON.text,
)
_partial(
    "idx_tasks_ready",
    queue_executions.c.subscription,
    queue_executions.c.priority,
    queue_executions.c.due_at,
    where="status = 'ready'",
)
_partial("idx_tasks_running", queue_executions.c.worker_id, where="status = 'running'")
_partial(
    "idx_tasks_waiting_key",
    queue_executions.c.tenant_id,
    queue_executions.c.subscription,
    queue_executions.c.idem_key,
    where="status = 'waiting_key'",
)
_partial(
    "idx_tasks_lane",
    queue_executions.c.tenant_id,
    queue_executions.c.subscription,
    queue_executions.c.lane,
    queue_executions.c.lane_seq,
    where=NOT_FINAL.text,
)
_partial(
    "idx_tasks_parked",
    queue_executions.c.subscription,
    queue_executions.c.parked_kind,
    where="status = 'parked'",
)

queue_metrics = Table(
    "queue_metrics",
    metadata,
    Column("id", row_id(), primary_key=True, nullable=False),
    tenant(),
    Column("queue_name", NAME, nullable=False),
    Column("metric_name", String(100), nullable=False),
    Column("metric_value", Double, nullable=False),
    Column("timestamp", moment(), nullable=False, server_default=now()),
    Column("tags", json_text()),
    Index(
        "idx_queue_metrics_tenant_metric_time",
        "tenant_id",
        "queue_name",
        "metric_name",
        text("timestamp DESC"),
    ),
)

# Exception 3: no unique index; a gap or a double is for `ledger verify` to find.
event_log = Table(
    "event_log",
    metadata,
    Column("id", row_id(), nullable=False),
    tenant(),
    Column("subscription", NAME, nullable=False),
    Column("task_id", NAME, nullable=False),
    Column("event_type", String(40), nullable=False),
    Column("data", json_text(), nullable=False),
    Column("created_at", moment(), nullable=False),
    Column("worker_id", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("hash", LargeBinary(32), nullable=False),
    Index("idx_event_log_tenant_task", "tenant_id", "task_id"),
    # Rows come in the order of time: a few bytes per hundred pages say which ones hold a moment.
    Index(
        "idx_event_log_created",
        "created_at",
        info={"only": "postgresql"},
        postgresql_using="brin",
        postgresql_with={"autosummarize": "on"},
    ),
    postgresql_partition_by="RANGE (created_at)",
)

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("id", row_id(), primary_key=True, nullable=False),
    tenant(),
    Column("subscription", NAME, nullable=False),
    Column("message_id", NAME, nullable=False),
    Column("queue_name", NAME, nullable=False),
    Column("event_name", NAME),
    Column("reason", String(60), nullable=False),
    Column("error", Text),
    Column("retry_count", Integer, nullable=False, server_default=text("0")),
    Column("history", json_text()),
    Column("body", LargeBinary),
    Column("body_info", json_text()),
    Column("body_crc", BigInteger),
    Column("state", String(20), nullable=False, server_default=text("'open'")),
    Column("failed_at", moment(), nullable=False),
    Column("settled_at", moment()),
    Column("replay_id", NAME),
    Index("idx_dead_letters_tenant_state_failed", "tenant_id", "state", "failed_at"),
    Index("idx_dead_letters_tenant_message", "tenant_id", "message_id"),
)

effects = Table(
    "effects",
    metadata,
    tenant(),
    Column("subscription", NAME, nullable=False),
    Column("message_id", NAME, nullable=False),
    Column("name", NAME, nullable=False),
    Column("state", String(20), nullable=False),
    Column("value", LargeBinary),
    Column("worker_id", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("created_at", moment(), nullable=False),
    Column("done_at", moment()),
    PrimaryKeyConstraint("tenant_id", "subscription", "message_id", "name"),
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", row_id(), primary_key=True, nullable=False),
    tenant(),
    Column("queue_name", NAME, nullable=False),
    Column("message_id", NAME, nullable=False),
    Column("headers", json_text(), nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("body_crc", BigInteger, nullable=False),
    Column("priority", Integer, nullable=False, server_default=text("1")),
    Column("ordering_key", NAME),
    Column("ttl_us", BigInteger),
    Column("due_at", moment(), nullable=False),
    Column("created_at", moment(), nullable=False),
    Index("idx_outbox_due", "due_at"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", String(36), primary_key=True, nullable=False),
    tenant(),
    Column("subscription", NAME),
    Column("task_id", NAME),
    Column("channel", NAME, nullable=False),
    # A URL fits. SQLite keeps whatever it is given, so its column is as it was made.
    Column(
        "recipient",
        String(255).with_variant(String(2048, collation="C"), "postgresql"),
        nullable=False,
    ),
    Column("content", Text, nullable=False),
    Column("conversation", NAME),
    Column("priority", Integer, nullable=False, server_default=text("2")),
    Column("status", String(20), nullable=False, server_default=text("'pending'")),
    Column("retry_count", Integer, nullable=False, server_default=text("0")),
    Column("max_retries", Integer, nullable=False, server_default=text("5")),
    Column("due_at", moment(), nullable=False),
    Column("created_at", moment(), nullable=False),
    Column("last_attempt_at", moment()),
    Column("last_error", Text),
    Column("worker_id", BigInteger),
    # Null only where a worker of an older version wrote the row: it stands in no line then.
    Column("lane", name(64)),
    Column("options", json_text()),
    Column("receipts", json_text()),
    Column("calls", Integer, nullable=False, server_default=text("0")),
    Column("resent", Integer, nullable=False, server_default=text("0")),
    # 1: it may have arrived; 2: the same, and a person wants it sent once more.
    Column("in_doubt", Integer, nullable=False, server_default=text("0")),
    Column("expires_at", moment()),
    # The order of arrival; on SQLite that is the rowid.
    Column(
        "seq",
        BigInteger,
        Identity(always=False),
        nullable=False,
        info={"only": "postgresql"},
    ),
    # The window that is blocked, of one that waits for that: due at once when somebody opens it.
    Column("put_off_by", Text().with_variant(Text(collation="C"), "postgresql")),
    Index("idx_deliveries_tenant_task", "tenant_id", "task_id"),
)
PENDING = "status = 'pending'"
LIVE = "status IN ('pending', 'queued', 'sending')"
SENDING = "status = 'sending'"
PUT_OFF = "status = 'pending' AND put_off_by IS NOT NULL"
# SQLite's indexes end with the rowid, unsaid.
for _only, _arrival in (("sqlite", ()), ("postgresql", (deliveries.c.seq,))):
    _partial(
        "idx_deliveries_due",
        deliveries.c.channel,
        deliveries.c.priority.desc(),
        deliveries.c.due_at,
        *_arrival,
        where=PENDING,
        only=_only,
    )
    _partial("idx_deliveries_lane", deliveries.c.lane, *_arrival, where=LIVE, only=_only)
    _partial(
        "idx_deliveries_put_off",
        deliveries.c.put_off_by,
        deliveries.c.priority.desc(),
        *_arrival,
        where=PUT_OFF,
        only=_only,
    )
_partial("idx_deliveries_sending", deliveries.c.lane, where=SENDING)

# How often each place was called lately, of those that may only be called so often.
send_windows = Table(
    "send_windows",
    metadata,
    Column("key", Text().with_variant(Text(collation="C"), "postgresql"), primary_key=True),
    Column("state", json_text(), nullable=False),
    Column("ends_at", moment(), nullable=False),
)

approvals = Table(
    "approvals",
    metadata,
    Column("id", row_id(), primary_key=True, nullable=False),
    tenant(),
    Column("subscription", NAME, nullable=False),
    Column("message_id", NAME, nullable=False),
    Column("queue_name", NAME, nullable=False),
    Column("event_name", NAME),
    Column("payload_sha256", LargeBinary(32), nullable=False),
    Column("rule", NAME, nullable=False),
    Column("reason", Text),
    Column("state", String(20), nullable=False, server_default=text("'pending'")),
    Column("four_eyes", Integer, nullable=False, server_default=text("0")),
    Column("keep_rejected", Integer, nullable=False, server_default=text("0")),
    Column("asked_at", moment(), nullable=False),
    Column("expires_at", moment(), nullable=False),
    Column("first_by", NAME),
    Column("first_at", moment()),
    Column("answered_by", NAME),
    Column("answered_at", moment()),
    Column("note", Text),
    Index("idx_approvals_tenant_message", "tenant_id", "message_id"),
    Index("idx_approvals_tenant_state", "tenant_id", "state", "asked_at"),
)
_partial("idx_approvals_pending", approvals.c.expires_at, where="state = 'pending'")

# What a tenant used in the window that is running, and up to when others were put off.
quotas = Table(
    "quotas",
    metadata,
    tenant(),
    Column("name", NAME, nullable=False),
    Column("window_us", BigInteger, nullable=False),
    Column("window_start", moment(), nullable=False),
    Column("runs", BigInteger, nullable=False, server_default=text("0")),
    Column("llm_calls", BigInteger, nullable=False, server_default=text("0")),
    Column("tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("cost", Double, nullable=False, server_default=text("0")),
    Column("deferred_until", moment()),
    Column("deferred", BigInteger, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("tenant_id", "name"),
)

workers = Table(
    "workers",
    metadata,
    Column(
        "worker_id",
        Integer().with_variant(BigInteger(), "postgresql"),
        primary_key=True,
        autoincrement=True,
    ),
    Column("name", NAME, nullable=False),
    Column("state", String(10), nullable=False),
    Column("started_at", moment(), nullable=False),
    Column("ended_at", moment()),
    Column(
        "beat",
        BigInteger,
        nullable=False,
        server_default=text("0"),
        info={"only": "postgresql"},
    ),
    Column("lease_until", moment(), info={"only": "postgresql"}),
    Column("machine", Text),  # the boot of the machine that it runs on
    Column("parent", Text),  # the process that started it and learns how it ended
    Column("offers", Text),  # JSON: the message types that it handles, the channels that it has
    sqlite_autoincrement=True,
)

sources = Table(
    "sources",
    metadata,
    Column("subscription", NAME, nullable=False),
    Column("part", NAME, nullable=False, server_default=text("''")),
    Column("worker_id", BigInteger),
    Column("n", BigInteger, nullable=False, server_default=text("0")),
    Column("adopted_at", moment()),  # a message of this part was adopted last
    Column("paused_at", moment()),
    PrimaryKeyConstraint("subscription", "part"),
)
# Workers ask each second, and a queue may have many parts.
_partial("idx_sources_paused", sources.c.subscription, where="paused_at IS NOT NULL")

roles = Table(
    "roles",
    metadata,
    Column("role", NAME, primary_key=True, nullable=False),
    Column("worker_id", BigInteger),
    Column("state", json_text()),
)

# The queue of the broker in the same database.
messages = Table(
    "messages",
    metadata,
    Column(
        "seq",
        Integer().with_variant(BigInteger(), "postgresql"),
        Identity(always=False),
        primary_key=True,
        autoincrement=True,
    ),
    Column("queue", NAME, nullable=False),
    Column("state", Integer, nullable=False, server_default=text("0")),
    Column("priority", Integer, nullable=False, server_default=text("1")),
    Column("message_id", NAME, nullable=False),
    Column("lane", NAME),
    Column("due_at", moment()),
    Column("expires_at", moment()),
    Column("sent_at", moment(), nullable=False),
    Column("deliveries", Integer, nullable=False, server_default=text("0")),
    Column("worker_id", BigInteger, info={"only": "sqlite"}),
    Column("headers", json_text(), nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("body_crc", BigInteger, nullable=False),
    sqlite_autoincrement=True,
    postgresql_with={
        "autovacuum_vacuum_scale_factor": 0,
        "autovacuum_vacuum_threshold": 20000,
        "autovacuum_vacuum_cost_delay": 0,
        "autovacuum_analyze_scale_factor": 0,
        "autovacuum_analyze_threshold": 1000000,
    },
)
_partial(
    "idx_messages_ready",
    messages.c.queue,
    messages.c.priority.desc(),
    messages.c.seq,
    where="state = 0 AND lane IS NULL",
)
_partial(
    "idx_messages_lanes",
    messages.c.queue,
    messages.c.seq,
    where="state = 0 AND lane IS NOT NULL",
)
_partial("idx_messages_delayed", messages.c.due_at, where="state = 1", only="sqlite")
_partial("idx_messages_delayed", messages.c.due_at, where="due_at IS NOT NULL", only="postgresql")
_partial("idx_messages_taken", messages.c.worker_id, where="state = 2", only="sqlite")

# One row: how many durable commits this file has seen (the witness file holds the same number).
witness = Table(
    "witness",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("commits", BigInteger, nullable=False),
    info={"only": "sqlite"},
)
