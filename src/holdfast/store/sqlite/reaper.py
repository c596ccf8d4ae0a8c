"""Dead workers: what they were running goes back, and counts against the message's crash budget."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core import events
from holdfast.core.outcome import Status
from holdfast.core.store import Reclaimed
from holdfast.store.crash import Crash

from .keys import free_key, resolve_key
from .lanes import advance_lane
from .ledger import Entry, Ledger
from .letters import bury

_RUNNING = (
    "SELECT rowid, tenant_id, subscription, message_id, queue_name, event_name, attempt, crashes,"
    " held, idem_key, lane, history, body, body_info, trace_id FROM queue_executions"
    " WHERE worker_id = ? AND status = 'running'"
)
PRESENT = "SELECT worker_id, state, name FROM workers WHERE state IN ('alive', 'leaving')"


def reap(
    conn: sqlite3.Connection,
    ledger: Ledger,
    alive: Callable[[int], bool],
    *,
    me: int,
    crash_budget: int,
    now_us: int,
) -> Reclaimed:
    """Declare workers dead whose sign of life is gone; give back what they ran."""
    names = {worker_id: name for worker_id, _, name in conn.execute(PRESENT)}
    dead = {
        worker_id: state
        for worker_id, state, _ in conn.execute(PRESENT).fetchall()
        if worker_id != me and not alive(worker_id)
    }
    back = quarantined = 0
    for worker_id, state in dead.items():
        conn.execute(
            "UPDATE workers SET state = ?, ended_at = ? WHERE worker_id = ?",
            ("left" if state == "leaving" else "dead", now_us, worker_id),
        )
        conn.execute("UPDATE sources SET worker_id = NULL WHERE worker_id = ?", (worker_id,))
        if state == "leaving":  # stopped in order, with runs that nothing but its end could end
            back += hand_back(conn, ledger, worker_id, me, now_us)
            continue
        found = [_Running(*row) for row in conn.execute(_RUNNING, (worker_id,))]
        entries: list[Entry] = []
        for task in found:
            crash = Crash(task, worker_id, crash_budget, now_us)
            entries.append(crash.lost(me, its_name=names[worker_id]))
            if crash.spent_the_budget:
                entries += _quarantine(conn, task, crash)
                quarantined += 1
            else:
                _give_back(conn, task, crash, names[worker_id])
                back += 1
        ledger.append(conn, me, entries, now_us)
    return Reclaimed(workers=list(dead), tasks=back, quarantined=quarantined)


def hand_back(
    conn: sqlite3.Connection, ledger: Ledger, worker_id: int, me: int, now_us: int
) -> int:
    """What a worker that stopped in order did not end, or never began. Spends no attempt."""
    found = conn.execute(
        "UPDATE queue_executions SET status = CASE held WHEN 'store' THEN 'ready' ELSE 'open' END,"
        " worker_id = NULL, epoch = epoch + 1, attempt = attempt - 1, due_at = ?"
        " WHERE worker_id = ? AND status = 'running'"
        " RETURNING tenant_id, subscription, message_id, attempt",
        (now_us, worker_id),
    ).fetchall()
    entries: list[Entry] = [
        (*identity, events.RELEASED, {"attempt": attempt + 1, "worker": worker_id})
        for *identity, attempt in found
    ]
    ledger.append(conn, me, entries, now_us)
    return len(found)


class _Running(NamedTuple):
    """A row that a dead worker ran."""

    rowid: int
    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    event_name: str | None
    attempt: int
    crashes: int
    held: str
    key: str | None
    lane: str | None
    history: str | None
    body: bytes | None
    body_info: str | None
    trace_id: str | None

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.tenant_id, self.subscription, self.message_id


def _give_back(conn: sqlite3.Connection, task: _Running, crash: Crash, lost_by: str) -> None:
    """It runs again, by whoever comes first."""
    status = Status.READY if task.held == "store" else Status.OPEN
    conn.execute(
        "UPDATE queue_executions SET status = ?, worker_id = NULL, epoch = epoch + 1,"
        " crashes = ?, due_at = ?, history = ?, lost_by = ? WHERE rowid = ?",
        (status, crash.crashes, crash.now_us, crash.history, lost_by, task.rowid),
    )


def _quarantine(conn: sqlite3.Connection, task: _Running, crash: Crash) -> list[Entry]:
    """It killed too many workers: to the dead letters; its key and its conversation go on."""
    now_us = crash.now_us
    conn.execute(
        "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, crashes = ?,"
        " completed_at = ?, error_message = ?, history = ?, body = NULL WHERE rowid = ?",
        (crash.crashes, now_us, crash.error, crash.history, task.rowid),
    )
    entries: list[Entry] = [crash.failed(), bury(conn, crash.letter(), now_us)]
    free_key(conn, task.tenant_id, task.subscription, task.key, task.message_id)
    if task.key is not None:
        entries += resolve_key(conn, task.tenant_id, task.subscription, task.key, now_us)
    if task.lane is not None:
        advance_lane(conn, task.tenant_id, task.subscription, task.lane, now_us)
    return entries
