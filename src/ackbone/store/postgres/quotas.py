"""`quotas` on PostgreSQL. The rows are locked in order, after tasks and keys, before the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ackbone.store.quota_book import COLUMNS
from ackbone.store.tables import QuotaName

from . import arrays
from .arrays import moment, us

if TYPE_CHECKING:
    from .database import Tx

_SEEN = (
    f"q.window_us, {us('q.window_start')}, q.runs, q.llm_calls, q.tokens, q.cost,"
    f" {us('q.deferred_until')}, q.deferred"
)
_MAKE = (
    "INSERT INTO quotas (tenant_id, name, window_us, window_start)"
    " SELECT u.tenant, u.name, 0, timestamptz 'epoch' FROM unnest($1::text[], $2::text[])"
    " u(tenant, name) ON CONFLICT (tenant_id, name) DO NOTHING"
)
"""Sorted. A window of no length belongs to no quota: the next look starts a new one."""
_READ = (
    f"SELECT q.tenant_id, q.name, {_SEEN} FROM unnest($1::text[], $2::text[]) u(tenant, name)"
    " JOIN quotas q ON q.tenant_id = u.tenant AND q.name = u.name FOR UPDATE OF q"
)
_WRITE = (
    f"UPDATE quotas q SET ({COLUMNS}) = (u.window_us, {moment('u.start')}, u.runs, u.llm_calls,"
    f" u.tokens, u.cost, {moment('u.until')}, u.deferred)"
    " FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],"
    " $7::bigint[], $8::float8[], $9::bigint[], $10::bigint[]) u(tenant, name, window_us, start,"
    " runs, llm_calls, tokens, cost, until, deferred)"
    " WHERE q.tenant_id = u.tenant AND q.name = u.name"
)


class PostgresQuotaRows:
    """`QuotaRows` in one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    async def lock(self, names: Sequence[QuotaName]) -> Mapping[QuotaName, Sequence[Any]]:
        columns = [arrays.texts([name[n] for name in names]) for n in range(2)]
        await self._tx.send_locking()  # keys come before quotas, in a finish, too
        await self._tx.send(_MAKE, *columns)
        rows = await self._tx.rows(_READ, *columns)
        return {(tenant_id, name): row for tenant_id, name, *row in rows if row[0]}

    def write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        columns = list(zip(*rows, strict=True))
        self._tx.at_end(
            _WRITE,
            arrays.texts(columns[0]),
            arrays.texts(columns[1]),
            *(arrays.numbers(column) for column in columns[2:]),
        )
