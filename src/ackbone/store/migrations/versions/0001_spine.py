"""The spine: tasks, keys, ledger, dead letters, outbox, deliveries and the SQLite broker's queue.

Types are written out here: what a released revision does never changes, whatever becomes of the
tables later.

Exceptions to "every business table has a UUID primary key", on purpose:
1. `idempotency_keys`: its primary key is the business key, (tenant_id, key, subscription). Dedup
   keys come from the messages; a second encoding would only hide them. It keeps `tenant_id`, and an
   index on (tenant_id, expires_at) of those that can expire.
2. `queue_executions`: its key is the identity of a task, (tenant_id, message_id, subscription), in
   one unique index, which is the primary key on PostgreSQL; `id` is a UUIDv7 and has no index of
   its own.
3. `event_log`: append-only, and partitioned by time where the database can do that, so it has no
   unique index; a gap or a double is found by its hash chain.
4. `alembic_version`: Alembic's own table, without `tenant_id` and UUID.
`effects`, `workers`, `sources`, `roles`, `messages` and `witness` are the engine's own machinery.

On PostgreSQL `event_log` is partitioned by month. What has no partition yet goes into
`event_log_default`: nothing is refused because nobody made the next one in time.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NAME = sa.String(255).with_variant(sa.String(255, collation="C"), "postgresql")
ZERO = sa.text("0")


def upgrade() -> None:
    """Make all tables; on SQLite also its broker's, and the one row of `witness`."""
    _tasks()
    _records()
    _outgoing()
    _machinery()
    if _is_sqlite():
        _broker()


def downgrade() -> None:
    """Refused: below the first revision there is nothing, and messages would be dropped."""
    raise RuntimeError("0001 cannot be taken back: it would drop every message; restore a copy")


