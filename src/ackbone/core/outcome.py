"""What became of a message: outcomes as values, and the one table of status words."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Status(StrEnum):
    """The states of a task (column `status` of queue_executions)."""

    OPEN = "open"
    RUNNING = "running"
    READY = "ready"
    QUEUED = "queued"
    WAITING_KEY = "waiting_key"
    PARKED = "parked"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REJECTED = "rejected"
    EXPIRED = "expired"
    DISCARDED = "discarded"
    DUPLICATE = "duplicate"


FINAL = frozenset(
    {
        Status.SUCCEEDED,
        Status.FAILED,
        Status.REJECTED,
        Status.EXPIRED,
        Status.DISCARDED,
        Status.DUPLICATE,
    }
)

RECORD_WORDS = {
    Status.SUCCEEDED: "success",
    Status.FAILED: "failed",
    Status.REJECTED: "rejected",
    Status.DUPLICATE: "duplicate",
    Status.EXPIRED: "expired",
    Status.DISCARDED: "discarded",
}
"""The word that metrics labels and ledger records use for each final status."""


class ParkKind(StrEnum):
    """Why a message is set aside."""

    WORKFLOW_PENDING = "workflow_pending"
    WAITING_APPROVAL = "waiting_approval"
    RAW_PAYLOAD_INVALID = "raw_payload_invalid"
    EFFECT_UNKNOWN = "effect_unknown"


NO_HANDLER = "no handler for type"
"""How the reason of a message begins that waits for a handler; one that a handler itself set aside
has words of its own, and is not resumed because that handler is still there."""


UNSTORABLE = "unstorable"
"""Why a run ended as a dead letter whose own outcome the store could not hold."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """May this message run? The answer holds for this rule and this payload."""

    rule: str
    payload_sha256: bytes
    expires_s: float
    four_eyes: bool = False


class Done(msgspec.Struct, frozen=True):
    """The handler returned."""

    result: Any = None


class Retry(msgspec.Struct, frozen=True):
    """Failed; runs again after `after_s`."""

    after_s: float
    reason: str
    crashed: bool = False
    """The attempt killed its process: it spends crash budget, not a retry."""


class Dead(msgspec.Struct, frozen=True):
    """Failed for good; kept as a dead letter."""

    reason: str
    error: str = ""


class Park(msgspec.Struct, frozen=True):
    """Set aside until resumed."""

    kind: str
    reason: str = ""
    question: Question | None = None
    """What a person is asked, if that is what it waits for."""


class Rejected(msgspec.Struct, frozen=True):
    """Governance said no."""

    reason: str
    policies: tuple[str, ...] = ()


class Expired(msgspec.Struct, frozen=True):
    """Its time to live was over before it could run."""


class Discarded(msgspec.Struct, frozen=True):
    """A person or a cancel ended it."""

    reason: str = ""


class Duplicate(msgspec.Struct, frozen=True):
    """Another message with the same idempotency key was there first."""

    of: str


class Released(msgspec.Struct, frozen=True):
    """Handed back unrun (drain, open breaker): no attempt is spent."""

    after_s: float = 0.0


Outcome = Done | Retry | Dead | Park | Rejected | Expired | Discarded | Duplicate | Released
