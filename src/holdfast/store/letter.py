"""What is kept of a message that could not be processed (P6), in the words of every dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.core.store import Run
from holdfast.store.stored import run_info


class Letter(msgspec.Struct, kw_only=True):
    """What is kept of a message that ended badly."""

    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    event_name: str | None
    reason: str
    error: str = ""
    retry_count: int = 0
    history: Sequence[Mapping[str, Any]] = ()
    body: bytes | None = None
    body_info: str | None = None


def letter_of(run: Run, reason: str, error: str) -> Letter:
    """The dead letter of a claimed message."""
    message = run.message
    return Letter(
        tenant_id=message.tenant_id,
        subscription=run.subscription,
        message_id=message.id,
        queue=run.queue,
        event_name=message.type,
        reason=reason,
        error=error,
        retry_count=max(0, run.failures),
        history=run.history,
        body=run.body,
        body_info=run_info(run),
    )