def _tasks() -> None:
    op.create_table(
        "idempotency_keys",
        _tenant(),
        sa.Column("subscription", NAME, nullable=False),
        sa.Column("key", NAME, nullable=False),
        sa.Column("message_id", NAME, nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("value", sa.LargeBinary),
        sa.Column("created_at", _moment(), nullable=False, server_default=_now()),
        sa.Column("expires_at", _moment()),
        sa.PrimaryKeyConstraint("tenant_id", "key", "subscription"),  # exception 1
    )
    _partial_index(
        "idx_idempotency_keys_tenant_expires",
        "idempotency_keys",
        ["tenant_id", "expires_at"],
        "state = 'done'",
    )

    op.create_table(
        "queue_executions",
        sa.Column("id", _row_id(), nullable=False),
        _tenant(),
        sa.Column("subscription", NAME, nullable=False),
        sa.Column("message_id", NAME, nullable=False),
        sa.Column("queue_name", NAME, nullable=False),
        sa.Column("event_name", NAME),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("held", sa.String(10), nullable=False),
        sa.Column("worker_id", sa.BigInteger),
        sa.Column("epoch", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("attempt", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("crashes", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("priority", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("due_at", _moment()),
        sa.Column("lane", NAME),
        sa.Column("lane_seq", sa.BigInteger),
        sa.Column("idem_key", NAME),
        sa.Column("created_at", _moment()),
        sa.Column("expires_at", _moment()),
        sa.Column("started_at", _moment(), nullable=False, server_default=_now()),
        sa.Column("completed_at", _moment()),
        sa.Column("duration_ms", sa.Integer),
        sa.Column("agent_run_id", _row_id()),
        sa.Column("error_message", sa.Text),
        sa.Column("retry_count", sa.Integer, server_default=ZERO),
        sa.Column("parked_kind", sa.String(40)),
        sa.Column("correlation_id", NAME),
        sa.Column("trace_id", NAME),
        sa.Column("history", _json()),
        sa.Column("body", sa.LargeBinary),
        sa.Column("body_info", _json()),
        sa.Column("body_crc", sa.BigInteger),
        sa.Column("body_sha256", sa.LargeBinary(32)),
        sa.Column("result", sa.LargeBinary),
    )
    op.create_index(  # exception 2
        "idx_queue_executions_tenant_message_id",
        "queue_executions",
        ["tenant_id", "message_id", "subscription"],
        unique=True,
    )
    if not _is_sqlite():
        op.execute(
            "ALTER TABLE queue_executions ADD CONSTRAINT idx_queue_executions_tenant_message_id"
            " PRIMARY KEY USING INDEX idx_queue_executions_tenant_message_id"
        )
    op.create_index(
        "idx_queue_executions_tenant_queue_started",
        "queue_executions",
        ["tenant_id", "queue_name", sa.text("started_at DESC")],
    )
    _partial_index(
        "idx_queue_executions_tenant_status",
        "queue_executions",
        ["tenant_id", "status"],
        "status <> 'running' AND status <> 'succeeded' AND status <> 'duplicate'",
    )
    _partial_index(
        "idx_tasks_ready",
        "queue_executions",
        ["subscription", "priority", "due_at"],
        "status = 'ready'",
    )
    _partial_index("idx_tasks_running", "queue_executions", ["worker_id"], "status = 'running'")
    _partial_index(
        "idx_tasks_waiting_key",
        "queue_executions",
        ["tenant_id", "subscription", "idem_key"],
        "status = 'waiting_key'",
    )
    _partial_index(
        "idx_tasks_lane",
        "queue_executions",
        ["tenant_id", "subscription", "lane", "lane_seq"],
        "lane IS NOT NULL AND status <> 'succeeded' AND status <> 'failed' AND status <> 'rejected'"
        " AND status <> 'expired' AND status <> 'discarded' AND status <> 'duplicate'",
    )
    _partial_index(
        "idx_tasks_parked", "queue_executions", ["subscription", "parked_kind"], "status = 'parked'"
    )


def _records() -> None:
    op.create_table(
        "queue_metrics",
        sa.Column("id", _row_id(), primary_key=True, nullable=False),
        _tenant(),
        sa.Column("queue_name", NAME, nullable=False),
        sa.Column("metric_name", sa.String(100), nullable=False),
        sa.Column("metric_value", sa.Double, nullable=False),
        sa.Column("timestamp", _moment(), nullable=False, server_default=_now()),
        sa.Column("tags", _json()),
    )
    op.create_index(
        "idx_queue_metrics_tenant_metric_time",
        "queue_metrics",
        ["tenant_id", "queue_name", "metric_name", sa.text("timestamp DESC")],
    )

    op.create_table(
        "event_log",  # exception 3
        sa.Column("id", _row_id(), nullable=False),
        _tenant(),
        sa.Column("subscription", NAME, nullable=False),
        sa.Column("task_id", NAME, nullable=False),
        sa.Column("event_type", sa.String(40), nullable=False),
        sa.Column("data", _json(), nullable=False),
        sa.Column("created_at", _moment(), nullable=False),
        sa.Column("worker_id", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
        postgresql_partition_by="RANGE (created_at)",
    )
    op.create_index("idx_event_log_tenant_task", "event_log", ["tenant_id", "task_id"])
    if not _is_sqlite():
        op.create_index(
            "idx_event_log_created",
            "event_log",
            ["created_at"],
            postgresql_using="brin",
            postgresql_with={"autosummarize": "on"},
        )
        op.execute("CREATE TABLE event_log_default PARTITION OF event_log DEFAULT")

    op.create_table(
        "dead_letters",
        sa.Column("id", _row_id(), primary_key=True, nullable=False),
        _tenant(),
        sa.Column("subscription", NAME, nullable=False),
        sa.Column("message_id", NAME, nullable=False),
        sa.Column("queue_name", NAME, nullable=False),
        sa.Column("event_name", NAME),
        sa.Column("reason", sa.String(60), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("retry_count", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("history", _json()),
        sa.Column("body", sa.LargeBinary),
        sa.Column("body_info", _json()),
        sa.Column("body_crc", sa.BigInteger),
        sa.Column("state", sa.String(20), nullable=False, server_default=sa.text("'open'")),
        sa.Column("failed_at", _moment(), nullable=False),
        sa.Column("settled_at", _moment()),
        sa.Column("replay_id", NAME),
    )
    op.create_index(
        "idx_dead_letters_tenant_state_failed",
        "dead_letters",
        ["tenant_id", "state", "failed_at"],
    )
    op.create_index("idx_dead_letters_tenant_message", "dead_letters", ["tenant_id", "message_id"])

    op.create_table(
        "effects",
        _tenant(),
        sa.Column("subscription", NAME, nullable=False),
        sa.Column("message_id", NAME, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("value", sa.LargeBinary),
        sa.Column("worker_id", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("created_at", _moment(), nullable=False),
        sa.Column("done_at", _moment()),
        sa.PrimaryKeyConstraint("tenant_id", "subscription", "message_id", "name"),
    )


def _outgoing() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", _row_id(), primary_key=True, nullable=False),
        _tenant(),
        sa.Column("queue_name", NAME, nullable=False),
        sa.Column("message_id", NAME, nullable=False),
        sa.Column("headers", _json(), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("body_crc", sa.BigInteger, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("ordering_key", NAME),
        sa.Column("ttl_us", sa.BigInteger),
        sa.Column("due_at", _moment(), nullable=False),
        sa.Column("created_at", _moment(), nullable=False),
    )
    op.create_index("idx_outbox_due", "outbox", ["due_at"])

    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(36), primary_key=True, nullable=False),
        _tenant(),
        sa.Column("subscription", NAME),
        sa.Column("task_id", NAME),
        sa.Column("channel", NAME, nullable=False),
        sa.Column("recipient", NAME, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("conversation", NAME),
        sa.Column("priority", sa.Integer, nullable=False, server_default=sa.text("2")),
        sa.Column("status", sa.String(20), nullable=False, server_default=sa.text("'pending'")),
        sa.Column("retry_count", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("max_retries", sa.Integer, nullable=False, server_default=sa.text("5")),
        sa.Column("due_at", _moment(), nullable=False),
        sa.Column("created_at", _moment(), nullable=False),
        sa.Column("last_attempt_at", _moment()),
        sa.Column("last_error", sa.Text),
        sa.Column("worker_id", sa.BigInteger),
    )
    op.create_index("idx_deliveries_tenant_task", "deliveries", ["tenant_id", "task_id"])
    _partial_index(
        "idx_deliveries_pending",
        "deliveries",
        ["channel", "priority", "due_at"],
        "status = 'pending'",
    )


def _machinery() -> None:
    op.create_table(
        "workers",
        sa.Column(
            "worker_id",
            sa.Integer().with_variant(sa.BigInteger(), "postgresql"),
            primary_key=True,
            autoincrement=True,
        ),
        sa.Column("name", NAME, nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("started_at", _moment(), nullable=False),
        sa.Column("ended_at", _moment()),
        *_beats(),
        sqlite_autoincrement=True,  # a worker's number is never given out twice
    )
    op.create_table(
        "sources",
        sa.Column("subscription", NAME, nullable=False),
        sa.Column("part", NAME, nullable=False, server_default=sa.text("''")),
        sa.Column("worker_id", sa.BigInteger),
        sa.Column("n", sa.BigInteger, nullable=False, server_default=ZERO),
        sa.Column("floor", sa.BigInteger),
        sa.Column("paused_at", _moment()),
        sa.PrimaryKeyConstraint("subscription", "part"),
    )
    op.create_table(
        "roles",
        sa.Column("role", NAME, primary_key=True, nullable=False),
        sa.Column("worker_id", sa.BigInteger),
        sa.Column("state", _json()),
    )


def _broker() -> None:
    op.create_table(
        "messages",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("state", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("priority", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("message_id", NAME, nullable=False),
        sa.Column("lane", NAME),
        sa.Column("due_at", _moment()),
        sa.Column("expires_at", _moment()),
        sa.Column("sent_at", _moment(), nullable=False),
        sa.Column("deliveries", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("worker_id", sa.BigInteger),
        sa.Column("headers", _json(), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("body_crc", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )
    _partial_index(
        "idx_messages_ready",
        "messages",
        ["queue", sa.text("priority DESC"), "seq"],
        "state = 0 AND lane IS NULL",
    )
    _partial_index(
        "idx_messages_lanes", "messages", ["queue", "seq"], "state = 0 AND lane IS NOT NULL"
    )
    _partial_index("idx_messages_delayed", "messages", ["due_at"], "state = 1")
    _partial_index("idx_messages_taken", "messages", ["worker_id"], "state = 2")

    op.create_table(
        "witness",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("commits", sa.BigInteger, nullable=False),
    )
    op.execute("INSERT INTO witness (id, commits) VALUES (1, 0)")


def _beats() -> list[sa.Column[Any]]:
    """Signs of life; on SQLite they are files."""
    if _is_sqlite():
        return []
    return [
        sa.Column("beat", sa.BigInteger, nullable=False, server_default=ZERO),
        sa.Column("lease_until", _moment()),
    ]


# ── the types, as they were when this revision was made ──────────────────────────────────────────


def _moment() -> sa.types.TypeEngine[Any]:
    return sa.BigInteger().with_variant(sa.TIMESTAMP(timezone=True), "postgresql")


def _row_id() -> sa.types.TypeEngine[Any]:
    return sa.LargeBinary(16).with_variant(sa.Uuid(), "postgresql")


def _json() -> sa.types.TypeEngine[Any]:
    return sa.Text().with_variant(postgresql.JSON(), "postgresql")


def _tenant() -> sa.Column[str]:
    return sa.Column(
        "tenant_id",
        sa.String(64).with_variant(sa.String(64, collation="C"), "postgresql"),
        nullable=False,
        server_default=sa.text("'default'"),
    )


def _is_sqlite() -> bool:
    return op.get_context().dialect.name == "sqlite"


def _now() -> sa.TextClause:
    if _is_sqlite():  # integer microseconds
        return sa.text(
            "(CAST(strftime('%s', 'now') || substr(strftime('%f', 'now'), 4) || '000' AS INTEGER))"
        )
    return sa.text("now()")


def _partial_index(name: str, table: str, columns: list[str | sa.TextClause], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, table, columns, sqlite_where=condition, postgresql_where=condition)
