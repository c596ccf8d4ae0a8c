"""The server's clock, compared with this machine's steady one (the rule: `core/due_times.py`).

Every process remembers how far the server's clock is ahead of its own steady clock. When that
changes by more than the tolerance, somebody set the server's clock, and the waiting times move by
as much. `moved_us` in the row `clock` of `roles` says how far they have been moved in all. A
process that sees a jump locks that row first. If the row has changed by as much as the clock since
the last look, another process has moved the times already.

Each transaction is checked before its commit, too: if it was begun after a jump, it is undone and
run again once the times have moved. So nothing is claimed, expired or written by the new clock
before that, except by a process that connected between the jump and the move. A jump while no
process is connected moves nothing, because no process can detect it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from ackbone.core import due_times
from ackbone.core.clock import Clock
from ackbone.core.due_times import NOTICED_AFTER_S, TOLERANCE_US
from ackbone.core.errors import StoreUnavailable
from ackbone.store.tasks import Ahead

from .database import Database, Look, Tx

log = logging.getLogger("ackbone.store")

SHARP_S = 0.5
"""A look at the server's clock that took longer than this (seconds) is not exact enough."""
DRIFT_US = 1_000
"""A clock may run fast or slow by this many microseconds in a second, without being set."""
LIMIT_S = 600.0
"""Time limit of a move, in seconds. Moving millions of keys takes longer than other calls."""
MOVED = "coalesce((SELECT (state ->> 'moved_us')::bigint FROM roles WHERE role = 'clock'), 0)"
_LOOK = f"SELECT clock_timestamp(), {MOVED}"
_BEGIN = "INSERT INTO roles (role, state) VALUES ('clock', '{}') ON CONFLICT (role) DO NOTHING"
_HOLD = (
    "SELECT coalesce((state ->> 'moved_us')::bigint, 0) FROM roles WHERE role = 'clock' FOR UPDATE"
)
_KEEP = "UPDATE roles SET state = json_build_object('moved_us', $1::bigint) WHERE role = 'clock'"
_WAITING = (
    *due_times.WAITING,
    due_times.Waiting("messages", ("due_at",), "due_at IS NOT NULL"),
)
_TABLES = ", ".join(dict.fromkeys(rule.table for rule in _WAITING))
_LOCK = f"LOCK TABLE {_TABLES}, send_windows IN SHARE ROW EXCLUSIVE MODE"
"""Wait for transactions that wrote by the old clock, so that their rows move, too."""
_BY = "$1::bigint * interval '1 microsecond'"
_COUNTED = "WITH moved AS ({} RETURNING 1) SELECT count(*) FROM moved"


def _move(rule: due_times.Waiting) -> str:
    # No later than the last moment that every client can read.
    moved = ", ".join(
        f"{column} = least({column} + {_BY}, CASE WHEN {column} IS NOT NULL"
        " THEN timestamptz '9999-12-31 23:59:59+00' END)"
        for column in rule.columns
    )
    return _COUNTED.format(f"UPDATE {rule.table} SET {moved} WHERE {rule.where}")


WAITING = (
    *(_move(rule) for rule in _WAITING),
    _COUNTED.format(
        f"UPDATE send_windows SET ends_at = ends_at + {_BY}, state = json_build_object('calls',"
        " coalesce((SELECT json_object_agg(c.key, c.value::bigint + $1::bigint)"
        " FROM json_each_text(state -> 'calls') c), '{}'::json), 'blocked_until',"
        " (state ->> 'blocked_until')::bigint + $1::bigint, 'back_until',"
        " coalesce((state ->> 'back_until')::bigint, 0) + $1::bigint)"
    ),
)


class ClockSet(Exception):
    """The server's clock was set while, or before, this transaction ran."""


