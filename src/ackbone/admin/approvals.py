"""Approvals: list, read, approve, reject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ackbone.core.approvals import Answers, Approval, ApprovalFilter, ApprovalRecords
from ackbone.core.errors import InvalidMessage
from ackbone.core.records import Records, Task

from .bodies import Reading, read_body
from .naming import Desk, check_length, check_typed, the_one

LONGEST_NAME = 255


class Looking(Records, ApprovalRecords, Protocol):
    """Records with approvals."""


class Approvals(Desk[Looking, Answers]):
    """Actions on approvals."""

    async def list(
        self, where: ApprovalFilter, *, limit: int, after: str | None = None
    ) -> Sequence[Approval]:
        """Return approvals, oldest first."""
        return await self._records.approvals(where, limit=limit, after=after)

    async def find(self, name: str, *, tenant_id: str | None = None) -> Approval:
        """Find by approval id, message id, or the beginning of either."""
        name = check_typed(name)
        found = await self._records.approvals_named(name, tenant_id=tenant_id, limit=20)
        if any(name not in (each.id, each.message_id) for each in found):
            check_length(name)
        if len(found) > 1 and len({each.message_id for each in found}) == 1:
            # Several approvals of one message: take the pending one, else the latest.
            found = [each for each in found if each.is_pending] or found[:1]
        return the_one(
            found,
            name=name,
            what="approval",
            describe=lambda each: (
                f"{each.id}  {each.message_id}  {each.rule}  {each.tenant_id}  {each.state}"
            ),
            hint="; list them with 'ackbone approvals list'",
        )

    async def message(self, approval: Approval) -> tuple[Task | None, Reading]:
        """Return the task and the message of an approval, if they are still kept."""
        tasks = await self._records.tasks(approval.tenant_id, approval.message_id)
        task = next((each for each in tasks if each.subscription == approval.subscription), None)
        if task is None:
            return None, Reading(problem="its message is no longer kept")
        return task, read_body(task, self._codec_of(task.queue))

    async def approve(self, approval: Approval, *, by: str, note: str = "") -> Approval:
        """Approve. If two people must approve, it is still pending after the first."""
        return await self._acting.approve(approval.id, by=_who(by), note=note)

    async def reject(self, approval: Approval, *, by: str, note: str = "") -> Approval:
        """Reject. The message ends as rejected."""
        return await self._acting.reject(approval.id, by=_who(by), note=note)


def _who(name: str) -> str:
    """Return the name of the person who answers, checked."""
    name = " ".join(name.split())
    if not name or len(name) > LONGEST_NAME:
        raise InvalidMessage(f"an answer needs a name of 1 to {LONGEST_NAME} characters (--by)")
    return name
