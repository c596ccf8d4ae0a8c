"""Governance: what people are asked before a run, and what tenants have used of their quotas.

`approvals` is a business table like the others: its own UUID, `tenant_id` first in its indexes (but
for the engine's partial one, over what nobody has answered yet). `quotas` is machinery: one row for
each tenant and rule, with the use of the window that is running.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NAME = sa.String(255).with_variant(sa.String(255, collation="C"), "postgresql")
ZERO = sa.text("0")


def upgrade() -> None:
    """Make both tables."""
    _approvals()
    _quotas()


def downgrade() -> None:
    """Refused: what people answered would be forgotten."""
    raise RuntimeError("0002 cannot be taken back: it would drop the approvals; restore a copy")


def _approvals() -> None:
    op.create_table(
        "approvals",
        sa.Column("id", _row_id(), primary_key=True, nullable=False),
        _tenant(),
        sa.Column("subscription", NAME, nullable=False),
        sa.Column("message_id", NAME, nullable=False),
        sa.Column("queue_name", NAME, nullable=False),
        sa.Column("event_name", NAME),
        sa.Column("payload_sha256", sa.LargeBinary(32), nullable=False),
        sa.Column("rule", NAME, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("state", sa.String(20), nullable=False, server_default=sa.text("'pending'")),
        sa.Column("four_eyes", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("keep_rejected", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("asked_at", _moment(), nullable=False),
        sa.Column("expires_at", _moment(), nullable=False),
        sa.Column("first_by", NAME),
        sa.Column("first_at", _moment()),
        sa.Column("answered_by", NAME),
        sa.Column("answered_at", _moment()),
        sa.Column("note", sa.Text),
    )
    op.create_index("idx_approvals_tenant_message", "approvals", ["tenant_id", "message_id"])
    op.create_index("idx_approvals_tenant_state", "approvals", ["tenant_id", "state", "asked_at"])
    pending = sa.text("state = 'pending'")
    op.create_index(
        "idx_approvals_pending",
        "approvals",
        ["expires_at"],
        sqlite_where=pending,
        postgresql_where=pending,
    )


def _quotas() -> None:
    op.create_table(
        "quotas",
        _tenant(),
        sa.Column("name", NAME, nullable=False),
        sa.Column("window_us", sa.BigInteger, nullable=False),
        sa.Column("window_start", _moment(), nullable=False),
        sa.Column("runs", sa.BigInteger, nullable=False, server_default=ZERO),
        sa.Column("llm_calls", sa.BigInteger, nullable=False, server_default=ZERO),
        sa.Column("tokens", sa.BigInteger, nullable=False, server_default=ZERO),
        sa.Column("cost", sa.Double, nullable=False, server_default=ZERO),
        sa.Column("deferred_until", _moment()),
        sa.Column("deferred", sa.BigInteger, nullable=False, server_default=ZERO),
        sa.PrimaryKeyConstraint("tenant_id", "name"),
    )


# ── the types, as they were when this revision was made ──────────────────────────────────────────


def _moment() -> sa.types.TypeEngine[Any]:
    return sa.BigInteger().with_variant(sa.TIMESTAMP(timezone=True), "postgresql")


def _row_id() -> sa.types.TypeEngine[Any]:
    return sa.LargeBinary(16).with_variant(sa.Uuid(), "postgresql")


def _tenant() -> sa.Column[str]:
    return sa.Column(
        "tenant_id",
        sa.String(64).with_variant(sa.String(64, collation="C"), "postgresql"),
        nullable=False,
        server_default=sa.text("'default'"),
    )
