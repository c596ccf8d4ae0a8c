"""Plain sqlite3 loops that make the same writes: what ackbone is measured against.

Same file, tables, indexes and synchronous=FULL; no engine, no threads, no lease, no witness.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
import uuid
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ackbone.store.sqlite.migrate import ensure_schema

from . import workload

WORKER = 1
_READY = (
    "SELECT seq, message_id, priority, sent_at, body FROM messages WHERE queue = ? AND state = 0"
    " AND lane IS NULL ORDER BY priority DESC, seq LIMIT ?"
)
_TAKE = "UPDATE messages SET state = 2, worker_id = ?, deliveries = deliveries + 1 WHERE seq = ?"
_TASK = (
    "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name, event_name,"
    " status, held, worker_id, epoch, attempt, priority, idem_key, created_at, started_at, body,"
    " body_info, body_crc, body_sha256)"
    " VALUES (?, ?, ?, ?, ?, ?, 'running', 'store', ?, 1, 1, ?, ?, ?, ?, ?, '{}', ?, ?)"
)
_KEY = (
    "INSERT INTO idempotency_keys (tenant_id, subscription, key, message_id, state, created_at)"
    " VALUES (?, ?, ?, ?, 'running', ?)"
)
_EVENT = (
    "INSERT INTO event_log (id, tenant_id, subscription, task_id, event_type, data, created_at,"
    " worker_id, seq, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_DONE = (
    "UPDATE queue_executions SET status = 'succeeded', completed_at = ?, duration_ms = 0,"
    " body = NULL, body_info = NULL WHERE tenant_id = ? AND subscription = ? AND message_id = ?"
    " AND worker_id = ? AND epoch = 1 AND status = 'running'"
)
_KEY_DONE = (
    "UPDATE idempotency_keys SET state = 'done', expires_at = ?"
    " WHERE tenant_id = ? AND subscription = ? AND key = ? AND message_id = ?"
)
_SETTLE = "DELETE FROM messages WHERE seq = ? AND worker_id = ?"
_SEND = (
    "INSERT INTO messages (queue, state, priority, message_id, sent_at, headers, body, body_crc)"
    " VALUES (?, 0, 1, ?, ?, '{}', ?, ?)"
)
_TENANT = "default"
_HOUR_US = 3_600_000_000


class Task:
    """One message in the hands of the loop."""

    __slots__ = ("body", "key", "message_id", "payload_hash", "priority", "sent_at", "seq", "type")

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.seq, self.message_id, self.priority, self.sent_at, self.body = row
        fields = json.loads(self.body)
        self.type = fields["message_type"]
        self.key = fields["metadata"].get("idempotency_key")
        self.payload_hash = hashlib.sha256(
            json.dumps(fields["payload"], sort_keys=True).encode()
        ).digest()


class Loop:
    """receive, claim, run nothing, finish, settle; a commit after each step or after each pair."""

    def __init__(self, path: Path, *, batch: int, commit_each_step: bool) -> None:
        self._conn = connect(path)
        self._batch = batch
        self._each = commit_each_step
        self._seq, self._hash = 0, b"\0" * 32

    def run(self) -> tuple[int, float]:
        """Drain the queue; returns how many messages in how many seconds."""
        done = 0
        begin = time.perf_counter()
        with closing(self._conn):
            while True:
                self._conn.execute("BEGIN IMMEDIATE")
                tasks = self._receive()
                if not tasks:
                    self._conn.execute("COMMIT")
                    return done, time.perf_counter() - begin
                self._step()
                self._claim(tasks)
                self._conn.execute("COMMIT")
                self._conn.execute("BEGIN IMMEDIATE")
                self._finish(tasks)
                self._step()
                self._conn.executemany(_SETTLE, [(task.seq, WORKER) for task in tasks])
                self._conn.execute("COMMIT")
                done += len(tasks)

    def _step(self) -> None:
        if self._each:
            self._conn.execute("COMMIT")
            self._conn.execute("BEGIN IMMEDIATE")

    def _receive(self) -> list[Task]:
        found = self._conn.execute(_READY, (workload.QUEUE, self._batch)).fetchall()
        self._conn.executemany(_TAKE, [(WORKER, row[0]) for row in found])
        return [Task(row) for row in found]

    def _claim(self, tasks: Sequence[Task]) -> None:
        now = _now_us()
        queue = workload.QUEUE
        self._conn.executemany(
            _TASK,
            [
                (
                    uuid.uuid5(uuid.NAMESPACE_URL, task.message_id).bytes,
                    _TENANT,
                    queue,
                    task.message_id,
                    queue,
                    task.type,
                    WORKER,
                    task.priority,
                    task.key,
                    task.sent_at,
                    now,
                    task.body,
                    zlib.crc32(task.body),
                    task.payload_hash,
                )
                for task in tasks
            ],
        )
        self._conn.executemany(
            _KEY,
            [(_TENANT, queue, t.key, t.message_id, now) for t in tasks if t.key is not None],
        )
        self._tell("task.claimed", tasks, now)

    def _finish(self, tasks: Sequence[Task]) -> None:
        now = _now_us()
        queue = workload.QUEUE
        changed = self._conn.executemany(
            _DONE, [(now, _TENANT, queue, task.message_id, WORKER) for task in tasks]
        ).rowcount
        if changed != len(tasks):
            raise RuntimeError(f"{len(tasks) - changed} tasks were not ours")
        self._conn.executemany(
            _KEY_DONE,
            [
                (now + _HOUR_US, _TENANT, queue, t.key, t.message_id)
                for t in tasks
                if t.key is not None
            ],
        )
        self._tell("task.succeeded", tasks, now)

    def _tell(self, event: str, tasks: Sequence[Task], now: int) -> None:
        rows = []
        for task in tasks:
            data = json.dumps({"queue": workload.QUEUE, "type": task.type, "attempt": 1})
            self._seq += 1
            record = f"{self._seq}|{task.message_id}|{event}|{data}|{now}".encode()
            self._hash = hashlib.sha256(self._hash + record).digest()
            rows.append(
                (
                    os.urandom(16),
                    _TENANT,
                    workload.QUEUE,
                    task.message_id,
                    event,
                    data,
                    now,
                    WORKER,
                    self._seq,
                    self._hash,
                )
            )
        self._conn.executemany(_EVENT, rows)


def drain_by_steps(home: Path) -> tuple[int, float]:
    """One message at a time, four commits each."""
    return Loop(workload.database(home), batch=1, commit_each_step=True).run()


def drain_by_batches(home: Path, batch: int) -> tuple[int, float]:
    """The same writes, two commits for a whole batch."""
    return Loop(workload.database(home), batch=batch, commit_each_step=False).run()


def send(home: Path, count: int, *, per_commit: int) -> float:
    """Insert messages, so many in a commit; returns seconds."""
    ensure_schema(workload.database(home))
    with closing(connect(workload.database(home))) as conn:
        begin = time.perf_counter()
        for first in range(0, count, per_commit):
            rows = [_message(n) for n in range(first, min(first + per_commit, count))]
            conn.execute("BEGIN IMMEDIATE")
            conn.executemany(_SEND, rows)
            conn.execute("COMMIT")
        return time.perf_counter() - begin


def _message(n: int) -> tuple[Any, ...]:
    message_id = str(uuid.uuid4())
    body = json.dumps(
        {
            "message_id": message_id,
            "message_type": workload.NOOP,
            "payload": workload.payload(n),
            "metadata": {},
        }
    ).encode()
    return workload.QUEUE, message_id, _now_us(), body, zlib.crc32(body)


def connect(path: Path) -> sqlite3.Connection:
    """A connection with ackbone's durability and SQLite's other defaults."""
    conn = sqlite3.connect(path, isolation_level=None)
    conn.execute("PRAGMA journal_mode=WAL")
    conn.execute("PRAGMA synchronous=FULL")
    conn.execute("PRAGMA cache_size=-16000")
    return conn


def _now_us() -> int:
    return time.time_ns() // 1000
