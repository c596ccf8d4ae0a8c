"""The end of a task as others are told of it, from its row and its event, in every dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ackbone.core.notices import End, letter_fields
from ackbone.core.outcome import Status

COLUMNS = "t.event_name, t.result, t.retry_count, t.error_message, t.idem_key, w.name"
"""What `end_of` reads: of the task `t`, and of the worker `w` that ran it."""


def end_of(
    identity: tuple[str, str, str],
    row: Sequence[Any],
    status: Status,
    data: Mapping[str, Any],
    now_us: int,
) -> End:
    """`row` is COLUMNS; `data` is the final event's."""
    tenant_id, subscription, task_id = identity
    tool_name, result, retry_count, error, key, worker = row
    return End(
        tenant_id=tenant_id,
        subscription=subscription,
        task_id=task_id,
        tool_name=tool_name or "",
        status=status,
        result=result,
        error=str(data.get("error") or data.get("reason") or error or ""),
        retry_count=data.get("retry_count", retry_count) or 0,
        idempotency_key=key,
        finished_at_us=now_us,
        consumer=worker or "",
        duplicate_of=data.get("first_id"),
    )


def add_letter(
    end: End, letter_id: str, body: bytes | None, body_info: str | None, reason: str
) -> None:
    """The end left a dead letter: tell what is in it."""
    end.letter = letter_id
    form = msgspec.json.decode(body_info) if body_info else {}
    letter_fields(end, body or b"", form.get("codec", ""), reason)
