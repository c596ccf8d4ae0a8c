"""Dead workers: what they were running goes back, and counts against the message's crash budget."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.core import events
from holdfast.core.outcome import Status
from holdfast.core.store import Reclaimed

from .keys import final_data, free_key, resolve_key
from .lanes import advance_lane
from .ledger import Entry, Ledger
from .letters import Letter, bury

PRESENT = "SELECT worker_id, state FROM workers WHERE state IN ('alive', 'leaving')"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


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
    dead = {
        worker_id: state
        for worker_id, state in conn.execute(PRESENT).fetchall()
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
        found = conn.execute(
            "SELECT rowid, tenant_id, subscription, message_id, queue_name, event_name, attempt,"
            " crashes, held, idem_key, lane, history, body, body_info, trace_id"
            " FROM queue_executions WHERE worker_id = ? AND status = 'running'",
            (worker_id,),
        ).fetchall()
        entries: list[Entry] = []
        for row in found:
            entries += _give_back(conn, row, worker_id, me, crash_budget, now_us)
            over = row[7] + 1 >= crash_budget
            quarantined += over
            back += not over
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


def _give_back(
    conn: sqlite3.Connection, row: Any, worker_id: int, me: int, crash_budget: int, now_us: int
) -> list[Entry]:
    (
        rowid,
        tenant_id,
        subscription,
        message_id,
        queue,
        event_name,
        attempt,
        crashes,
        held,
        key,
        lane,
        history,
        body,
        info,
        trace_id,
    ) = row
    head = (tenant_id, subscription, message_id)
    crashes += 1
    error = f"worker {worker_id} died while running it (crash {crashes} of {crash_budget})"
    past = [
        *(_decode(history) if history else []),
        {"attempt": attempt, "at": now_us, "error": error, "crash": True},
    ]
    entries: list[Entry] = [
        (
            *head,
            events.RECLAIMED,
            {"worker": worker_id, "by": me, "message_id": message_id, "crashes": crashes},
        )
    ]
    if crashes < crash_budget:
        conn.execute(
            "UPDATE queue_executions SET status = ?, worker_id = NULL, epoch = epoch + 1,"
            " crashes = ?, due_at = ?, history = ? WHERE rowid = ?",
            (
                Status.READY if held == "store" else Status.OPEN,
                crashes,
                now_us,
                _encode(past).decode(),
                rowid,
            ),
        )
        return entries
    conn.execute(
        "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, crashes = ?,"
        " completed_at = ?, error_message = ?, history = ?, body = NULL WHERE rowid = ?",
        (crashes, now_us, error, _encode(past).decode(), rowid),
    )
    final = final_data(queue, tenant_id, message_id, event_name, trace_id, Status.FAILED)
    final.update(reason="crash_budget", error=error)
    letter = Letter(
        tenant_id=tenant_id,
        subscription=subscription,
        message_id=message_id,
        queue=queue,
        event_name=event_name,
        reason="crash_budget",
        error=error,
        retry_count=max(0, attempt - crashes),
        history=past,
        body=body,
        body_info=info,
    )
    entries += [(*head, events.FAILED, final), bury(conn, letter, now_us)]
    free_key(conn, tenant_id, subscription, key, message_id)
    if key is not None:
        entries += resolve_key(conn, tenant_id, subscription, key, now_us)
    if lane is not None:
        advance_lane(conn, tenant_id, subscription, lane, now_us)
    return entries
