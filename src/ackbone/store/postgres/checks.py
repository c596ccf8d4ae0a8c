"""Checks of `ackbone doctor` on a PostgreSQL database. Nothing here writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from ackbone.core.errors import StoreUnavailable
from ackbone.core.findings import Check, ok, refused, warning
from ackbone.pgserver.address import Address
from ackbone.pgserver.failures import translate
from ackbone.store.checks import check_bodies, check_revision, named
from ackbone.store.revisions import HEAD

from .migrate import current_revision, is_behind
from .partitions import MISSING
from .tenant_wall import MACHINERY, TABLES, bound_tables, open_tables

OLDEST = 130000
"""`server_version_num` of 13, the oldest version that is tested."""
_CONNECTIONS_EACH = 10
"""Connections that one worker may open."""
_BODIES = ("queue_executions", "dead_letters", "outbox")
_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


def examine(url: str, *, deep: bool) -> list[Check]:
    """Check the server, its settings, the schema and the rights of the role.

    Raises StoreUnavailable if the server cannot be reached.
    """
    address = Address.from_url(url)
    try:
        with psycopg.connect(address, autocommit=True) as conn:
            found = [check_version(conn), *_settings(conn), _schema(url), _connections(conn)]
            if current_revision(url) == HEAD:
                found += [_rights(conn), _wall(conn), _partitions(conn)]
                if deep:
                    found.append(check_bodies(_bodies(conn)))
            return found
    except psycopg.Error as error:
        raise translate(error, address) or StoreUnavailable(str(error)) from error


def check_version(conn: psycopg.Connection[Any]) -> Check:
    number, text = int(_setting(conn, "server_version_num")), _setting(conn, "server_version")
    if number < OLDEST:
        return refused("postgresql", f"version {text}, 13 or newer is needed", "upgrade the server")
    return ok("postgresql", f"version {text}")


def _settings(conn: psycopg.Connection[Any]) -> list[Check]:
    """Check the settings under which a server can lose transactions that it confirmed."""
    found = []
    if _setting(conn, "fsync") != "on":
        found.append(
            refused("fsync", "it is off: a power cut loses the database (P1)", "set fsync = on")
        )
    if _setting(conn, "full_page_writes") != "on":
        found.append(
            refused(
                "full_page_writes",
                "it is off: a power cut can tear pages beyond repair (P1)",
                "set full_page_writes = on",
            )
        )
    commit = _setting(conn, "synchronous_commit")
    if commit == "off":
        found.append(
            refused(
                "synchronous_commit",
                "it is off for this role: a crash of the server loses finished runs (P1)",
                "set synchronous_commit = on (ackbone switches it off where nothing is lost)",
            )
        )
    if not found:
        found.append(ok("durability", f"fsync is on, synchronous_commit is {commit}"))
    if _setting(conn, "transaction_read_only") == "on":
        found.append(
            refused("primary", "this server only reads", "give `store` the address of the primary")
        )
    encoding = _setting(conn, "server_encoding")
    if encoding != "UTF8":
        found.append(
            refused("encoding", f"{encoding} cannot hold every message", "make a UTF8 database")
        )
    return found


def _schema(url: str) -> Check:
    none = "no tables yet; the first worker or 'ackbone migrate' makes them"
    return check_revision(current_revision(url), HEAD, lambda: is_behind(url), ok("schema", none))


def _connections(conn: psycopg.Connection[Any]) -> Check:
    ((used, most),) = conn.execute(
        "SELECT count(*), current_setting('max_connections')::int FROM pg_stat_activity"
        " WHERE backend_type = 'client backend'"
    ).fetchall()
    detail = f"{used} of {most} are used"
    if most - used < 2 * _CONNECTIONS_EACH:
        return warning(
            "connections",
            f"{detail}; a worker may take {_CONNECTIONS_EACH}",
            "raise max_connections",
        )
    return ok("connections", detail)


def _rights(conn: psycopg.Connection[Any]) -> Check:
    """Check whether the role has the rights that a worker needs."""
    lacking = [
        f"{right} on {table}"
        for table in (*TABLES, *MACHINERY)
        for right in _RIGHTS
        if conn.execute("SELECT has_table_privilege(%s, %s)", (table, right)).fetchone() != (True,)
    ]
    if lacking:
        return refused(
            "rights",
            f"the role lacks {named(lacking)}",
            f"as the owner of the tables: 'ackbone migrate --worker-role {conn.info.user}'",
        )
    return ok("rights", "the role may do what a worker does")


def _wall(conn: psycopg.Connection[Any]) -> Check:
    """Check row-level security: it must be on for every table, and must not bind a worker."""
    bound, gaps = bound_tables(conn), open_tables(conn)
    if bound:
        return refused(
            "tenants",
            f"the role {conn.info.user} sees one tenant at a time: a worker would find "
            f"{named(bound)} empty, and run nothing",
            f"as the owner of the tables: 'ackbone migrate --worker-role {conn.info.user}'",
        )
    if gaps:
        return refused(
            "tenants",
            f"row-level security is off for {named(gaps)}: a role that may read "
            "them sees all tenants (P7)",
            "as the owner of the tables: 'ackbone migrate' closes partitions; for tables: "
            "ALTER TABLE … ENABLE ROW LEVEL SECURITY",
        )
    return ok("tenants", "row-level security separates them for every role that is not a worker's")


def _partitions(conn: psycopg.Connection[Any]) -> Check:
    ((owned,),) = conn.execute(
        "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = 'event_log'::regclass"
    ).fetchall()
    if not owned:
        missing = len(conn.execute(MISSING).fetchall())
        what = f"{missing} of the months ahead have none" if missing else "none is missing yet"
        return warning(
            "partitions",
            f"{what}; the role may not make new ones",
            "run 'ackbone migrate' once a quarter as the owner of the tables",
        )
    # Pruning moves here what it keeps of the months that it drops. Those rows are older.
    ((caught,),) = conn.execute(
        "SELECT count(*) FROM event_log_default"
        " WHERE created_at >= date_trunc('month', clock_timestamp(), 'UTC')"
    ).fetchall()
    if caught:
        return warning(
            "partitions",
            f"{caught} events are in no month's partition",
            "the next upkeep moves them, or 'ackbone migrate' does",
        )
    return ok("partitions", "the months ahead have theirs")


def _bodies(conn: psycopg.Connection[Any]) -> Iterator[tuple[str, str, bytes, int | None]]:
    """Return every stored body. Reads the whole tables."""
    for table in _BODIES:
        with conn.transaction(), conn.cursor(name="bodies") as cursor:
            for message_id, body, crc in cursor.execute(
                f"SELECT message_id, body, body_crc FROM {table} WHERE body IS NOT NULL"
            ):
                yield table, message_id, body, crc


def _setting(conn: psycopg.Connection[Any], name: str) -> str:
    row = conn.execute("SELECT current_setting(%s)", (name,)).fetchone()
    return str(row[0]) if row else ""
