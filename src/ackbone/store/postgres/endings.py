"""How messages ended: their final events, and the failed attempts that their letters tell of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ackbone.core.endings import Ending, Identity
from ackbone.store.ending import FINAL_EVENTS, ending

from . import arrays
from .store import PostgresStore

_FINAL = (
    "SELECT e.tenant_id, e.task_id, e.event_type, e.data::text, (SELECT d.history::text"
    " FROM dead_letters d WHERE d.tenant_id = e.tenant_id AND d.message_id = e.task_id"
    " AND d.subscription = e.subscription ORDER BY d.failed_at DESC LIMIT 1)"
    " FROM unnest($2::text[], $3::text[]) u(tenant, task) JOIN event_log e"
    " ON e.tenant_id = u.tenant AND e.task_id = u.task WHERE e.subscription = $1"
    " AND e.event_type = ANY($4::text[])"
)


class PostgresEndings:
    """`Endings` of a store that is open."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def __call__(
        self, subscription: str, identities: Sequence[Identity]
    ) -> Mapping[Identity, Ending]:
        if not identities:
            return {}
        rows = await self._store.read(
            _FINAL,
            subscription,
            arrays.texts([tenant_id for tenant_id, _ in identities]),
            arrays.texts([task_id for _, task_id in identities]),
            arrays.texts(FINAL_EVENTS),
        )
        return {(tenant_id, task_id): ending(*event) for tenant_id, task_id, *event in rows}
