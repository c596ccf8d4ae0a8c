"""Copy dead letters that workers of other programs publish into the store, for operators."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs.values import named_tenant, short
from ackbone.core.errors import DecodeError
from ackbone.core.notices import LETTER_ID
from ackbone.core.store import Candidate, Claims, Worker
from ackbone.core.task_protocol import FlatDelivery, TaskBroker

from .broker_dead_letters import AT_ONCE, read_letters

log = logging.getLogger("ackbone.engine")

GROUP = "ackbone:letters"
REASON = "failed_elsewhere"
_TASK = ("task_id", "tool_name", "payload", "idempotency_key", "retry_count", "tenant_id")
_encode = msgspec.json.Encoder().encode


class ForeignDeadLetters:
    """Reads the dead-letter queue of one task queue. Entries stay there for other readers."""

    def __init__(
        self, store: Claims, broker: TaskBroker, tasks: Subscription, letters: str
    ) -> None:
        self._store = store
        self._broker = broker
        # Stored under the name of the dead-letter queue, so that no second notice is sent.
        self._kept_as = msgspec.structs.replace(tasks, name=letters)
        self._letters = Subscription(name=letters, queue=letters, group=GROUP)

    async def step(self, worker: Worker) -> None:
        async def keep(found: Sequence[Delivery]) -> None:
            foreign = [each for each in found if not _is_ours(each)]
            for tenant_id in {_tenant(each) for each in foreign}:
                of_tenant = [_candidate(each) for each in foreign if _tenant(each) == tenant_id]
                sub = msgspec.structs.replace(self._kept_as, tenant=tenant_id)
                await self._store.claim(sub, of_tenant, worker=worker)
            if foreign:
                log.warning(
                    "%d tasks of %s were given up by workers of other programs. They are dead"
                    " letters now: ackbone dlq list --reason %s",
                    len(foreign),
                    self._kept_as.queue,
                    REASON,
                )

        await read_letters(await self._broker.subscribe_beside(self._letters, room=AT_ONCE), keep)


def _is_ours(entry: Delivery) -> bool:
    return LETTER_ID in _fields(entry)


def _fields(entry: Delivery) -> Mapping[str, str]:
    """Return the fields of an entry. Empty if not all of them are text."""
    return entry.fields if isinstance(entry, FlatDelivery) else {}


def _tenant(entry: Delivery) -> str | None:
    try:
        return named_tenant(_fields(entry).get("tenant_id"))
    except DecodeError:
        return None


def _name(task_id: str) -> str:
    """Return the id. Empty if it cannot be the id of a message."""
    try:
        return short("task_id", task_id)
    except DecodeError:
        return ""


def _candidate(entry: Delivery) -> Candidate:
    """Return a candidate that cannot run. Its body is the task, so that it can be replayed."""
    fields = _fields(entry)
    error = DecodeError(fields.get("error") or "a worker of another program gave it up")
    task_id = _name(fields.get("task_id", ""))
    if not isinstance(entry, FlatDelivery) or not task_id:
        return Candidate(delivery=entry, message=None, error=error, codec="task", reason=REASON)
    task = {name: fields[name] for name in _TASK if name in fields}
    task.setdefault("idempotency_key", task_id)
    # A task may be given up twice. The entry's id tells the two apart.
    task["dead_letter_entry"] = entry.identity or ""
    delivery = msgspec.structs.replace(entry, body=_encode(task), fields=task, identity=task_id)
    return Candidate(delivery=delivery, message=None, error=error, codec="task", reason=REASON)
