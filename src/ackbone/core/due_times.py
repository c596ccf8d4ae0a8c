"""Which times move when somebody sets the clock that a store goes by.

Due times are wall-clock times. A retry that is due in a second must not wait a day because the
clock went back by one, and a key must not be forgotten an hour early because it went forward. So a
store compares its wall clock with a steady one, and moves every time of `WAITING` by the jump
before it writes anything by the new clock. Every dialect carries this out in its own way.

The times to live of messages are not in the list: some were set elsewhere, by another clock.
Nothing expires for a while after a jump instead: for `NOTICED_AFTER_S` the store sees to that, from
then on the worker does (`clock_hold_s`).
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCE_US = 1_000_000
"""Clocks are nudged all the time. A larger change is a jump."""
NOTICED_AFTER_S = 5.0
"""A worker has noticed a jump after this long."""


class Waiting(NamedTuple):
    """Times of one table, and the rows in which they wait for something."""

    table: str
    columns: tuple[str, ...]
    where: str = "true"


WAITING = (
    Waiting("queue_executions", ("due_at",), "status = 'ready' AND due_at IS NOT NULL"),
    Waiting("outbox", ("due_at",)),
    Waiting("deliveries", ("due_at",), "status = 'pending'"),
    # A reply's time to live and the start of its call were set by this clock and no other.
    Waiting(
        "deliveries",
        ("expires_at", "last_attempt_at"),
        "status IN ('pending', 'queued', 'sending')",
    ),
    Waiting("idempotency_keys", ("expires_at",), "expires_at IS NOT NULL"),
    Waiting("approvals", ("expires_at",), "state = 'pending'"),
)
"""The rows of `send_windows` move, too: each dialect writes that statement itself, for JSON."""
