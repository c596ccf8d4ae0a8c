"""What Alembic runs for every command. The caller brings the connection, and its transaction.

`migrate.py` of a dialect is that caller: it opens the database, begins the transaction, and commits
it when the last revision is done, so that an upgrade happens whole or not at all.
"""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
if not connection.in_transaction():
    raise RuntimeError("migrations run inside their caller's transaction; there is none")
context.configure(connection=connection)
context.run_migrations()
