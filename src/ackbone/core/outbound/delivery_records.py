"""Deliveries as operators see them, and what operators may do to them.

Every operation is one transaction and one event for each delivery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ackbone.core.errors import AckboneError, Conflict, NotFound
from ackbone.core.records import Record


class DeliveryRecord(Record, frozen=True, kw_only=True):
    """A delivery with all its columns."""

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
    """Number of attempts."""
    resent: int
    """Number of times it was sent although it may have arrived."""
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
    """A choice of deliveries; None matches any."""

    status: str | None = None
    channel: str | None = None
    tenant_id: str | None = None
    since_us: int | None = None
    """Created at this time or later."""


class DeliveryRecords(Protocol):
    """Reading deliveries."""

    async def deliveries(self, where: DeliveryFilter, *, limit: int) -> Sequence[DeliveryRecord]:
        """Return deliveries, the newest first."""

    async def delivery_ids(self, where: DeliveryFilter, *, limit: int | None) -> Sequence[str]:
        """Return ids, the oldest first."""

    async def deliveries_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[DeliveryRecord]:
        """Return the delivery with this id, or else those whose ids begin with it."""

    async def paused_channels(self) -> frozenset[str]: ...


class DeliveryActs(Protocol):
    """Changing deliveries. One that is being sent at the moment is refused with Conflict."""

    async def retry_deliveries(self, ids: Sequence[str]) -> Sequence[AckboneError | None]:
        """Make failed, waiting and unknown deliveries due now, with all their attempts and without
        expiry; an unknown one may be repeated once. Returns one answer per delivery."""

    async def edit_delivery(self, delivery_id: str, *, content: str) -> None:
        """Change a text. Raises NotFound, or Conflict if parts were sent or it was discarded."""

    async def discard_deliveries(
        self, ids: Sequence[str], *, reason: str
    ) -> Sequence[AckboneError | None]:
        """Do not send these deliveries. They are kept as long as sent ones."""

    async def pause_channel(self, channel: str) -> bool:
        """Stop sending by a channel. Returns False if it was paused already."""

    async def unpause_channel(self, channel: str) -> bool: ...


def refusal(delivery_id: str, state: tuple[str, bool] | None, verb: str) -> AckboneError:
    """Return the error for a delivery in this state: its status, and whether parts arrived."""
    if state is None:
        return NotFound(f"there is no reply {delivery_id}")
    status, in_parts = state
    if status == "sending":
        why = "it is being sent at the moment"
    elif status == "queued":
        why = "it waits for an earlier reply of its conversation"
    elif status in ("sent", "discarded"):
        why = f"it was {status}"
    elif in_parts:
        why = "parts of it have arrived"
    else:
        why = f"it is {status}"
    return Conflict(f"reply {delivery_id} cannot be {verb}: {why}")
