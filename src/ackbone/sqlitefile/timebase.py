"""The clock of one file's due times (`core/due_times.py` says which times move, and why).

The database holds the difference between the wall clock and the machine's steady clock. The first
transaction after a jump, in any process, finds that the difference has changed, and moves every due
time by as much before it writes anything else. No row is ever moved twice, and none that is newer
than the jump.
"""

from __future__ import annotations

import json
import logging
import sqlite3

from ackbone.core import due_times
from ackbone.core.clock import Clock
from ackbone.core.due_times import NOTICED_AFTER_S, TOLERANCE_US
from ackbone.core.machine import boot_id

log = logging.getLogger("ackbone.sqlite")

HELD_UP_S = 0.1
"""A thread that was delayed this long between reading the two clocks reads them again."""
ROLE = "clock"
_MOVE = "UPDATE {0} SET {1} WHERE {2}"
_MOVE_READY = "UPDATE {0} SET {1} WHERE rowid IN (SELECT rowid FROM {0} WHERE {2})"
"""SQLite does not use the index over ready rows to update a column of that index."""


def _move(rule: due_times.Waiting) -> str:
    moved = ", ".join(f"{column} = {column} + ?1" for column in rule.columns)
    form = _MOVE_READY if rule.table == "queue_executions" else _MOVE
    return form.format(rule.table, moved, rule.where)


QUEUE = due_times.Waiting("messages", ("due_at",), "state = 1")
"""The queue is in the same file, and its delayed messages move, too."""
WAITING = (
    *(_move(rule) for rule in (QUEUE, *due_times.WAITING)),
    "UPDATE send_windows SET ends_at = ends_at + ?1, state = json_object('calls',"
    " json((SELECT json_group_object(c.key, c.value + ?1) FROM json_each(state, '$.calls') c)),"
    " 'blocked_until', json_extract(state, '$.blocked_until') + ?1,"
    " 'back_until', coalesce(json_extract(state, '$.back_until'), 0) + ?1)",
)


class TimeBase:
    """The clock of the file's due times. Used in the writer thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._boot = boot_id().hex()
        self._base: int | None = None
        """Wall minus steady clock (µs) that the rows are based on. None: not read yet."""
        self._asked: int | None = None
        self._last: int | None = None
        self._stepped_at: float | None = None

    def follow(self, conn: sqlite3.Connection) -> None:
        """Move due times if somebody set the clock. Called first in every transaction."""
        self._asked = None  # of a transaction that was undone
        offset = self._look()
        if self._last is not None and abs(offset - self._last) > TOLERANCE_US:
            self._stepped_at = self._clock.monotonic()
        self._last = offset
        if self._base is None or abs(offset - self._base) > TOLERANCE_US:
            self._rebase(conn, offset)

    def was_set(self) -> bool:
        """Return True if the clock was set since `follow`.

        The transaction then used a time that its due times do not match. It must be undone and run
        again.
        """
        return self._last is not None and abs(self._look() - self._last) > TOLERANCE_US

    def now_us(self, conn: sqlite3.Connection) -> int:
        """Return the time by the clock that the rows of `conn`'s snapshot are based on.

        For readers: another process may move due times between their reading of the clock and of
        the rows.
        """
        wall = self._clock.now_us()
        base = self._known(conn)
        if base is None:
            return wall
        by_rows = base + int(self._clock.monotonic() * 1e6)
        return wall if abs(wall - by_rows) <= TOLERANCE_US else by_rows

    def committed(self) -> None:
        """Called after the commit: the base that the transaction found or set is valid from now
        on."""
        if self._asked is not None:
            self._base, self._asked = self._asked, None

    @property
    def in_doubt(self) -> bool:
        """True if the clock was set moments ago."""
        stepped = self._stepped_at
        return stepped is not None and self._clock.monotonic() - stepped < NOTICED_AFTER_S

    def _look(self) -> int:
        """Return wall minus steady clock (µs), from two readings without a delay between them."""
        while True:
            before = self._clock.monotonic()
            wall = self._clock.now_us()
            if self._clock.monotonic() - before < HELD_UP_S:
                return wall - int(before * 1e6)

    def _known(self, conn: sqlite3.Connection) -> int | None:
        """Return the base of the rows. None: none was written since the machine was started."""
        found = conn.execute("SELECT state FROM roles WHERE role = ?", (ROLE,)).fetchone()
        known = json.loads(found[0]) if found is not None and found[0] else {}
        base: int | None = known.get("offset_us") if known.get("boot") == self._boot else None
        return base

    def _rebase(self, conn: sqlite3.Connection, offset: int) -> None:
        base = self._known(conn)
        if base is not None and abs(offset - base) <= TOLERANCE_US:
            self._asked = base
            return
        if base is not None:
            moved = sum(conn.execute(sql, (offset - base,)).rowcount for sql in WAITING)
            log.warning(
                "the clock was set by %+.0f s: %d waiting times moved with it",
                (offset - base) / 1e6,
                moved,
            )
        state = json.dumps({"boot": self._boot, "offset_us": offset})
        conn.execute(
            "INSERT INTO roles (role, state) VALUES (?, ?) ON CONFLICT (role)"
            " DO UPDATE SET state = excluded.state",
            (ROLE, state),
        )
        self._asked = offset
