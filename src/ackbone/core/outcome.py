"""Outcomes: what a run led to, as values, and the states that a task goes through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec


class Status(StrEnum):
    """The states of a task (column `status` of `queue_executions`).

    docs/ARCHITECTURE.md shows which state follows which.
    """

    OPEN = "open"
    """No worker runs it, and only the broker has its body. It runs when its copy comes again."""
    RUNNING = "running"
    """A worker has claimed it."""
    READY = "ready"
    """The store has the whole message. A worker may claim it once it is due."""
    QUEUED = "queued"
    """It waits behind an earlier message of the same conversation."""
    WAITING_KEY = "waiting_key"
    """It waits for another message with the same idempotency key to end."""
    PARKED = "parked"
    """It is set aside until something or someone resumes it."""
    SUCCEEDED = "succeeded"
    """Final: the handler returned."""
    FAILED = "failed"
    """Final: it is a dead letter."""
    REJECTED = "rejected"
    """Final: governance, or a person who was asked, said no."""
    EXPIRED = "expired"
    """Final: its time to live was over before it could run."""
    DISCARDED = "discarded"
    """Final: a person or a cancel ended it."""
    DUPLICATE = "duplicate"
    """Final: another message with the same idempotency key was processed instead."""


RECORD_WORDS = {
    Status.SUCCEEDED: "success",
    Status.FAILED: "failed",
    Status.REJECTED: "rejected",
    Status.DUPLICATE: "duplicate",
    Status.EXPIRED: "expired",
    Status.DISCARDED: "discarded",
}
"""The word for each final status in metric labels and ledger records."""
FINAL = frozenset(RECORD_WORDS)
"""States that a task never leaves (P3)."""


class ParkKind(StrEnum):
    """Why a message is parked."""

    WORKFLOW_PENDING = "workflow_pending"
    WAITING_APPROVAL = "waiting_approval"
    RAW_PAYLOAD_INVALID = "raw_payload_invalid"
    EFFECT_UNKNOWN = "effect_unknown"


NO_HANDLER = "no handler for type"
"""Beginning of the reason of messages that are parked until a worker has a handler for their type.
A message that its handler parked has another reason, so it is not resumed because a handler
exists."""


GIVEN_UP = "given_up_by_broker"
"""Reason of a dead letter that the broker's server had moved to a dead-letter queue."""
UNSTORABLE = "unstorable"
"""Reason of a dead letter whose outcome could not be stored as it was."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question to a person: may this message run? The answer holds for this rule and payload."""

    rule: str
    payload_sha256: bytes
    expires_s: float
    four_eyes: bool = False


class Done(msgspec.Struct, frozen=True):
    """The handler returned."""

    result: Any = None


class Retry(msgspec.Struct, frozen=True):
    """The attempt failed. The message runs again after `after_s` seconds."""

    after_s: float
    reason: str
    crashed: bool = False
    """True if the attempt killed its process. That uses up crash budget, not a retry."""


class Dead(msgspec.Struct, frozen=True):
    """The message failed for good. It is kept as a dead letter."""

    reason: str
    error: str = ""


class Park(msgspec.Struct, frozen=True):
    """The message is parked until something or someone resumes it."""

    kind: str
    reason: str = ""
    question: Question | None = None
    """The question, if the message waits for a person's answer."""


class Rejected(msgspec.Struct, frozen=True):
    """Governance refused the message."""

    reason: str
    policies: tuple[str, ...] = ()


class Expired(msgspec.Struct, frozen=True):
    """The message's time to live was over before it could run."""


class Discarded(msgspec.Struct, frozen=True):
    """A person or a cancel ended the message."""

    reason: str = ""


class Duplicate(msgspec.Struct, frozen=True):
    """Another message with the same idempotency key was processed instead."""

    of: str
    """Id of that message."""


class Released(msgspec.Struct, frozen=True):
    """The message did not run (drain, open breaker). No attempt is used up."""

    after_s: float = 0.0


Outcome = Done | Retry | Dead | Park | Rejected | Expired | Discarded | Duplicate | Released


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a message ended, as its final event in the ledger says."""

    status: Status
    data: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]] = ()
    """The failed attempts, each with attempt, at and error."""

    @property
    def reason(self) -> str:
        return str(self.data.get("error") or self.data.get("reason") or self.status)


Identity = tuple[str, str]
"""Tenant id and task id."""
Endings = Callable[[str, Sequence[Identity]], Awaitable[Mapping[Identity, Ending]]]
"""Asks the store how messages of a subscription ended. Returns those that are final."""
