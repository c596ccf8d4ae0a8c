"""The workers table says where a worker runs, which process started it, and what it offers.

A task says which worker lost it, until another worker claims it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the boot of a worker's machine, its parent process, its handlers and channels; add the
    worker that lost a task."""
    op.add_column("workers", sa.Column("machine", sa.Text()))
    op.add_column("workers", sa.Column("parent", sa.Text()))
    op.add_column("workers", sa.Column("offers", sa.Text()))
    op.add_column("queue_executions", sa.Column("lost_by", sa.Text()))


def downgrade() -> None:
    """Remove the columns."""
    op.drop_column("queue_executions", "lost_by")
    with op.batch_alter_table("workers") as workers:
        workers.drop_column("offers")
        workers.drop_column("parent")
        workers.drop_column("machine")
