"""Final events of messages, for triggers that report how their copies ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ackbone.core.events import EVENT_OF_STATUS
from ackbone.core.outcome import Ending, Identity

from .unit import UnitOfWork

_STATUS_OF_EVENT = {event: status for status, event in EVENT_OF_STATUS.items()}
FINAL_EVENTS = tuple(_STATUS_OF_EVENT)
_decode = msgspec.json.Decoder().decode


class StoreEndings:
    """`Endings` of an open store."""

    def __init__(self, store: UnitOfWork) -> None:
        self._store = store
        self._sql = store.sql.records

    async def __call__(
        self, subscription: str, identities: Sequence[Identity]
    ) -> Mapping[Identity, Ending]:
        if not identities:
            return {}
        found = await self._store.read(
            self._sql.final_events,
            subscription,
            [tenant_id for tenant_id, _ in identities],
            [task_id for _, task_id in identities],
        )
        return {(tenant_id, task_id): _ending(*event) for tenant_id, task_id, *event in found}


def _ending(event_type: str, data: str, history: str | None) -> Ending:
    """`history` lists the failed attempts of the dead letter, if there is one. Tracebacks are left
    out: they stay in the store."""
    attempts = _decode(history) if history else ()
    return Ending(
        status=_STATUS_OF_EVENT[event_type],
        data=_decode(data),
        history=[{k: v for k, v in each.items() if k != "traceback"} for each in attempts],
    )
