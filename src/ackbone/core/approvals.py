"""Approvals as people see them: what was asked, who answered, and the ports to look and answer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from .records import Record
from .store import Worker


class ApprovalState(StrEnum):
    """Where a question stands."""

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
    """What the answer holds for."""
    rule: str
    reason: str
    state: str
    four_eyes: bool
    asked_at_us: int
    expires_at_us: int
    first_by: str | None = None
    """Four eyes: whose yes waits for a second one."""
    first_at_us: int | None = None
    answered_by: str | None = None
    answered_at_us: int | None = None
    note: str | None = None

    @property
    def is_pending(self) -> bool:
        return self.state == ApprovalState.PENDING


class ApprovalFilter(Record, frozen=True, kw_only=True):
    """Which approvals; None: any."""

    state: str | None = ApprovalState.PENDING
    queue: str | None = None
    rule: str | None = None
    tenant_id: str | None = None


class ApprovalRecords(Protocol):
    """Looking."""

    async def approvals(
        self, where: ApprovalFilter, *, limit: int, after: str | None = None
    ) -> Sequence[Approval]:
        """Oldest first: who waits longest is answered first. `after` is the last id seen."""
        ...

    async def approvals_named(
        self, name: str, *, tenant_id: str | None, limit: int
    ) -> Sequence[Approval]:
        """By approval id or message id, else those whose id begins so; the newest first."""
        ...


class Answers(Protocol):
    """Answering: one compare-and-set, the first answer wins."""

    async def approve(self, approval_id: str, *, by: str, note: str = "") -> Approval:
        """The message becomes ready, its attempt unchanged; or, with four eyes, waits for a second
        yes. Raises NotFound, or Conflict with who answered what and when."""
        ...

    async def reject(self, approval_id: str, *, by: str, note: str = "") -> Approval:
        """The message ends as rejected. Raises as `approve` does."""
        ...


class Clerk(Protocol):
    """What relays do for governance."""

    async def has_overdue(self) -> bool:
        """Is there a question that nobody answered in time?"""
        ...

    async def expire(self, *, worker: Worker) -> int:
        """Such questions are a no; some of them at a time. Returns how many were."""
        ...

    async def quotas_changed(self) -> int:
        """Other quotas are in force: what waits for one looks again. Returns how many do."""
        ...
