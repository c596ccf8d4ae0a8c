"""The wall between tenants, and the roles around it. Revision 0007 builds it.

A role that it binds sees, and may change, only rows of the tenant that its transaction names:

    SELECT set_config('ackbone.tenant_id', 'acme', true)

The owner of the tables and the roles of the policy `workers` see everything. So a worker must be
one of them: for any other role every queue looks empty, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import errors, sql

from ackbone.core.errors import Conflict, StoreUnavailable
from ackbone.pgserver.address import Address

TABLES = (
    "idempotency_keys",
    "queue_executions",
    "queue_metrics",
    "event_log",
    "dead_letters",
    "effects",
    "outbox",
    "deliveries",
    "approvals",
    "quotas",
)
"""Those with a tenant, in the order in which they are locked."""
MACHINERY = ("workers", "sources", "roles", "send_windows", "messages")
"""Tables without a tenant: their rows describe workers and queues, or are messages that nobody has
read. Only workers have rights on them."""
NUMBERS = "workers_worker_id_seq"
ARRIVALS = ("deliveries_seq_seq", "messages_seq_seq")
"""The sequences of new replies and messages. Roles that add one need no right on them."""
API_RIGHTS: Mapping[str, Sequence[str]] = {
    # What pages show. Not queue_metrics: its rows count queues, which tenants share.
    "queue_executions": (
        "SELECT",
        "UPDATE (status, due_at, parked_kind, completed_at, error_message, body)",
    ),
    "event_log": ("SELECT", "INSERT"),
    "dead_letters": ("SELECT", "INSERT"),
    "approvals": (
        "SELECT",
        "UPDATE (state, first_by, first_at, answered_by, answered_at, note)",
    ),
    # An answer is an event, and its subscribers get a notification.
    "deliveries": ("SELECT", "INSERT"),
    "effects": ("SELECT",),
    "quotas": ("SELECT",),
    # A no ends the message: its key becomes free, and notices about its end are written.
    "idempotency_keys": ("SELECT", "DELETE"),
    "outbox": ("INSERT",),
    # The event of an answer has a worker id. Roles of workers make those ids.
    "workers": ("SELECT (worker_id, name, state)",),
    "alembic_version": ("SELECT",),
}
_WORK = "SELECT, INSERT, UPDATE, DELETE"
_LOCK_S = 5
_BOUND = """
SELECT name FROM unnest(%s::text[]) WITH ORDINALITY u(name, n)
WHERE row_security_active(to_regclass(name)) AND NOT EXISTS (
  SELECT 1 FROM pg_policy, unnest(polroles) passes
  WHERE polrelid = to_regclass(name) AND polname = 'workers' AND passes <> 0
    AND pg_has_role(passes, 'USAGE'))
ORDER BY n
"""
"""Tables of which this role sees one tenant at most."""
_OPEN = """
SELECT oid::regclass::text FROM pg_class c
WHERE (oid = ANY(%s::regclass[]) OR oid IN
       (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'event_log'::regclass))
  AND NOT (relrowsecurity AND (relispartition OR EXISTS
           (SELECT 1 FROM pg_policy WHERE polrelid = c.oid AND polname = 'tenant_wall')))
ORDER BY relname
"""
"""Tables whose rows are all visible to every role that has rights on them."""
_PARTITIONS = (
    "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'event_log'::regclass"
)
_OWNS = (
    "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = 'queue_executions'::regclass"
)
_SCHEMA = (
    "(SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE c.oid = 'queue_executions'::regclass)"
)
_UNBOUND = """
SELECT CASE
  WHEN rolsuper THEN 'it is a superuser'
  WHEN rolbypassrls THEN 'it has BYPASSRLS'
  WHEN EXISTS (SELECT 1 FROM pg_class WHERE oid = ANY(%(tables)s::regclass[])
               AND pg_has_role(r.oid, relowner, 'MEMBER'))
    THEN 'it owns the tables, or is a member of the role that does'
  WHEN EXISTS (SELECT 1 FROM pg_policy, unnest(polroles) passes
               WHERE polrelid = ANY(%(tables)s::regclass[]) AND polname = 'workers'
               AND passes <> 0 AND pg_has_role(r.oid, passes, 'MEMBER'))
    THEN 'it is a role of the workers, or a member of one'
