"""Which message the running code works for: logs ask, so that every line of a run has its trace."""

from __future__ import annotations

from contextvars import ContextVar

from .message import Message

current_message: ContextVar[Message | None] = ContextVar("ackbone_message", default=None)
