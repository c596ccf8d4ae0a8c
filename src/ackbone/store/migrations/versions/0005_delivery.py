"""Delivery: conversations, limits and doubt.

A reply stands in a `lane`, the line of its conversation, and says how often it was called for, what
arrived of it, and whether it may have arrived unheard. `send_windows` counts the calls to places
that may only be called so often.

Replies that were there before stand in no line but their own. `send_windows` is machinery: it names
places, not messages, and has no tenant.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ZERO = sa.text("0")
PENDING = "status = 'pending'"
LIVE = "status IN ('pending', 'queued', 'sending')"
SENDING = "status = 'sending'"


def upgrade() -> None:
    """Widen the table, give its rows their lanes, and make the indexes anew."""
    _columns()
    op.execute("UPDATE deliveries SET lane = id WHERE status <> 'sent'")
    _indexes()
    op.create_table(
        "send_windows",
        sa.Column("key", sa.Text().with_variant(sa.Text(collation="C"), "postgresql")),
        sa.Column("state", _json(), nullable=False),
        sa.Column("ends_at", _moment(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )


def downgrade() -> None:
    """Refused: it would be forgotten what arrived, and what may have."""
    raise RuntimeError("0005 cannot be taken back: it would drop receipts; restore a copy")


def _columns() -> None:
    for column in (
        sa.Column("lane", _name(64)),
        sa.Column("options", _json()),
        sa.Column("receipts", _json()),
        sa.Column("calls", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("resent", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("in_doubt", sa.Integer, nullable=False, server_default=ZERO),
        sa.Column("expires_at", _moment()),
    ):
        op.add_column("deliveries", column)
    if not _is_sqlite():
        # Rows that are there are numbered as they stand, which is about how they came.
        op.add_column(
            "deliveries",
            sa.Column("seq", sa.BigInteger, sa.Identity(always=False), nullable=False),
        )
        op.alter_column("deliveries", "recipient", type_=sa.String(2048, collation="C"))


def _indexes() -> None:
    arrival = [] if _is_sqlite() else ["seq"]  # SQLite's end with the rowid, unsaid
    op.drop_index("idx_deliveries_pending", "deliveries")
    _partial_index(
        "idx_deliveries_due", ["channel", sa.text("priority DESC"), "due_at", *arrival], PENDING
    )
    _partial_index("idx_deliveries_lane", ["lane", *arrival], LIVE)
    _partial_index("idx_deliveries_sending", ["lane"], SENDING)


def _partial_index(name: str, columns: list[str | sa.TextClause], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, "deliveries", columns, sqlite_where=condition, postgresql_where=condition)


# ── the types, as they were when this revision was made ──────────────────────────────────────────


def _name(length: int) -> sa.types.TypeEngine[Any]:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def _moment() -> sa.types.TypeEngine[Any]:
    return sa.BigInteger().with_variant(sa.TIMESTAMP(timezone=True), "postgresql")


def _json() -> sa.types.TypeEngine[Any]:
    return sa.Text().with_variant(postgresql.JSON(), "postgresql")


def _is_sqlite() -> bool:
    return op.get_context().dialect.name == "sqlite"
