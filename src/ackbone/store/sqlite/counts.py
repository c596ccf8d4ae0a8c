"""How many of what: queues, statuses, rates, workers. All functions run on a reading connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from ackbone.core.records import Count, QueueState, WorkerState
from ackbone.store.fleet import read_offers
from ackbone.store.stored import UNCOMMON

from .views import position_of

# The second condition is the one of a partial index over what is neither running nor well ended.
_UNENDED = (
    "SELECT queue_name, count(*) FILTER (WHERE status <> 'parked'),"
    " count(*) FILTER (WHERE status = 'parked'),"
    " min(started_at) FILTER (WHERE status <> 'parked' AND coalesce(due_at, 0) <= ?)"
    " FROM queue_executions WHERE status IN ('ready', 'queued', 'waiting_key', 'open', 'parked')"
    f" AND {UNCOMMON} GROUP BY queue_name"
)
_UNSENT = (
    "SELECT queue_name, count(*) FILTER (WHERE due_at <= ?1), count(*) FILTER (WHERE due_at > ?1),"
    " min(created_at) FILTER (WHERE due_at <= ?1) FROM outbox GROUP BY queue_name"
)
"""What a broker elsewhere was not given yet: not due, or it is away."""


def queued(conn: sqlite3.Connection) -> dict[str, tuple[int, int, int | None]]:
    """Of the embedded queue: ready, delayed, and when the oldest ready one was sent."""
    found = conn.execute(
        "SELECT queue, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),"
        " min(sent_at) FILTER (WHERE state = 0) FROM messages GROUP BY queue"
    )
    return {queue: (ready, delayed, oldest) for queue, ready, delayed, oldest in found}


def queues(
    conn: sqlite3.Connection, sent: dict[str, tuple[int, int, int | None]], now_us: int
) -> list[QueueState]:
    """Every queue that anything is known of."""
    fields: dict[str, dict[str, Any]] = {}
    oldest: dict[str, int] = {}

    def of(queue: str) -> dict[str, Any]:
        return fields.setdefault(queue, {})

    def older(queue: str, at: int | None) -> None:
        if at is not None:
            oldest[queue] = min(at, oldest.get(queue, at))

    for queue in _named(conn):
        of(queue)
    for queue, (ready, delayed, at) in sent.items():
        of(queue).update(ready=ready, delayed=delayed)
        older(queue, at)
    for queue, ready, delayed, at in conn.execute(_UNSENT, (now_us,)):
        there = of(queue)
        there["ready"] = there.get("ready", 0) + ready
        there["delayed"] = there.get("delayed", 0) + delayed
        older(queue, at)
    for queue, waiting, parked, at in conn.execute(_UNENDED, (now_us,)):
        of(queue).update(waiting=waiting, parked=parked)
        older(queue, at)
    for queue, running in conn.execute(
        "SELECT queue_name, count(*) FROM queue_executions WHERE status = 'running'"
        " GROUP BY queue_name"
    ):
        of(queue).update(running=running)
    for queue, dead in conn.execute(
        "SELECT queue_name, count(*) FROM dead_letters WHERE state = 'open' GROUP BY queue_name"
    ):
        of(queue).update(dead=dead)
    for queue, paused_at in conn.execute(
        "SELECT subscription, max(paused_at) FROM sources GROUP BY subscription"
    ):
        of(queue).update(paused_at_us=paused_at)
    for queue, at in oldest.items():
        of(queue).update(oldest_age_s=round(max(0.0, (now_us - at) / 1e6), 3))
    return [QueueState(queue=queue, **fields[queue]) for queue in sorted(fields)]


def _named(conn: sqlite3.Connection) -> set[str]:
    """Queues that ever had a message taken, by one step through an index for each."""
    found: set[str] = set()
    last = ("", "")
    while True:
        row = conn.execute(
            "SELECT tenant_id, queue_name FROM queue_executions WHERE (tenant_id, queue_name)"
            " > (?, ?) ORDER BY tenant_id, queue_name LIMIT 1",
            last,
        ).fetchone()
        if row is None:
            return found
        last = (row[0], row[1])
        found.add(row[1])


def statuses(conn: sqlite3.Connection) -> list[Count]:
    """Messages that the store knows, by queue and status. Reads the whole table."""
    return _counts(
        conn.execute("SELECT queue_name, status, count(*) FROM queue_executions GROUP BY 1, 2")
    )


def replies(conn: sqlite3.Connection) -> list[Count]:
    """Replies by channel and status."""
    return _counts(conn.execute("SELECT channel, status, count(*) FROM deliveries GROUP BY 1, 2"))


def events_since(conn: sqlite3.Connection, since_us: int) -> list[Count]:
    """Ledger events by queue and type, from a time on."""
    return _counts(
        conn.execute(
            "SELECT subscription, event_type, count(*) FROM event_log WHERE rowid >= ?"
            " AND created_at >= ? GROUP BY 1, 2",
            (position_of(conn, since_us), since_us),
        )
    )


def workers(conn: sqlite3.Connection, alive: Callable[[int], bool]) -> list[WorkerState]:
    """Workers that did not leave and were not declared dead."""
    found = conn.execute(
        "SELECT w.worker_id, w.name, w.started_at, (SELECT count(*) FROM queue_executions q"
        " WHERE q.worker_id = w.worker_id AND q.status = 'running'), w.offers FROM workers w"
        " WHERE w.state = 'alive' ORDER BY w.worker_id"
    ).fetchall()
    return [
        WorkerState(
            worker_id=worker_id,
            name=name,
            started_at_us=at,
            alive=alive(worker_id),
            running=n,
            offers=read_offers(offers),
        )
        for worker_id, name, at, n, offers in found
    ]


def _counts(found: sqlite3.Cursor) -> list[Count]:
    return sorted(
        (Count(queue=queue, kind=kind, count=count) for queue, kind, count in found),
        key=lambda each: (each.queue, each.kind),
    )
