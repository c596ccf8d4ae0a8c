"""What operators see of replies and may do to them. Every act is one transaction, and an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .errors import AckboneError, Conflict, NotFound
from .records import Record


class DeliveryRecord(Record, frozen=True, kw_only=True):
    """A reply, whole."""

    id: str
    tenant_id: str
    subscription: str | None
    task_id: str | None
    channel: str
    recipient: str
    content: str
    conversation: str | None
    priority: int
    status: str
    retry_count: int
    max_retries: int
    calls: int
    """How often it was sent, or tried."""
    resent: int
    """How often it was sent although it may have arrived."""
    in_doubt: bool
    """It may have arrived."""
    receipts: tuple[str, ...]
    options: Mapping[str, Any]
    due_at_us: int
    created_at_us: int
    expires_at_us: int | None
    last_attempt_at_us: int | None
    last_error: str | None


class DeliveryFilter(Record, frozen=True, kw_only=True):
    """Which replies; None: any."""

    status: str | None = None
    channel: str | None = None
    tenant_id: str | None = None
    since_us: int | None = None
    """Made then or later."""


class DeliveryRecords(Protocol):
    """Looking."""

    async def deliveries(self, where: DeliveryFilter, *, limit: int) -> Sequence[DeliveryRecord]:
        """Newest first."""
        ...

    async def delivery_ids(self, where: DeliveryFilter, *, limit: int | None) -> Sequence[str]:
        """Oldest first."""
        ...

    async def deliveries_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[DeliveryRecord]:
        """By id, or by how it begins; the exact one alone, if there is one."""
        ...

    async def paused_channels(self) -> frozenset[str]: ...


class DeliveryActs(Protocol):
    """Acting. What is being sent at the moment is left alone: a Conflict."""

    async def retry_deliveries(self, ids: Sequence[str]) -> Sequence[AckboneError | None]:
        """Those that failed, wait or are unknown are due now, with all their attempts, and do not
        expire any more; an unknown one may be repeated once. One answer per item."""
        ...

    async def edit_delivery(self, delivery_id: str, *, content: str) -> None:
        """Raises NotFound, or Conflict for what is sent, discarded, or has arrived in part."""
        ...

    async def discard_deliveries(
        self, ids: Sequence[str], *, reason: str
    ) -> Sequence[AckboneError | None]:
        """They are not sent; they are kept like those that were."""
        ...

    async def pause_channel(self, channel: str) -> bool:
        """Nothing more is taken for it. False: it was paused before."""
        ...

    async def unpause_channel(self, channel: str) -> bool: ...


def refusal(delivery_id: str, state: tuple[str, bool] | None, verb: str) -> AckboneError:
    """Why a reply in this state (its status, and whether parts of it arrived) is left alone."""
    if state is None:
        return NotFound(f"there is no reply {delivery_id}")
    status, in_parts = state
    if status == "sending":
        why = "it is being sent at the moment"
    elif status == "queued":
        why = "it stands behind an earlier reply of its conversation"
    elif status in ("sent", "discarded"):
        why = f"it was {status}"
    elif in_parts:
        why = "parts of it have arrived"
    else:
        why = f"it is {status}"
    return Conflict(f"reply {delivery_id} cannot be {verb}: {why}")