class _Based(NamedTuple):
    ahead_us: int
    """The server's clock minus this machine's steady one."""
    moved_us: int
    """The total move of the waiting times at the last look."""
    looked_s: float
    """The time of that look, by the steady clock."""

    def tolerance_us(self, look: Look) -> int:
        """Allow for drift: the last look may have been days ago."""
        return TOLERANCE_US + int((look.after_s - self.looked_s) * DRIFT_US)


class TimeBase:
    """How far the server's clock is ahead of the steady clock, at the last look."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._base: _Based | None = None
        self._stepped_at: float | None = None
        self._lock = asyncio.Lock()
        self.jumps = 0
        """How often the server's clock was set, as far as this process knows."""

    @property
    def ahead(self) -> Ahead:
        """The clock to use. Before the first look, the server's clock counts as this machine's."""
        wall_us = self._clock.now_us() - int(self._clock.monotonic() * 1e6)
        if self._base is None:
            return Ahead(wall_us)
        skew_us = self._base.ahead_us - wall_us
        return Ahead(self._base.ahead_us, skew_us if abs(skew_us) > TOLERANCE_US else 0)

    @property
    def in_doubt(self) -> bool:
        """True if the clock was set moments ago."""
        stepped = self._stepped_at
        return stepped is not None and self._clock.monotonic() - stepped < NOTICED_AFTER_S

    def agrees(self, look: Look) -> bool:
        """Return False if the clock was set since the last look. True if there was no look."""
        base = self._base
        if base is None:
            return True
        tolerance_us = base.tolerance_us(look)
        earliest = base.ahead_us + int(look.before_s * 1e6) - tolerance_us
        latest = base.ahead_us + int(look.after_s * 1e6) + tolerance_us
        return earliest <= look.server_us <= latest

    def see(self, look: Look, moved_us: int | None = None) -> bool:
        """Follow slow drift. Return False if the clock was set; then call `follow`.

        `moved_us`: the total move of the waiting times, if that was read, too.
        """
        if not self.agrees(look):
            return False
        base = self._base
        if base is None and moved_us is not None:
            base = _Based(look.ahead_us, moved_us, look.after_s)
        if base is not None:
            if look.took_s < SHARP_S:
                base = base._replace(ahead_us=look.ahead_us, looked_s=look.after_s)
            self._base = base if moved_us is None else base._replace(moved_us=moved_us)
        return True

    async def follow(self, database: Database) -> None:
        """Look at the clock. If it was set, move the waiting times, unless another process did."""
        async with self._lock:
            before = self._clock.monotonic()
            ((now, moved_us),) = await database.read(_LOOK)
            if not self.see(Look.of(before, now, self._clock.monotonic()), moved_us):
                self._base = await database.write(
                    self._rebase,
                    worker_id=0,
                    durable=True,
                    commit=lambda tx, finish: finish(),
                    limit_s=LIMIT_S,
                )
                self._stepped_at = self._clock.monotonic()
                self.jumps += 1

    async def _rebase(self, tx: Tx) -> _Based:
        base = self._base
        assert base is not None  # noqa: S101 - without one every look agrees
        await tx.send(f"SET LOCAL statement_timeout = '{LIMIT_S:.0f}s'")
        await tx.send(_BEGIN)
        ((moved_us,),) = await tx.rows(_HOLD)
        await tx.look_at_clock()
        look = await tx.look()
        if look.took_s >= SHARP_S:
            raise StoreUnavailable("the server's clock was set, and it answers too slowly to tell")
        step_us = look.ahead_us - base.ahead_us
        by_us = step_us - (moved_us - base.moved_us)
        if abs(by_us) <= base.tolerance_us(look):
            return _Based(look.ahead_us, moved_us, look.after_s)
        await tx.send(_LOCK)
        n = sum([(await tx.rows(statement, str(by_us)))[0][0] for statement in WAITING])
        await tx.send(_KEEP, str(moved_us + by_us))
        log.warning(
            "the clock of the database server was set by %+.0f s: %d waiting times moved with it",
            step_us / 1e6,
            n,
        )
        return _Based(look.ahead_us, moved_us + by_us, look.after_s)