END FROM pg_roles r WHERE rolname = %(role)s
"""
_NOT_YET = """
SELECT role, name FROM unnest(%s::text[]) role, unnest(%s::text[]) name
WHERE NOT has_table_privilege(role, to_regclass(name), 'INSERT')
"""
"""Machinery that came later than these roles."""
_PASSING = """
SELECT ARRAY(SELECT pg_get_userbyid(passes)::text FROM pg_policy, unnest(polroles) passes
             WHERE polrelid = to_regclass(%s) AND polname = 'workers')
"""


class Admission(NamedTuple):
    """A role that was let in."""

    role: str
    kind: str
    """`worker` or `api`."""
    made: bool
    """It was not there before."""


def bound_tables(conn: psycopg.Connection[Any]) -> list[str]:
    """Tables of which this role would see one tenant at most; none for who may be a worker."""
    return [name for (name,) in conn.execute(_BOUND, (list(TABLES),))]


def open_tables(conn: psycopg.Connection[Any]) -> list[str]:
    """Tables, partitions included, that the wall does not stand around."""
    return [name for (name,) in conn.execute(_OPEN, (list(TABLES),))]


def require_sight(conn: psycopg.Connection[Any], address: Address) -> None:
    """Raises StoreUnavailable for a role that the wall binds: it would find every queue empty."""
    if bound_tables(conn):
        role = conn.info.user
        raise StoreUnavailable(
            f"{address.shown}: the role {role} sees one tenant at a time, so it can neither run "
            "messages nor look after them: everything would look empty. Run 'ackbone migrate "
            f"--worker-role {role}' as the owner of the tables, or give `store` a role of the "
            "workers"
        )


def close_partitions(conn: psycopg.Connection[Any]) -> None:
    """Partitions that an older worker made stand open; nobody has rights on them but by mistake."""
    for name in open_tables(conn):
        if name not in TABLES:
            conn.execute(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")


def extend_pass(conn: psycopg.Connection[Any]) -> None:
    """Give roles that work on tasks the same rights on tables that were added later."""
    workers = _passing(conn, "queue_executions")
    for table in TABLES:
        if _let_pass(conn, table, workers):
            for role in workers:
                _grant(conn, _WORK, table, sql.Identifier(role))
    for role, table in conn.execute(_NOT_YET, (workers, list(MACHINERY))).fetchall():
        _grant(conn, _WORK, table, sql.Identifier(role))


def _let_pass(conn: psycopg.Connection[Any], table: str, roles: Sequence[str]) -> bool:
    """False if all of them did already."""
    passing = _passing(conn, table)
    if set(roles) <= set(passing):
        return False
    policy = sql.SQL(
        f"{'ALTER' if passing else 'CREATE'} POLICY workers ON {{}} TO {{}}"
        " USING (true) WITH CHECK (true)"
    )
    names = sql.SQL(", ").join(map(sql.Identifier, dict.fromkeys([*passing, *roles])))
    conn.execute(policy.format(sql.Identifier(table), names))
    return True


def _passing(conn: psycopg.Connection[Any], table: str) -> list[str]:
    ((roles,),) = conn.execute(_PASSING, (table,)).fetchall()
    return list(roles)


# ── roles ────────────────────────────────────────────────────────────────────────────────────────


def admit_worker(conn: psycopg.Connection[Any], address: Address, role: str) -> Admission:
    """Let a role see all tenants and do what a worker does. Inside the caller's transaction."""
    made = _prepare(conn, address, role)
    name = sql.Identifier(role)
    for table in TABLES:
        _let_pass(conn, table, [role])
    for table in (*TABLES, *MACHINERY):
        _grant(conn, _WORK, table, name)
    _grant(conn, "SELECT", "alembic_version", name)
    conn.execute(sql.SQL("GRANT USAGE ON SEQUENCE {} TO {}").format(sql.Identifier(NUMBERS), name))
    return Admission(role, "worker", made)


