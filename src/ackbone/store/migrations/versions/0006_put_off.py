"""What a reply is put off by: when a place that was down answers, they are due at once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
PUT_OFF = "status = 'pending' AND put_off_by IS NOT NULL"


def upgrade() -> None:
    """Add the window's key, and the way from it to its replies."""
    op.add_column("deliveries", sa.Column("put_off_by", KEY))
    is_sqlite = op.get_context().dialect.name == "sqlite"
    arrival = [] if is_sqlite else ["seq"]  # SQLite's end with the rowid, unsaid
    op.create_index(
        "idx_deliveries_put_off",
        "deliveries",
        ["put_off_by", sa.text("priority DESC"), *arrival],
        sqlite_where=sa.text(PUT_OFF),
        postgresql_where=sa.text(PUT_OFF),
    )


def downgrade() -> None:
    """Take it away: what is put off waits until its time."""
    op.drop_index("idx_deliveries_put_off", "deliveries")
    op.drop_column("deliveries", "put_off_by")
