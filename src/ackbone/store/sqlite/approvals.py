"""Approvals as claims and people look at them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from ackbone.core.approvals import Approval, ApprovalFilter
from ackbone.core.store import Approved
from ackbone.store.approvals import of_row
from ackbone.store.seen import HIGHEST, id_bytes, text_id

from .claiming import Claiming
from .sql.approvals import COLUMNS

OVERDUE = (
    "SELECT id FROM approvals WHERE state = 'pending' AND expires_at <= ? ORDER BY expires_at"
    " LIMIT ?"
)
APPROVED = (
    "SELECT a.tenant_id, a.message_id, a.id, a.rule, a.payload_sha256 FROM json_each(?1) j"
    " CROSS JOIN approvals a WHERE a.tenant_id = json_extract(j.value, '$[0]')"
    " AND a.message_id = json_extract(j.value, '$[1]') AND a.subscription = ?2"
    " AND a.state = 'approved'"
)


def approved_of(
    claim: Claiming, tasks: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[Approved, ...]]:
    """What people said yes to, by (tenant, message)."""
    marks = msgspec.json.encode(tasks).decode()
    found: dict[tuple[str, str], tuple[Approved, ...]] = {}
    for tenant, message, blob, rule, digest in claim.conn.execute(
        APPROVED, (marks, claim.sub.name)
    ):
        yes = Approved(id=text_id(blob), rule=rule, payload_sha256=digest)
        found[(tenant, message)] = (*found.get((tenant, message), ()), yes)
    return found


def listed(
    conn: sqlite3.Connection, where: ApprovalFilter, limit: int, after: str | None
) -> list[Approval]:
    """Oldest first."""
    found = conn.execute(
        f"SELECT {COLUMNS} FROM approvals WHERE (?2 IS NULL OR id > ?2)"
        " AND (?3 IS NULL OR state = ?3) AND (?4 IS NULL OR queue_name = ?4)"
        " AND (?5 IS NULL OR rule = ?5) AND (?6 IS NULL OR tenant_id = ?6)"
        " ORDER BY id LIMIT ?1",
        (
            limit,
            None if after is None else id_bytes(after),
            where.state,
            where.queue,
            where.rule,
            where.tenant_id,
        ),
    )
    return [of_row(row) for row in found]


def named(conn: sqlite3.Connection, name: str, tenant_id: str | None, limit: int) -> list[Approval]:
    """By approval id or message id; if none is called so, those whose id begins so."""
    head = f"SELECT {COLUMNS} FROM approvals WHERE (?2 IS NULL OR tenant_id = ?2)"
    tail = " ORDER BY id DESC LIMIT ?3"
    exact = conn.execute(
        f"{head} AND (id = ?1 OR message_id = ?4){tail}", (id_bytes(name), tenant_id, limit, name)
    ).fetchall()
    if exact:
        return [of_row(row) for row in exact]
    digits = name.replace("-", "").upper()
    found = conn.execute(
        f"{head} AND (message_id BETWEEN ?1 AND ?4 OR hex(id) BETWEEN ?5 AND ?6){tail}",
        (name, tenant_id, limit, name + HIGHEST, digits, digits + "G"),
    )
    return [of_row(row) for row in found]
