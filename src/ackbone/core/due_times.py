"""Due times that move when somebody sets the clock of a store.

Due times are wall-clock times. A retry that is due in a second must not wait for a day because the
clock was set back by a day, and a key must not be forgotten an hour early because it was set
forward. A store therefore compares its wall clock with a steady one, and moves every time of
`WAITING` by the jump before it writes anything by the new clock. Each dialect has its own code for
that.

The times to live of messages are not in the list, because other clocks set some of them. Instead,
nothing expires for a while after a jump: for `NOTICED_AFTER_S` seconds because of the store, then
because of the worker (`clock_hold_s`).
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCE_US = 1_000_000
"""Clocks are always being adjusted a little. A larger change, in microseconds, is a jump."""
NOTICED_AFTER_S = 5.0
"""Every worker has noticed a jump after this many seconds."""


class Waiting(NamedTuple):
    """Due times of one table, and the rows in which they are waited for."""

    table: str
    columns: tuple[str, ...]
    where: str = "true"


WAITING = (
    Waiting("queue_executions", ("due_at",), "status = 'ready' AND due_at IS NOT NULL"),
    Waiting("outbox", ("due_at",)),
    Waiting("deliveries", ("due_at",), "status = 'pending'"),
    # Only this clock sets the time to live of a reply and the start of a call.
    Waiting(
        "deliveries",
        ("expires_at", "last_attempt_at"),
        "status IN ('pending', 'queued', 'sending')",
    ),
    Waiting("idempotency_keys", ("expires_at",), "expires_at IS NOT NULL"),
    Waiting("approvals", ("expires_at",), "state = 'pending'"),
)
"""The rows of `send_windows` move, too. They are JSON, so each dialect has its own statement."""
