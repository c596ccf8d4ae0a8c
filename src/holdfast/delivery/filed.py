"""A reply in its file: what is read from it, and what an attempt changes in it. Nothing here reads
or writes.

The nine fields mean what they mean to `DeliveryRunner`, and so do those that appear when they say
something. `sending_since` stays behind where nobody knows whether a reply arrived. What the nine
do not hold stands in keys after them (`Details`), and is left out where it says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.core.delivery import LONGEST_RECIPIENT, New, Outbound, Status
from holdfast.core.errors import InvalidMessage
from holdfast.core.message import DEFAULT_TENANT
from holdfast.core.parcels import SENDER_DIED, Ending, Parcel, lane_of
from holdfast.core.text import storable

from .queued import QueuedDelivery, check_number
from .waits import due_at

LONGEST_ID = 200
"""Bytes: a file's name has room for no more."""


class Details(msgspec.Struct, omit_defaults=True):
    """Keys after the nine. A file that has none of them is a reply like any other."""

    tenant_id: str = DEFAULT_TENANT
    conversation: str | None = None
    task_id: str | None = None
    options: dict[str, Any] = {}
    receipts: tuple[str, ...] = ()
    calls: int = 0
    """How often it was sent, or tried."""
    expires_at: float | None = None
    wait_s: float | None = None
    """After its last attempt; None: by the table of waits."""
    status: str = ""
    """`unknown` in `failed/`: it may have arrived, and waits for a person. In the folder: a person
    wants it sent again, and it still may have arrived."""
    repeat_agreed: bool = False
    """A person wants it sent although it may have arrived: once."""


_KEYS = Details.__struct_fields__


@dataclass(slots=True)
class Filed:
    """One file, as it was read."""

    delivery: QueuedDelivery
    details: Details

    @property
    def order(self) -> tuple[float, str]:
        """Where it stands in its conversation."""
        return self.delivery.created_at, self.delivery.id

    @property
    def is_cut_off(self) -> bool:
        """Somebody was sending it, and did not write down what became of it."""
        settled = self.details.status == Status.UNKNOWN  # and a person wants it sent again
        return not settled and self.delivery.sending_since > self.delivery.last_attempt_at

    @property
    def due_us(self) -> int:
        """When it may be tried; a moment long ago, if it never was."""
        delivery, wait_s = self.delivery, self.details.wait_s
        if delivery.retry_count == 0 or wait_s is None:
            return to_us(due_at(delivery))
        due = to_us(delivery.last_attempt_at) + to_us(wait_s) if wait_s else 0
        return max(to_us(delivery.not_before), due)

    def parcel(self) -> Parcel:
        """As one looks at it before it is taken."""
        delivery, details = self.delivery, self.details
        reply = Outbound(
            id=delivery.id,
            tenant_id=details.tenant_id,
            channel=delivery.channel,
            recipient=delivery.recipient,
            content="",
            conversation=details.conversation,
            task_id=details.task_id,
            priority=delivery.priority,
            expires_us=None if details.expires_at is None else to_us(details.expires_at),
            options=details.options,
            call=details.calls + 1,
            retry_count=delivery.retry_count,
            max_retries=delivery.max_retries,
            in_doubt=delivery.sending_since > 0,
            repeat_agreed=details.repeat_agreed and delivery.sending_since > 0,
            made_us=to_us(delivery.created_at),
        )
        lane = lane_of(
            details.tenant_id,
            delivery.channel,
            delivery.recipient,
            details.conversation,
            delivery.priority,
        )
        return Parcel(reply, "", lane, True)

    def reply(self) -> Outbound:
        """As it is sent."""
        found = self.parcel().reply
        return msgspec.structs.replace(
            found, content=self.delivery.content, receipts=self.details.receipts
        )

    def begin(self, now_us: int) -> None:
        """An attempt begins. Of one in doubt it is a repeat until its end shows that it is none."""
        delivery, details = self.delivery, self.details
        delivery.resent += delivery.sending_since > 0
        # Later than the last one, whatever the clock says: a start must see that it was cut off.
        delivery.sending_since = max(now_us, to_us(delivery.last_attempt_at) + 1) / 1e6
        details.calls += 1
        details.status = ""

    def end(self, ending: Ending, *, was_in_doubt: bool, now_us: int) -> None:
        """It has ended, and is kept: it waits, or was given up."""
        delivery, details = self.delivery, self.details
        delivery.last_attempt_at = max(now_us, to_us(delivery.sending_since)) / 1e6
        before = delivery.retry_count
        delivery.retry_count = 0 if ending.retries is None else before + ending.retries
        delivery.resent = max(0, delivery.resent - was_in_doubt + ending.resent)
        if ending.error is not None:
            delivery.last_error = ending.error
        if not (was_in_doubt if ending.in_doubt is None else ending.in_doubt):
            delivery.sending_since = 0.0
        if ending.in_doubt is not None:
            details.repeat_agreed = False  # that was for the doubt before this one
        wait_us = ending.wait_us or 0
        delivery.not_before, details.wait_s = 0.0, None
        if ending.retries:
            details.wait_s = wait_us / 1e6
        elif not ending.is_end:  # that costs no retry, so it is no wait of the table
            delivery.not_before = (now_us + wait_us) / 1e6 if wait_us else 0.0
            details.wait_s = 0.0 if delivery.retry_count else None
        if ending.receipt is not None:
            details.receipts = (*details.receipts, ending.receipt)
        if ending.is_end:
            details.expires_at = None  # whoever wants it sent all the same wants it sent
        details.status = Status.UNKNOWN if ending.status is Status.UNKNOWN else ""

    def cut_off(self) -> None:
        """Its sender died in the middle of an attempt. It is due, in doubt."""
        delivery, details = self.delivery, self.details
        delivery.last_attempt_at = delivery.sending_since
        delivery.last_error = SENDER_DIED
        delivery.not_before = 0.0
        details.wait_s = 0.0 if delivery.retry_count else None
        details.repeat_agreed = False
        self._keep_details()

    def retry(self) -> None:
        """A person wants it sent now, with all its attempts before it."""
        delivery, details = self.delivery, self.details
        was_held = details.status == Status.UNKNOWN and delivery.last_attempt_at > 0
        details.repeat_agreed = details.repeat_agreed or was_held
        details.status = Status.UNKNOWN if delivery.sending_since > 0 else ""
        delivery.retry_count, delivery.last_attempt_at, delivery.not_before = 0, 0.0, 0.0
        details.wait_s = details.expires_at = None
        self._keep_details()

    def fail(self, error: str) -> None:
        """It is given up without an attempt."""
        self.delivery.last_error = error
        self.details.expires_at = None

    def to_bytes(self) -> bytes:
        """Its file."""
        self._keep_details()
        return self.delivery.to_bytes()

    def _keep_details(self) -> None:
        own = {name: each for name, each in self.delivery.extra.items() if name not in _KEYS}
        self.delivery.extra = {**msgspec.to_builtins(self.details), **own}


