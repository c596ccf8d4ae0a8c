"""The revisions of the schema, which both dialects share, and Alembic as their upgrades run it."""

from __future__ import annotations

import io
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ackbone.core.errors import SchemaMismatch

HEAD = "0007"
"""The revision that this program reads and writes."""
FIRST = "0007"
"""The oldest revision that an upgrade can begin with. No ackbone was released with an older one."""
MIGRATIONS = Path(__file__).with_name("migrations")

_NOW_US = "(CAST(strftime('%s', 'now') || substr(strftime('%f', 'now'), 4) || '000' AS INTEGER))"
_WORDS = {
    "MOMENT": ("TIMESTAMP WITH TIME ZONE", "BIGINT"),
    "NOW": ("now()", _NOW_US),
    "ROW_ID": ("UUID", "BLOB"),
    "BYTES": ("BYTEA", "BLOB"),
    "DOUBLE": ("DOUBLE PRECISION", "DOUBLE"),
    "JSON": ("JSON", "TEXT"),
    "NAME": ('VARCHAR(255) COLLATE "C"', "VARCHAR(255)"),
    "TENANT": ("VARCHAR(64) COLLATE \"C\" DEFAULT 'default' NOT NULL",) * 2,
    ", ARRIVAL": (", seq", ""),
    ' COLLATE "C"': (' COLLATE "C"', ""),
}
"""Words of `0007_schema.sql`, each with its replacement on PostgreSQL and on SQLite, in order."""

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
    if revision.isdigit() and revision < FIRST:
        raise SchemaMismatch(
            f"{place} has schema revision {revision}, which no released ackbone made; this one "
            f"upgrades from {FIRST} on. Give ackbone a new {kind}, or run the checkout that made "
            "this one. Nothing was changed."
        )
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


def statements(dialect: str) -> list[str]:
    """The statements of the first revision, which make all tables."""
    other = "sqlite" if dialect == "postgresql" else "postgresql"
    text = (MIGRATIONS / "versions" / f"{FIRST}_schema.sql").read_text(encoding="utf-8")
    text = re.sub(f"^-- begin {other}.*?^-- end$", "", text, flags=re.M | re.S)
    text = re.sub(f"^.*-- {other}\n", "", text, flags=re.M)
    text = re.sub(r" *--.*", "", text)
    for word, meaning in _WORDS.items():
        text = text.replace(word, meaning[dialect == "sqlite"])
    return [statement.strip() for statement in text.split(";\n") if statement.strip()]


def run_migrations(
    url: str, conn: Any, begin: str = "BEGIN", then: Callable[[], None] | None = None
) -> None:
    """Upgrade to `HEAD` in one transaction of `conn`. `then` is called at its end.

    The connection commits each statement by itself, so the transaction is written out.
    """
    # Alembic logs its steps, and plugins as it is imported: they tell an operator nothing.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from alembic import command
    from alembic.config import Config
    from sqlalchemy import create_engine, event
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import StaticPool

    engine = create_engine(url, creator=lambda: conn, poolclass=StaticPool)
    for name, statement in (("begin", begin), ("commit", "COMMIT"), ("rollback", "ROLLBACK")):
        event.listen(engine, name, lambda it, text=statement: it.exec_driver_sql(text))
    try:
        with _alembic_lock, engine.begin() as connection:
            config = Config(output_buffer=io.StringIO(), attributes={"connection": connection})
            config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
            command.upgrade(config, "head")
            if then is not None:
                then()
    except DBAPIError as error:
        raise error.orig or error from error
