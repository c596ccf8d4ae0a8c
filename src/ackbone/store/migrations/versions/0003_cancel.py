"""Cancelling: a running task can be asked to stop by another process."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

MOMENT = sa.BigInteger().with_variant(sa.TIMESTAMP(timezone=True), "postgresql")


def upgrade() -> None:
    """Add the time at which somebody asked."""
    op.add_column("queue_executions", sa.Column("cancel_at", MOMENT))


def downgrade() -> None:
    """Take it away: a wish that nobody heard is lost, and nothing else."""
    op.drop_column("queue_executions", "cancel_at")