def filed(delivery: QueuedDelivery) -> Filed:
    """Raises ValueError for a key that is not what it should be."""
    known = {name: delivery.extra[name] for name in _KEYS if name in delivery.extra}
    details = msgspec.convert(known, Details) if known else Details()
    for name, value in (("expires_at", details.expires_at), ("wait_s", details.wait_s)):
        if value is not None:
            check_number(name, value)
    return Filed(delivery, details)


def filed_new(new: New, now_us: int) -> Filed:
    """A reply to be put into a folder. Raises InvalidMessage for one that no file can hold."""
    details = Details(
        tenant_id=new.tenant_id,
        conversation=new.conversation,
        options=dict(new.options),
        expires_at=None if new.expires_s is None else (now_us + int(new.expires_s * 1e6)) / 1e6,
    )
    delivery = QueuedDelivery(
        id=check_id(new.id),
        channel=new.channel,
        recipient=storable(new.recipient)[:LONGEST_RECIPIENT],
        content=_text(new.content),
        created_at=now_us / 1e6,
        max_retries=new.max_retries,
        priority=int(new.priority),
    )
    return Filed(delivery, details)


def filed_again(reply: Outbound, channel: str, now_us: int) -> Filed:
    """A reply that another queue hands on, with what that one knows of it."""
    new = New(
        id=reply.id,
        tenant_id=reply.tenant_id,
        channel=channel,
        recipient=reply.recipient,
        content=reply.content,
        conversation=reply.conversation,
        priority=reply.priority,
        options=reply.options,
    )
    found = filed_new(new, now_us)
    found.details.task_id = reply.task_id
    if reply.expires_us is not None:
        found.details.expires_at = reply.expires_us / 1e6
    if reply.in_doubt:
        found.delivery.sending_since = found.delivery.created_at
    return found


def check_id(delivery_id: str) -> str:
    """An id that can be a file's name. Raises InvalidMessage."""
    size = len(delivery_id.encode("utf-8", "replace"))
    is_name = delivery_id.isprintable() and "/" not in delivery_id and delivery_id[:1] != "."
    if not is_name or not 0 < size <= LONGEST_ID:
        raise InvalidMessage(
            f"{delivery_id!r:.60} cannot be a file's name: an id has 1 to {LONGEST_ID} printable"
            " characters, no slash, and no dot in front"
        )
    return delivery_id


def to_us(seconds: float) -> int:
    return round(seconds * 1e6)


def _text(content: str) -> str:
    return content.encode("utf-8", "backslashreplace").decode()
