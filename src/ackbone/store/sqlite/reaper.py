"""Dead workers: what they were running goes back, with one crash more if the death counts."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ackbone.core import events
from ackbone.core.machine import this_machine
from ackbone.core.outcome import Status
from ackbone.core.store import Reclaimed, Worker
from ackbone.store.crash import Crash, Gone, Judgement, judge, silent_children
from ackbone.store.letters import bury

from .keys import free_key, resolve_key
from .lanes import advance_lane
from .ledger import Entry, Ledger
from .tx import SqliteTx

_RUNNING = (
    "SELECT rowid, tenant_id, subscription, message_id, queue_name, event_name, attempt, crashes,"
    " held, idem_key, lane, history, body, body_info, trace_id FROM queue_executions"
    " WHERE worker_id = ? AND status = 'running'"
)
PRESENT_IDS = "SELECT worker_id FROM workers WHERE state IN ('alive', 'leaving')"
_PRESENT = (
    "SELECT worker_id, state, name, machine, parent FROM workers"
    " WHERE state IN ('alive', 'leaving')"
)


def reap(
    conn: sqlite3.Connection,
    ledger: Ledger,
    alive: Callable[[int], bool],
    *,
    seen: Collection[int],
    me: Worker,
    crash_budget: int,
    ended: Mapping[str, int],
    now_us: int,
) -> Reclaimed:
    """Declare workers dead whose sign of life is gone; give back what they ran.

    `seen`: workers that this process saw alive. `ended`: exit codes of its children, by name.
    """
    missing = _gone(conn, alive, seen, me)
    judged = {
        gone: judgement
        for gone in missing
        if (judgement := judge(gone, me, ended)) is not Judgement.LEAVE
    }
    back = quarantined = 0
    for gone, judgement in judged.items():
        counts = judgement is Judgement.COUNT
        conn.execute(
            "UPDATE workers SET state = ?, ended_at = ? WHERE worker_id = ?",
            ("dead" if counts else "left", now_us, gone.worker_id),
        )
        conn.execute("UPDATE sources SET worker_id = NULL WHERE worker_id = ?", (gone.worker_id,))
        if not counts:
            lost_by = None if gone.state == "leaving" else gone.name
            back += hand_back(conn, ledger, gone.worker_id, me.worker_id, now_us, lost_by)
            continue
        found = [_Running(*row) for row in conn.execute(_RUNNING, (gone.worker_id,))]
        worker = Worker(worker_id=gone.worker_id, name=gone.name)
        entries: list[Entry] = []
        for task in found:
            crash = Crash(task, worker, crash_budget, now_us, ended=ended)
            entries.append(crash.lost(me))
            if crash.spent_the_budget:
                entries += _quarantine(conn, task, crash)
                quarantined += 1
            else:
                _give_back(conn, task, crash, gone.name)
                back += 1
        ledger.append(conn, me.worker_id, entries, now_us)
    workers = [gone.worker_id for gone in judged]
    silent = silent_children(missing, me, ended)
    return Reclaimed(workers=workers, tasks=back, quarantined=quarantined, silent=silent)


def _gone(
    conn: sqlite3.Connection, alive: Callable[[int], bool], seen: Collection[int], me: Worker
) -> list[Gone]:
    """The workers that give no sign of life, and what this process knows of their machine.

    The file is on one machine: whether a worker of it lives is whether this process is of the
    same boot.
    """
    present = conn.execute(_PRESENT).fetchall()
    parents = {worker_id: parent for worker_id, _, _, _, parent in present}
    living = {n for n in parents if n == me.worker_id or alive(n)}
    alive_parents = {Worker(worker_id=n).as_parent for n in living}
    return [
        Gone(
            worker_id,
            state,
            name,
            parent,
            parent_lives=parent in alive_parents,
            machine_lives=here,
            sibling_lives=here and parent is not None and parent == parents.get(me.worker_id),
            outlived=here and (worker_id > me.worker_id or worker_id in seen),
        )
        for worker_id, state, name, machine, parent in present
        if worker_id not in living
        for here in [machine == this_machine()]
    ]


def hand_back(
    conn: sqlite3.Connection,
    ledger: Ledger,
    worker_id: int,
    me: int,
    now_us: int,
    lost_by: str | None = None,
) -> int:
    """What a worker that stopped in order did not end, or never began; the same for a worker whose
    death counts for nobody (`lost_by`). Spends no attempt."""
    found = conn.execute(
        "UPDATE queue_executions SET status = CASE held WHEN 'store' THEN 'ready' ELSE 'open' END,"
        " worker_id = NULL, epoch = epoch + 1, attempt = attempt - 1, due_at = ?,"
        " lost_by = coalesce(?, lost_by) WHERE worker_id = ? AND status = 'running'"
        " RETURNING tenant_id, subscription, message_id, attempt",
        (now_us, lost_by, worker_id),
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
    entries: list[Entry] = [crash.failed(), bury(SqliteTx(conn, now_us), crash.letter(), now_us)]
    free_key(conn, task.tenant_id, task.subscription, task.key, task.message_id)
    if task.key is not None:
        entries += resolve_key(conn, task.tenant_id, task.subscription, task.key, now_us)
    if task.lane is not None:
        advance_lane(conn, task.tenant_id, task.subscription, task.lane, now_us)
    return entries
