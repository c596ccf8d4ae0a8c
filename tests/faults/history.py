"""What the database says happened: read once, after the fact, by someone who took no part in it."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ackbone.core.events import FINAL_EVENTS

TaskId = tuple[str, str, str]
"""tenant_id, subscription, message_id"""

_decode = msgspec.json.Decoder().decode


class Event(NamedTuple):
    """One row of the ledger."""

    order: int
    """Commits of one file have one order, and this is it."""
    tenant_id: str
    subscription: str
    task_id: str
    type: str
    text: str
    created_at_us: int
    worker_id: int
    seq: int
    hash: bytes

    @property
    def task(self) -> TaskId:
        return self.tenant_id, self.subscription, self.task_id

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = _decode(self.text)
        return found


class Task(NamedTuple):
    """One row of the tasks."""

    tenant_id: str
    subscription: str
    message_id: str
    status: str
    worker_id: int | None
    attempt: int
    crashes: int
    lane: str | None
    lane_seq: int | None
    idem_key: str | None
    result: bytes | None


_EVENTS = (
    "SELECT tenant_id, subscription, task_id, event_type, {data}, {created_at}, worker_id, seq,"
    " hash FROM event_log ORDER BY {order}"
)
_TASKS = (
    "SELECT tenant_id, subscription, message_id, status, worker_id, attempt, crashes, lane,"
    " lane_seq, idem_key, result FROM queue_executions"
)
_KEYS = "SELECT tenant_id, subscription, key, message_id, state FROM idempotency_keys"
_REPLIES = "SELECT tenant_id, subscription, task_id, count(*) FROM deliveries GROUP BY 1, 2, 3"
_QUEUED = "SELECT message_id, CASE state WHEN 2 THEN worker_id END FROM messages"


class History:
    """The tables that the checker reads, as values: of a SQLite file, or of a PostgreSQL URL."""

    def __init__(self, database: Path | str) -> None:
        with _reading(database) as read:
            if isinstance(database, Path):
                events = _EVENTS.format(data="data", created_at="created_at", order="rowid")
                waiting = read(_QUEUED)
            else:
                us = "(extract(epoch FROM created_at) * 1000000)::bigint"
                by_time = "event_log.created_at, id"
                events = _EVENTS.format(data="data::text", created_at=us, order=by_time)
                waiting = []  # its queue is a broker's
            self.events = [Event(n, *row) for n, row in enumerate(read(events), 1)]
            self.tasks: dict[TaskId, Task] = {row[:3]: Task(*row) for row in read(_TASKS)}
            self.workers: dict[int, str] = dict(read("SELECT worker_id, state FROM workers"))
            self.keys: dict[TaskId, tuple[str, str]] = {
                (tenant, subscription, key): (message_id, state)
                for tenant, subscription, key, message_id, state in read(_KEYS)
            }
            self.waiting: dict[str, int | None] = dict(waiting)
            self.replies: dict[TaskId, int] = {
                (tenant, subscription, task): n for tenant, subscription, task, n in read(_REPLIES)
            }

    @cached_property
    def finals(self) -> dict[TaskId, list[Event]]:
        """The final events of each task: one each, if the promise was kept."""
        found: dict[TaskId, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.type in FINAL_EVENTS:
                found[event.task].append(event)
        return dict(found)

    def of_type(self, event_type: str) -> Iterator[Event]:
        return (event for event in self.events if event.type == event_type)

    def is_alive(self, worker_id: int | None) -> bool:
        """Alive, or on its way out: a reaper looks after both."""
        return worker_id is not None and self.workers.get(worker_id) in ("alive", "leaving")


Read = Callable[[str], list[Any]]


@contextmanager
def _reading(database: Path | str) -> Iterator[Read]:
    if isinstance(database, Path):
        with opened(database) as conn:
            yield lambda sql: conn.execute(sql).fetchall()
        return
    import psycopg

    with psycopg.connect(database) as postgres:
        yield lambda sql: postgres.execute(sql).fetchall()


@contextmanager
def opened(database: Path) -> Iterator[sqlite3.Connection]:
    """A connection that can only read."""
    uri = f"file:{database}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)) as conn:
        yield conn
