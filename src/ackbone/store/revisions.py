"""The revisions of the schema, which both dialects share, and Alembic as their upgrades run it.

Exceptions to "every business table has a UUID primary key", on purpose:
1. `idempotency_keys`: its key is the business key itself, (tenant_id, key, subscription): dedup
   keys come from the messages, and a second encoding would only hide them.
2. `queue_executions`: (tenant_id, message_id, subscription) is the identity of a task; `id` is the
   UUIDv7 of its row and has no index of its own.
3. `event_log`: append-only, partitioned by time where the database can, so it has no unique index.
4. `alembic_version` belongs to Alembic.
`effects`, `quotas`, `sources`, `roles`, `workers`, `send_windows` and `messages` are the engine's
own tables.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ackbone.core.errors import SchemaMismatch

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Engine

HEAD = "0007"
"""The revision that this program reads and writes."""
MIGRATIONS = Path(__file__).with_name("migrations")

_alembic_lock = threading.Lock()  # Alembic keeps its context in module globals


def known_revisions() -> set[str]:
    """Every revision that this program has a migration for."""
    return {file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("*_*.py")}


def is_older(revision: str | None, place: str, kind: str) -> bool:
    """Return whether an upgrade has something to do. Raises SchemaMismatch if no upgrade helps: a
    newer version or another program made the tables."""
    if revision == HEAD:
        return False
    if revision is None or revision in known_revisions():
        return True
    if revision.isdigit() and revision > HEAD:
        raise SchemaMismatch(
            f"{place} has schema revision {revision}; this ackbone knows revisions up to {HEAD}. "
            f"A newer ackbone has used this {kind}. Install that version, or restore the copy made "
            "before it was upgraded. Nothing was changed."
        )
    raise SchemaMismatch(
        f"{place} has schema revision {revision!r}, which is not one of ackbone's (this one has "
        f"{HEAD}): it belongs to another program. Give ackbone a {kind} of its own. "
        "Nothing was changed."
    )


def upgrade_needed(place: str, revision: str | None) -> SchemaMismatch:
    """The error for tables that only `ackbone migrate` may upgrade."""
    return SchemaMismatch(
        f"{place} has schema revision {revision or 'none'}, this ackbone needs {HEAD}. "
        "Run 'ackbone migrate'"
    )


def render(dialect: str, revision: str = "head") -> str:
    """The statements that lead from an empty database to `revision`, as Alembic emits them."""
    from alembic import command

    buffer = io.StringIO()
    with _alembic_lock:
        command.upgrade(_alembic_config(buffer, dialect=dialect), revision, sql=True)
    # Which SQLite the machine has decides whether the last INSERT returns its row: it need not.
    text = buffer.getvalue().replace(" RETURNING version_num;", ";")
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def run_migrations(engine: Engine, then: Callable[[], None] | None = None) -> None:
    """Upgrade to `HEAD` in one transaction of `engine`. `then` is called at its end."""
    from alembic import command
    from sqlalchemy.exc import DBAPIError

    try:
        with _alembic_lock, engine.begin() as connection:
            command.upgrade(_alembic_config(io.StringIO(), connection=connection), "head")
            if then is not None:
                then()
    except DBAPIError as error:
        raise error.orig or error from error


def _alembic_config(output: io.StringIO, **attributes: Any) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output, attributes=attributes)
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config