def admit_api(conn: psycopg.Connection[Any], address: Address, role: str) -> Admission:
    """Give a role what pages and approvals of one tenant at a time need, and nothing else. Inside
    the caller's transaction. Raises Conflict for a role that the wall would not bind."""
    made = _prepare(conn, address, role)
    found = conn.execute(_UNBOUND, {"tables": list(TABLES), "role": role}).fetchone()
    if found is not None and found[0] is not None:
        raise Conflict(
            f"the wall between tenants would not bind {role}: {found[0]}. Name another role, or "
            "one that is not there yet. Nothing was changed."
        )
    name = sql.Identifier(role)
    partitions = [partition for (partition,) in conn.execute(_PARTITIONS)]
    for table in (*TABLES, *MACHINERY, *partitions, "alembic_version", NUMBERS, *ARRIVALS):
        conn.execute(sql.SQL("REVOKE ALL ON {} FROM {}").format(sql.SQL(table), name))
    for table, rights in API_RIGHTS.items():
        for right in rights:
            _grant(conn, right, table, name)
    return Admission(role, "api", made)


def _prepare(conn: psycopg.Connection[Any], address: Address, role: str) -> bool:
    """The role is there and can come in; True if it was made for that."""
    if conn.execute(_OWNS).fetchone() != (True,):
        raise StoreUnavailable(
            f"{address.shown}: the role {conn.info.user} does not own the tables, so it cannot "
            "give rights on them. Run this as the role that ran 'ackbone migrate' first"
        )
    conn.execute(f"SET LOCAL lock_timeout = '{_LOCK_S}s'")
    made = conn.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone() is None
    if made:
        _make(conn, address, role)
    _let_in(conn, address, role)
    return made


def _make(conn: psycopg.Connection[Any], address: Address, role: str) -> None:
    create = sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role))
    try:
        conn.execute(create)
    except errors.InsufficientPrivilege as error:
        raise StoreUnavailable(
            f"{address.shown}: there is no role {role}, and {conn.info.user} may not make one "
            "(roles are the whole server's). Ask its administrator for "
            f"'{create.as_string(conn)}', then run this again. Nothing was changed."
        ) from error
    except errors.ReservedName as error:
        raise Conflict(
            f"{role} cannot be the name of a role: {error.diag.message_primary}"
        ) from error


def _let_in(conn: psycopg.Connection[Any], address: Address, role: str) -> None:
    """Database and schema: most often everybody may enter both."""
    for right, kind, word, current in (
        ("CONNECT", "DATABASE", "database", "current_database()"),
        ("USAGE", "SCHEMA", "schema", _SCHEMA),
    ):
        may = f"SELECT has_{word}_privilege(%s, {current}, '{right}'), {current}"
        allowed, place = conn.execute(may, (role,)).fetchone() or (False, "")
        if allowed:
            continue
        grant = sql.SQL(f"GRANT {right} ON {kind} {{}} TO {{}}").format(
            sql.Identifier(place), sql.Identifier(role)
        )
        try:
            conn.execute(grant)  # without the right to, it may be no more than a warning
            allowed, _ = conn.execute(may, (role,)).fetchone() or (False, "")
        except errors.InsufficientPrivilege:
            allowed = False
        if not allowed:
            raise StoreUnavailable(
                f"{address.shown}: {role} may not enter the {word} {place}, and {conn.info.user} "
                f"may not let it in. Ask the administrator for '{grant.as_string(conn)}', then run "
                "this again. Nothing was changed."
            )


def _grant(conn: psycopg.Connection[Any], right: str, table: str, role: sql.Identifier) -> None:
    conn.execute(sql.SQL(f"GRANT {right} ON {{}} TO {{}}").format(sql.Identifier(table), role))
