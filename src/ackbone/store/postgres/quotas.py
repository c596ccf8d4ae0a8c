"""Quotas: counted in the transactions of claim and finish, one row for each tenant and rule.

The rows are locked, in order, from the look to the commit: two claims at once cannot both take the
last unit. They come after tasks and keys, before the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ackbone.core.quota import WAITS_FOR
from ackbone.core.store import Finished, QuotasOf, Run
from ackbone.store.quota_book import COLUMNS, QuotaBook

from . import arrays
from .arrays import moment
from .database import Tx
from .tasks import BEGUN
from .views import us

_SEEN = (
    f"q.window_us, {us('q.window_start')}, q.runs, q.llm_calls, q.tokens, q.cost,"
    f" {us('q.deferred_until')}, q.deferred"
)
_MAKE = (
    "INSERT INTO quotas (tenant_id, name, window_us, window_start)"
    " SELECT u.tenant, u.name, 0, timestamptz 'epoch' FROM unnest($1::text[], $2::text[])"
    " u(tenant, name) ON CONFLICT (tenant_id, name) DO NOTHING"
)
"""Sorted. A window of no length is nobody's: it is turned over at once."""
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
LOOK_AGAIN = (
    f"UPDATE queue_executions SET due_at = {BEGUN} WHERE status = 'ready'"
    f" AND due_at > {BEGUN} AND starts_with(error_message, '{WAITS_FOR}') RETURNING 1"
)
FORGET_WAITS = "UPDATE quotas SET deferred_until = NULL, deferred = 0"
USE = (
    f"SELECT q.tenant_id, q.name, {us('q.window_start')}, q.window_us, q.runs, q.llm_calls,"
    " q.tokens, q.cost, (SELECT count(*) FROM queue_executions t WHERE t.status = 'ready'"
    f" AND t.tenant_id = q.tenant_id AND t.error_message = '{WAITS_FOR}' || q.name)"
    " FROM quotas q WHERE q.window_us > 0 AND ($1::text IS NULL OR q.tenant_id = $1)"
    " ORDER BY q.tenant_id, q.name"
)


class PostgresQuotaBook(QuotaBook):
    """`open_for` before it is asked, `close` when all is counted."""

    def __init__(self, tx: Tx, now_us: int, quotas_of: QuotasOf | None = None) -> None:
        super().__init__(now_us, quotas_of)
        self._tx = tx
        self._rows: dict[tuple[str, str], Sequence[Any]] = {}

    async def open_for(self, runs: Iterable[Run]) -> None:
        """Lock the rows of everything that these runs are, or were, counted under."""
        wanted = sorted(
            {
                (run.message.tenant_id, quota.name)
                for run in runs
                for quota in (run.quotas or self.asked(run))
            }
        )
        if not wanted:
            return
        columns = [arrays.texts([key[n] for key in wanted]) for n in range(2)]
        await self._tx.send_locking()  # keys come before quotas, in a finish, too
        await self._tx.send(_MAKE, *columns)
        for tenant_id, name, *row in await self._tx.rows(_READ, *columns):
            if row[0]:
                self._rows[(tenant_id, name)] = row

    def find(self, tenant_id: str, name: str) -> Sequence[Any] | None:
        return self._rows.get((tenant_id, name))

    def close(self) -> None:
        """Write what has changed, with the commit."""
        rows = self.taken()
        if rows:
            columns = list(zip(*rows, strict=True))
            self._tx.at_end(
                _WRITE,
                arrays.texts(columns[0]),
                arrays.texts(columns[1]),
                *(arrays.numbers(column) for column in columns[2:]),
            )


async def correct(tx: Tx, items: Sequence[Finished], now_us: int) -> None:
    """What ended runs really used."""
    book = PostgresQuotaBook(tx, now_us)
    await book.open_for(item.run for item in items)
    book.correct(items)
    book.close()
