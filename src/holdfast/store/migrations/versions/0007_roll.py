"""The workers table says where a worker runs, which process started it, and what it offers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the boot of its machine, its parent process, and its handlers and channels."""
    op.add_column("workers", sa.Column("machine", sa.Text()))
    op.add_column("workers", sa.Column("parent", sa.Text()))
    op.add_column("workers", sa.Column("offers", sa.Text()))


def downgrade() -> None:
    """Remove the three columns."""
    with op.batch_alter_table("workers") as workers:
        workers.drop_column("offers")
        workers.drop_column("parent")
        workers.drop_column("machine")
