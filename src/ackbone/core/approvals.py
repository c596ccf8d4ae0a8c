"""Approvals: questions to people, their answers, and the ports to read and to answer them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from .records import Record
from .store import Worker


class ApprovalState(StrEnum):
    """The state of a question."""

    PENDING = "pending"
    APPROVED = "approved"
    REJECTED = "rejected"
    EXPIRED = "expired"


class Approval(Record, frozen=True, kw_only=True):
    """A question to people about one message, and its answer."""

    id: str
    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    type: str | None
    payload_sha256: str
    """The answer holds only for this payload."""
    rule: str
    reason: str
    state: str
    four_eyes: bool
    asked_at_us: int
    expires_at_us: int
    first_by: str | None = None
    """With four eyes: the person whose approval waits for a second one."""
    first_at_us: int | None = None
    answered_by: str | None = None
    answered_at_us: int | None = None
    note: str | None = None

    @property
    def is_pending(self) -> bool:
        return self.state == ApprovalState.PENDING


class ApprovalFilter(Record, frozen=True, kw_only=True):
    """Conditions for approvals. None: any."""

    state: str | None = ApprovalState.PENDING
    queue: str | None = None
    rule: str | None = None
    tenant_id: str | None = None


class ApprovalRecords(Protocol):
    """Reading approvals."""

    async def approvals(
        self, where: ApprovalFilter, *, limit: int, after: str | None = None
    ) -> Sequence[Approval]:
        """Return approvals, oldest first. `after`: the last id of the last page."""

    async def approvals_named(
        self, name: str, *, tenant_id: str | None, limit: int
    ) -> Sequence[Approval]:
        """Return approvals by approval id or message id, else by a prefix, newest first."""


class Answers(Protocol):
    """Answering approvals. Each answer is one compare-and-set: the first one wins."""

    async def approve(self, approval_id: str, *, by: str, note: str = "") -> Approval:
        """Approve. The message becomes ready without using up an attempt. With four eyes, the first
        approval waits for a second one.

        Raises NotFound, or Conflict if somebody has already answered."""

    async def reject(self, approval_id: str, *, by: str, note: str = "") -> Approval:
        """Reject. The message ends as rejected. Raises as `approve` does."""


class GovernanceUpkeep(Protocol):
    """The work that relays do for governance."""

    async def has_overdue(self) -> bool:
        """Return True if a question was not answered in time."""

    async def expire(self, *, worker: Worker) -> int:
        """Reject questions that were not answered in time, some at a time. Returns how many."""

    async def quotas_changed(self) -> int:
        """Wake messages that wait for a quota, because the quotas have changed. Returns how
        many."""
