"""Lanes: messages of one conversation run one after the other, in the order they were sent.

Only the head of a lane is `ready`, the rest is `queued`: finding work never walks over what waits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from ackbone.core.ids import uuid7_bytes
from ackbone.core.outcome import Status
from ackbone.core.store import Candidate
from ackbone.sqlite import rows
from ackbone.store.stored import UNENDED

from . import tasks
from .claiming import Claiming

LANE_BUSY = (
    "SELECT 1 FROM queue_executions WHERE tenant_id = ? AND subscription = ? AND lane = ?"
    f" AND {UNENDED} LIMIT 1"
)
LANE_FIRST = (
    "SELECT rowid, status FROM queue_executions WHERE tenant_id = ? AND subscription = ?"
    f" AND lane = ? AND {UNENDED} ORDER BY lane_seq LIMIT 1"
)
READY_HEADS = {
    rule: "SELECT count(*) FROM (SELECT 1 FROM queue_executions WHERE subscription = ?1"
    " AND status = 'ready' AND priority IN (0, 1, 2, 3) AND due_at <= ?2 AND crashes = 0"
    f" AND lane IS NOT NULL{chosen} LIMIT ?3)"
    for rule, chosen in tasks.chosen(4).items()
}


def ready_heads(claim: Claiming, limit: int) -> int:
    """How many conversations have a message that could run now (counted up to `limit`).

    One that waits for a retry, or for a child of its own because it crashed, must not keep others
    out of their lanes. Neither must one that only another worker can handle.
    """
    choice = claim.choice
    values = (claim.sub.name, claim.now_us, limit, *tasks.chosen_value(choice))
    found: int = claim.conn.execute(READY_HEADS[choice.rule], values).fetchone()[0]
    return found


def append_to_lanes(claim: Claiming, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Write keyed messages behind their conversations, in order; returns those known before."""
    conn, sub = claim.conn, claim.sub
    lane_seq = _next_numbers(claim, len(candidates))
    rowid = tasks.max_rowid(conn)
    busy: dict[tuple[str, str], bool] = {}
    known: list[Candidate] = []
    for candidate in candidates:
        message = candidate.message
        if message is None or message.ordering_key is None:
            known.append(candidate)
            continue
        lane = (message.tenant_id, message.ordering_key)
        if lane not in busy:
            found = conn.execute(LANE_BUSY, (lane[0], sub.name, lane[1])).fetchone()
            busy[lane] = found is not None
        lane_seq += 1
        rowid += 1
        status = Status.QUEUED if busy[lane] else Status.READY
        place = tasks.waiting(claim, status, message.ordering_key, lane_seq)
        task = tasks.task(claim, candidate, message, rowid)
        columns = tasks.columns(claim, [task], [uuid7_bytes()])
        if rows.insert_columns(conn, tasks.INSERT, columns, shared=place) == 1:
            busy[lane] = True
        else:
            known.append(candidate)
    return known


def advance_lane(
    conn: sqlite3.Connection, tenant_id: str, subscription: str, lane: str, now_us: int
) -> bool:
    """The first message of a conversation becomes ready, if it only waited for its turn."""
    found = conn.execute(LANE_FIRST, (tenant_id, subscription, lane)).fetchone()
    if found is None or found[1] != Status.QUEUED:
        return False
    conn.execute(
        "UPDATE queue_executions SET status = 'ready', due_at = ? WHERE rowid = ?",
        (now_us, found[0]),
    )
    return True


def own_source(conn: sqlite3.Connection, subscription: str, worker_id: int) -> bool:
    """Become or stay the one fetcher of an ordered source; False: a living worker has it."""
    return (
        conn.execute(
            "INSERT INTO sources (subscription, worker_id) VALUES (?, ?)"
            " ON CONFLICT (subscription, part) DO UPDATE SET worker_id = excluded.worker_id"
            " WHERE sources.worker_id = excluded.worker_id OR sources.worker_id IS NULL"
            " OR sources.worker_id NOT IN (SELECT worker_id FROM workers WHERE state = 'alive')"
            " RETURNING 1",
            (subscription, worker_id),
        ).fetchone()
        is not None
    )


def _next_numbers(claim: Claiming, count: int) -> int:
    """Take `count` places in the order of this subscription; returns the one before the first."""
    (last,) = claim.conn.execute(
        "INSERT INTO sources (subscription, n) VALUES (?, ?) ON CONFLICT (subscription, part)"
        " DO UPDATE SET n = n + excluded.n RETURNING n",
        (claim.sub.name, count),
    ).fetchone()
    return int(last) - count
