"""Approvals as claims and people look at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ackbone.core.approvals import Approval, ApprovalFilter
from ackbone.core.store import Approved
from ackbone.store.approvals import of_row

from . import arrays
from .database import Tx
from .sql.approvals import COLUMNS
from .tasks import NOW

if TYPE_CHECKING:
    from .store import PostgresStore

OVERDUE = f"SELECT 1 FROM approvals WHERE state = 'pending' AND expires_at <= {NOW} LIMIT 1"
_APPROVED = (
    "SELECT a.tenant_id, a.message_id, a.id::text, a.rule, a.payload_sha256"
    " FROM unnest($2::text[], $3::text[]) u(tenant, message) JOIN approvals a"
    " ON a.tenant_id = u.tenant AND a.message_id = u.message AND a.subscription = $1"
    " WHERE a.state = 'approved'"
)


async def approved_of(
    tx: Tx, subscription: str, tasks: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[Approved, ...]]:
    """What people said yes to, by (tenant, message)."""
    found: dict[tuple[str, str], tuple[Approved, ...]] = {}
    for tenant, message, approval_id, rule, digest in await tx.rows(
        _APPROVED,
        subscription,
        arrays.texts([tenant for tenant, _ in tasks]),
        arrays.texts([message for _, message in tasks]),
    ):
        yes = Approved(id=approval_id, rule=rule, payload_sha256=digest)
        found[(tenant, message)] = (*found.get((tenant, message), ()), yes)
    return found


async def listed(
    store: PostgresStore, where: ApprovalFilter, limit: int, after: str | None
) -> list[Approval]:
    """Oldest first."""
    found = await store.read(
        f"SELECT {COLUMNS} FROM approvals WHERE ($2::text IS NULL OR id > $2::uuid)"
        " AND ($3::text IS NULL OR state = $3) AND ($4::text IS NULL OR queue_name = $4)"
        " AND ($5::text IS NULL OR rule = $5) AND ($6::text IS NULL OR tenant_id = $6)"
        " ORDER BY id LIMIT $1::int",
        str(limit),
        after,
        where.state,
        where.queue,
        where.rule,
        where.tenant_id,
    )
    return [of_row(row) for row in found]
