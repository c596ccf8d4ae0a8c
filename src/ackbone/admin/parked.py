"""Parked messages: find, read, resume, discard."""

from __future__ import annotations

from collections.abc import Sequence

from ackbone.core.errors import Conflict
from ackbone.core.outcome import Status
from ackbone.core.records import Effect, EffectWord, Identity, Operations, Records, Task

from .bodies import Reading, read_body
from .naming import Desk, check_length, check_typed, the_one


class Parked(Desk[Records, Operations]):
    """Actions on parked messages."""

    async def find(self, name: str, *, tenant_id: str | None = None) -> Task:
        """Find by message id or its beginning."""
        name = check_typed(name)
        exact = await self._records.tasks(tenant_id, name)
        found = [task for task in exact if task.status == Status.PARKED]
        if exact and not found:
            raise Conflict(f"message {name} is not parked: it is {exact[0].status}")
        return the_one(
            found or await self._by_prefix(name, tenant_id),
            name=name,
            what="parked message",
            describe=lambda each: (
                f"{each.message_id}  {each.queue}  {each.tenant_id}  {each.parked_kind}"
            ),
            hint="; list them with 'ackbone parked list'",
        )

    async def _by_prefix(self, name: str, tenant_id: str | None) -> list[Task]:
        check_length(name)
        found = await self._records.tasks_like(
            name, tenant_id=tenant_id, status=Status.PARKED, limit=20
        )
        if len(found) != 1:
            return list(found)
        whole = await self._records.tasks(found[0].tenant_id, found[0].message_id)
        return [task for task in whole if task.status == Status.PARKED]

    def read(self, task: Task) -> Reading:
        """Return the parked message, or why it cannot be read."""
        return read_body(task, self._codec_of(task.queue))

    async def effects(self, task: Task) -> Sequence[Effect]:
        """Return the outside effects that the message has begun."""
        return await self._records.effects_of(task.tenant_id, task.message_id)

    async def resume(self, task: Task, *, effects: Sequence[EffectWord] = ()) -> None:
        """Let the message run as soon as a worker is free."""
        await self._acting.resume(_identity(task), effects=effects)

    async def discard(self, task: Task, *, reason: str) -> None:
        """End the message as discarded."""
        await self._acting.discard_parked(_identity(task), reason=reason)


def _identity(task: Task) -> Identity:
    return Identity(
        tenant_id=task.tenant_id, subscription=task.subscription, message_id=task.message_id
    )
