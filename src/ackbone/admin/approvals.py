"""Approvals: list, read, say yes or no."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ackbone.core.approvals import Answers, Approval, ApprovalFilter, ApprovalRecords
from ackbone.core.errors import InvalidMessage
from ackbone.core.records import Records, Task

from .bodies import Reading, read_body
from .naming import SHORTEST, check_typed, the_one

LONGEST_NAME = 255


class Looking(Records, ApprovalRecords, Protocol):
    """Records that know of approvals."""


class Approvals:
    """The use cases. `answers` is needed for answering only."""

    def __init__(
        self,
        records: Looking,
        answers: Answers | None = None,
        *,
        codec_of: Callable[[str], str] = lambda queue: "standard",
    ) -> None:
        self._records = records
        self._answers = answers
        self._codec_of = codec_of

    async def list(
        self, where: ApprovalFilter, *, limit: int, after: str | None = None
    ) -> Sequence[Approval]:
        """The oldest first: who waits longest."""
        return await self._records.approvals(where, limit=limit, after=after)

    async def find(self, name: str, *, tenant_id: str | None = None) -> Approval:
        """By approval id, message id, or a beginning that only one of them has."""
        name = check_typed(name)
        found = await self._records.approvals_named(name, tenant_id=tenant_id, limit=20)
        if len(name) < SHORTEST and any(name not in (each.id, each.message_id) for each in found):
            raise InvalidMessage(f"{name!r} is too short: write at least {SHORTEST} characters")
        if len(found) > 1 and len({each.message_id for each in found}) == 1:
            # One message, asked about again: its open question is meant, or its latest.
            found = [each for each in found if each.is_pending] or found[:1]
        return the_one(
            found,
            name=name,
            what="approval",
            describe=lambda each: (
                f"{each.id}  {each.message_id}  {each.rule}  {each.tenant_id}  {each.state}"
            ),
            hint="; 'ackbone approvals list' shows what waits",
        )

    async def message(self, approval: Approval) -> tuple[Task | None, Reading]:
        """The message that it is about, if it is still kept."""
        tasks = await self._records.tasks(approval.tenant_id, approval.message_id)
        task = next((each for each in tasks if each.subscription == approval.subscription), None)
        if task is None:
            return None, Reading(problem="its message is not kept any more")
        reading = read_body(
            task.body,
            task.body_info,
            message_id=task.message_id,
            queue=task.queue,
            intact=task.intact,
            codec=self._codec_of(task.queue),
        )
        return task, reading

    async def approve(self, approval: Approval, *, by: str, note: str = "") -> Approval:
        """Yes. With four eyes the first of two: then it is still pending."""
        return await self._acting.approve(approval.id, by=_who(by), note=note)

    async def reject(self, approval: Approval, *, by: str, note: str = "") -> Approval:
        """No: the message ends here, for good."""
        return await self._acting.reject(approval.id, by=_who(by), note=note)

    @property
    def _acting(self) -> Answers:
        if self._answers is None:
            raise RuntimeError("these approvals can only be looked at")
        return self._answers


def _who(name: str) -> str:
    """Whose answer it is: no name, no answer."""
    name = " ".join(name.split())
    if not name or len(name) > LONGEST_NAME:
        raise InvalidMessage(f"whose answer is it? Give a name of 1 to {LONGEST_NAME} characters")
    return name
