"""The months of `event_log`: each has a partition, made ahead; a default one catches the rest."""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg

AHEAD = 3
"""Months that have their partition before they begin."""
MONTHS: LiteralString = (
    "SELECT to_char(m, '\"event_log_\"YYYY_MM') AS name, to_char(m, 'YYYY-MM-DD\"T00:00:00Z\"'),"
    " to_char(m + interval '1 month', 'YYYY-MM-DD\"T00:00:00Z\"')"
    " FROM generate_series(date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC'),"
    " date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC') + interval '3 months',"
    " interval '1 month') m"
    " WHERE to_regclass(to_char(m, '\"event_log_\"YYYY_MM')) IS NULL"
)
"""Months from now on that have none: its name, where it begins, where the next one begins."""


def statements(name: str, begin: str, end: str) -> list[str]:
    """What makes one partition. Rows of that month that the default one caught move over.

    The table is made alone and attached then: that keeps nobody from writing but for the moment
    in which the default partition is looked at. By its own name only its owner gets at it: what
    keeps tenants apart stands around `event_log`.
    """
    month = f"created_at >= '{begin}' AND created_at < '{end}'"
    return [
        f"CREATE TABLE {name} (LIKE event_log INCLUDING DEFAULTS,"
        f" CONSTRAINT {name}_month CHECK (created_at IS NOT NULL AND {month}))",
        f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY",
        "LOCK TABLE event_log_default IN ACCESS EXCLUSIVE MODE",
        f"WITH caught AS (DELETE FROM event_log_default WHERE {month} RETURNING *)"
        f" INSERT INTO {name} SELECT * FROM caught",
        f"ALTER TABLE event_log ATTACH PARTITION {name} FOR VALUES FROM ('{begin}') TO ('{end}')",
        f"ALTER TABLE {name} DROP CONSTRAINT {name}_month",
    ]


def make_partitions(conn: psycopg.Connection[Any]) -> int:
    """Inside a transaction of the caller; returns how many were made."""
    missing = conn.execute(MONTHS).fetchall()
    for name, begin, end in missing:
        for statement in statements(name, begin, end):
            conn.execute(statement)
    return len(missing)
