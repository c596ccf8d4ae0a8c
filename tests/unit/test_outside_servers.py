"""The server that ACKBONE_TEST_POSTGRES_URL names: each test has a database of its own in it."""

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.servers.postgres import OutsidePostgres


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:pr%2Fobe@db.internal:6543/postgres?sslmode=require&application_name=x",
        "postgresql://me@db.internal",
        "postgres://me@[::1]:5432/",
        "postgresql:///postgres?host=/run/postgresql",
        "postgresql://me@/?host=/run/postgresql&port=6543",
    ],
)
def test_only_the_database_is_another(url: str) -> None:
    given, found = conninfo_to_dict(url), conninfo_to_dict(OutsidePostgres(url).url("ab_1"))
    assert found == {**given, "dbname": "ab_1"}
