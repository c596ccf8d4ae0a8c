"""A relay that makes the partitions of the months to come."""

from __future__ import annotations

import logging

from ackbone.core.errors import StoreError
from ackbone.core.store import Worker
from ackbone.store.unit import Change

from .database import Tx
from .partitions import MONTHS, statements
from .store import Operation, PostgresStore

log = logging.getLogger("ackbone.store")


class Months:
    """One step makes what is missing. Run it under the role `retention`."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def step(self, worker: Worker) -> int:
        """Returns how many partitions were made. Until there is one, the default catches events."""
        made = 0
        for name, begin, end in await self._store.read(MONTHS):
            try:
                await self._store.write(_maker(name, begin, end), worker_id=worker.worker_id)
                made += 1
            except StoreError as error:
                log.warning("event_log has no partition %s yet: %s", name, error)
        return made


def _maker(name: str, begin: str, end: str) -> Operation[None]:
    async def op(tx: Tx, change: Change) -> None:
        await tx.send("SET LOCAL lock_timeout = '2s'")
        for statement in statements(name, begin, end):
            await tx.send(statement)

    return op
