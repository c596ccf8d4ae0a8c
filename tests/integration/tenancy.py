"""A database whose owner is no superuser, roles around it, and rows of any tenant in any table."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from ackbone.store.postgres.migrate import ensure_schema
from ackbone.store.postgres.tenant_wall import TABLES
from tests.servers.postgres import PostgresServer

_numbers = itertools.count(1)


class Estate:
    """One database of one test, the server's roles that belong to it, and their URLs."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._tag = f"{os.getpid()}_{next(_numbers)}"
        self._roles: list[str] = []
        owner = self.role("owner")
        self.database = server.new_database()
        server.execute(f"ALTER DATABASE {self.database} OWNER TO {owner}")
        self.owner = self.url(owner)

    def role(self, name: str, options: str = "") -> str:
        """A new role that may log in."""
        name = self.reserve(name)
        self._server.execute(f"CREATE ROLE {name} LOGIN {options}")
        return name

    def reserve(self, name: str) -> str:
        """A name for a role that a test makes; it is dropped with the others."""
        name = f"{name}_{self._tag}"
        self._roles.append(name)
        return name

    def url(self, role: str) -> str:
        return self._server.url(self.database, role=role)

    def superuser(self, statement: str) -> None:
        """In this database."""
        with psycopg.connect(self._server.url(self.database), autocommit=True) as conn:
            conn.execute(statement)

    def remove(self) -> None:
        self._server.drop(self.database)
        for role in reversed(self._roles):
            self._server.execute(f"DROP ROLE IF EXISTS {role}")


@contextmanager
def estate(server: PostgresServer) -> Iterator[Estate]:
    """Empty, but for what `ensure_schema` makes as the owner."""
    found = Estate(server)
    try:
        ensure_schema(found.owner)
        yield found
    finally:
        found.remove()


class Column(NamedTuple):
    name: str
    type: str


class Rows:
    """Rows of any tenant, in any table, from nothing but the catalogue."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        found = conn.execute(
            "SELECT table_name, column_name, data_type FROM information_schema.columns"
            " WHERE table_name = ANY(%s) AND is_nullable = 'NO' AND column_default IS NULL"
            " ORDER BY table_name, ordinal_position",
            (list(TABLES),),
        ).fetchall()
        self._needed: dict[str, list[Column]] = {table: [] for table in TABLES}
        for table, name, type_ in found:
            self._needed[table].append(Column(name, type_))

    def insert(
        self, conn: psycopg.Connection[Any], table: str, tenant: str, *, into: str | None = None
    ) -> None:
        """`into`: a partition of the table."""
        columns = [Column("tenant_id", "text"), *self._needed[table]]
        conn.execute(
            sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
                sql.Identifier(into or table),
                sql.SQL(", ").join(sql.Identifier(each.name) for each in columns),
                sql.SQL(", ").join([sql.Placeholder()] * len(columns)),
            ),
            [tenant, *(_value(each) for each in columns[1:])],
        )


def _value(column: Column) -> Any:
    n = next(_numbers)
    values: dict[str, Any] = {
        "uuid": f"00000000-0000-7000-8000-{n:012x}",
        "character varying": f"{n}",
        "text": f"{n}",
        "json": "{}",
        "bytea": b"",
        "integer": 0,
        "bigint": n,
        "double precision": 0.0,
        "timestamp with time zone": "2024-02-29T12:00:00Z",
    }
    return values[column.type]


def bind(conn: psycopg.Connection[Any], tenant: str) -> None:
    """Name the tenant of the transaction that is open."""
    conn.execute("SELECT set_config('ackbone.tenant_id', %s, true)", (tenant,))
