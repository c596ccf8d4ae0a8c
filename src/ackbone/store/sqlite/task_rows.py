"""`queue_executions` on SQLite: statements over many rows, addressed by their rowids.

Everything runs in the writer thread under the file's write lock: no row changes meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ackbone.core.ids import uuid7_block
from ackbone.core.outcome import Done, Status
from ackbone.core.store import Finished, Run
from ackbone.sqlitefile import rows
from ackbone.store.claiming import Choice
from ackbone.store.conditions import ENDED, none_of
from ackbone.store.outcomes import HANDED_BACK, Write, duration_ms, identity_of, run_uuid, write_of
from ackbone.store.record_rows import text_id
from ackbone.store.tables import Pair, Placed
from ackbone.store.tasks import Existing, Ready, Task, crc, run_info
from ackbone.store.unit import Identity, Row

from .sql import TASK

if TYPE_CHECKING:
    from ackbone.store.claiming import Claiming

_HEAD_COLUMNS = "subscription, queue_name, held, started_at, worker_id, epoch, attempt, due_at"
_TASK_COLUMNS = (
    "rowid, id, tenant_id, message_id, event_name, priority, idem_key, created_at, expires_at,"
    " correlation_id, trace_id, body, body_info, body_crc, body_sha256"
)
INSERT = f"INSERT OR IGNORE INTO queue_executions ({_HEAD_COLUMNS}, status, {_TASK_COLUMNS})"
APPEND = (
    f"INSERT OR IGNORE INTO queue_executions ({_HEAD_COLUMNS}, {_TASK_COLUMNS}, status, lane,"
    " lane_seq)"
)
ALIKE = (2, 4, 5, 12)
"""Tenant, type, priority and form of the body: places in `_columns`."""
_ROW = f"SELECT rowid FROM queue_executions WHERE {TASK}"
FIND = (
    "SELECT status, held, body_sha256, event_name, worker_id, epoch FROM queue_executions"
    f" WHERE {TASK}"
)
REOPEN = (
    "UPDATE queue_executions SET status = 'running', worker_id = ?4, epoch = epoch + 1,"
    f" attempt = attempt + 1 WHERE {TASK} AND status = 'open' AND crashes <= ?5"
    " AND body_sha256 = ?6 AND event_name = ?7"
    " RETURNING rowid, epoch, attempt, crashes, history, lost_by"
)
_HEAD = (
    "(a.lane IS NULL OR NOT EXISTS (SELECT 1 FROM queue_executions b"
    " WHERE b.tenant_id = a.tenant_id AND b.subscription = a.subscription AND b.lane = a.lane"
    f" AND b.lane_seq < a.lane_seq AND {none_of(*ENDED, column='b.status')}))"
)


def chosen(mark: int) -> dict[str, str]:
    """By the rule of a `Choice`, the condition that follows it, with its types at this mark."""
    types = f"(SELECT value FROM json_each(?{mark}))"
    return {
        "all": "",
        "only": f" AND event_name IN {types}",
        "but": f" AND event_name NOT IN {types}",
    }


def chosen_value(choice: Choice) -> tuple[str, ...]:
    """The value for `chosen`, if its rule has one."""
    return () if choice.rule == "all" else (msgspec.json.encode(choice.types).decode(),)


CLAIM_READY = {
    rule: "UPDATE queue_executions SET status = 'running', worker_id = ?1, epoch = epoch + 1,"
    " attempt = attempt + 1 WHERE rowid IN (SELECT rowid FROM queue_executions a"
    " WHERE subscription = ?2 AND status = 'ready' AND priority = ?3 AND due_at <= ?4"
    f" AND crashes BETWEEN ?5 AND ?6{condition} AND {_HEAD} ORDER BY due_at LIMIT ?7)"
    " RETURNING tenant_id, message_id, epoch, attempt, crashes, lane, idem_key, expires_at,"
    " history, body, body_info, body_crc, lost_by, rowid"
    for rule, condition in chosen(8).items()
}
READY_HEADS = {
    rule: "SELECT count(*) FROM (SELECT 1 FROM queue_executions WHERE subscription = ?1"
    " AND status = 'ready' AND priority IN (0, 1, 2, 3) AND due_at <= ?2 AND crashes = 0"
    f" AND lane IS NOT NULL{condition} LIMIT ?3)"
    for rule, condition in chosen(4).items()
}
_SUCCEEDED = (
    "status = 'succeeded', result = {}, completed_at = {}, duration_ms = {}, agent_run_id = {},"
    " retry_count = {}, body = NULL, body_info = NULL, due_at = NULL"
)
_OWNED = (
    "WHERE tenant_id = ? AND subscription = ? AND message_id = ?"
    " AND worker_id = ? AND epoch = ? AND status = 'running' RETURNING held"
)
_ONE_DONE = f"UPDATE queue_executions SET {_SUCCEEDED.format(*'?????')} {_OWNED}"
_HOLD = (
    "held = 'store', body = coalesce(body, ?), body_info = coalesce(body_info, ?),"
    " body_crc = coalesce(body_crc, ?)"
)
_HAND_BACK = "status = CASE held WHEN 'store' THEN 'ready' ELSE 'open' END"
_TOKEN = f"SELECT worker_id, epoch, status FROM queue_executions WHERE {TASK}"
APPROVED = (
    "SELECT a.tenant_id, a.message_id, a.id, a.rule, a.payload_sha256 FROM json_each(?1) j"
    " CROSS JOIN approvals a WHERE a.tenant_id = json_extract(j.value, '$[0]')"
    " AND a.message_id = json_extract(j.value, '$[1]') AND a.subscription = ?2"
    " AND a.state = 'approved'"
)


def all_done_statement(values: str) -> str:
    """Many plain successes at once; see `_done_values`."""
    columns = ("u.column1", "?1", "u.column2", "u.column3", "u.column4")
    return (
        f"UPDATE queue_executions SET {_SUCCEEDED.format(*columns)}"
        f" FROM (VALUES {values}) u WHERE queue_executions.rowid = u.column8"
        " AND worker_id = u.column5 AND epoch = u.column6 AND message_id = u.column7"
        " AND held = u.column9 AND status = 'running'"
    )


ALL_DONE_ALIKE = (3, 4, 5, 8)
"""Earlier failures, worker, epoch and holder: places in `_done_values`."""


class SqliteTaskRows:
    """`TaskRows` in one transaction of the writer thread."""

    def __init__(self, conn: sqlite3.Connection, now_us: int) -> None:
        self._conn = conn
        self._now_us = now_us

    # -- claim ------------------------------------------------------------------------------------

    async def claim(self, claim: Claiming, new: Sequence[Task]) -> Sequence[Task]:
        shared = (*self._common(claim), claim.worker.worker_id, 1, 1, None, Status.RUNNING)
        inserted = rows.insert_columns(
            self._conn, INSERT, self._columns(claim, new), shared=shared, alike=ALIKE
        )
        if inserted == len(new):
            return new
        return [task for task in new if self._is_new(claim, task) or self._reopen(claim, task)]

    def _common(self, claim: Claiming) -> tuple[Any, ...]:
        return claim.sub.name, claim.sub.queue, claim.held, self._now_us

    def _columns(self, claim: Claiming, tasks: Sequence[Task]) -> tuple[Sequence[Any], ...]:
        """Values of `_TASK_COLUMNS`. The rowids are given out here, so that nobody has to look for
        them. The body and its form stay only where the store holds the message."""
        (last,) = self._conn.execute("SELECT max(rowid) FROM queue_executions").fetchone()
        for row, task in enumerate(tasks, (last or 0) + 1):
            task.row = row
        messages = [task.message for task in tasks]
        bodies: Sequence[bytes | None]
        forms: Sequence[str | None]
        checks: Sequence[int | None]
        bodies = forms = checks = (None,) * len(tasks)
        if claim.held == "store":
            deliveries = [task.candidate.delivery for task in tasks]
            bodies = [delivery.body for delivery in deliveries]
            forms = [task.form for task in tasks]
            checks = [crc(d.body) if d.crc is None else d.crc for d in deliveries]
        return (
            [task.row for task in tasks],
            uuid7_block(len(tasks)),
            [message.tenant_id for message in messages],
            [message.id for message in messages],
            [message.type for message in messages],
            [message.priority for message in messages],
            [task.key for task in tasks],
            [task.created_us for task in tasks],
            [task.expires_us for task in tasks],
            [message.correlation_id for message in messages],
            [None if message.trace is None else message.trace_id for message in messages],
            bodies,
            forms,
            checks,
            [task.candidate.sha256 for task in tasks],
        )

    def _is_new(self, claim: Claiming, task: Task) -> bool:
        identity = (task.message.tenant_id, claim.sub.name, task.message.id)
        found = self._conn.execute(_ROW, identity).fetchone()
        return bool(found == (task.row,))

    def _reopen(self, claim: Claiming, task: Task) -> bool:
        message = task.message
        identity = (message.tenant_id, claim.sub.name, message.id)
        same = (claim.most_crashes, task.candidate.sha256, message.type)
        found = self._conn.execute(REOPEN, (*identity, claim.worker.worker_id, *same)).fetchone()
        if found is None:
            return False
        task.row, task.epoch, task.attempt, task.crashes, task.history, task.lost_by = found
        return True

    async def find(self, subscription: str, pairs: Sequence[Pair]) -> Mapping[Pair, Existing]:
        found: dict[Pair, Existing] = {}
        for tenant_id, message_id in pairs:
            row = self._conn.execute(FIND, (tenant_id, subscription, message_id)).fetchone()
            if row is not None:
                found[tenant_id, message_id] = Existing(*row)
        return found

    async def lock(self, subscription: str, pairs: Sequence[Pair]) -> None:
        """The write lock of the file is enough."""

    async def append(self, claim: Claiming, placed: Sequence[Placed]) -> Sequence[Task]:
        tasks = [each.task for each in placed]
        columns = (
            *self._columns(claim, tasks),
            [each.status for each in placed],
            [task.message.ordering_key for task in tasks],
            [each.lane_seq for each in placed],
        )
        shared = (*self._common(claim), None, 0, 0, self._now_us)
        inserted = rows.insert_columns(self._conn, APPEND, columns, shared=shared, alike=ALIKE)
        if inserted == len(tasks):
            return tasks
        return [task for task in tasks if self._is_new(claim, task)]

    async def claim_due(
        self,
        claim: Claiming,
        *,
        choice: Choice,
        crashes: tuple[int, int],
        priorities: Sequence[int],
        limit: int,
    ) -> Sequence[Ready]:
        found: list[Ready] = []
        statement, types = CLAIM_READY[choice.rule], chosen_value(choice)
        for priority in priorities:
            if len(found) < limit:
                asked = (claim.worker.worker_id, claim.sub.name, priority, self._now_us)
                values = (*asked, *crashes, limit - len(found), *types)
                found += [Ready(*row) for row in self._conn.execute(statement, values).fetchall()]
        return found

    async def ready_heads(self, claim: Claiming, choice: Choice, limit: int) -> int:
        values = (claim.sub.name, self._now_us, limit, *chosen_value(choice))
        (found,) = self._conn.execute(READY_HEADS[choice.rule], values).fetchone()
        return int(found)

    async def approved(self, subscription: str, pairs: Sequence[Pair]) -> Sequence[Row]:
        marks = msgspec.json.encode(pairs).decode()
        found = self._conn.execute(APPROVED, (marks, subscription))
        return [(*pair, text_id(blob), rule, digest) for *pair, blob, rule, digest in found]

    # -- finish -----------------------------------------------------------------------------------

    async def finish(self, batch: Sequence[Finished]) -> list[str | None]:
        plain = [item for item in batch if type(item.outcome) is Done]
        if plain and not self._all_done(plain):
            return [self._one(item) for item in batch]
        if len(plain) == len(batch):
            return [_holder(item) for item in batch]
        return [_holder(item) if type(item.outcome) is Done else self._one(item) for item in batch]

    def _all_done(self, batch: Sequence[Finished]) -> bool:
        """All or nothing: True if every row still bore its token, and was held by whom the run
        knows of. Otherwise nothing was written."""
        conn = self._conn
        values = [_done_values(item) for item in batch]
        conn.execute("SAVEPOINT done")
        changed = rows.update(
            conn, all_done_statement, values, shared=(self._now_us,), alike=ALL_DONE_ALIKE
        )
        if changed != len(batch):
            conn.execute("ROLLBACK TO done")
        conn.execute("RELEASE done")
        return changed == len(batch)

    def _one(self, item: Finished) -> str | None:
        """One run of any outcome, by its identity and token; returns who holds the message."""
        now_us, run = self._now_us, item.run
        if type(item.outcome) is Done:
            statement = _ONE_DONE
            run_id = run_uuid(item.agent_run_id)
            values: Sequence[Any] = (item.result, now_us, duration_ms(item), run_id, run.failures)
        else:
            assignments, values = _assignments(write_of(item, now_us), run, now_us)
            statement = f"UPDATE queue_executions SET {assignments} {_OWNED}"
        token = (run.token.worker_id, run.token.epoch)
        found = self._conn.execute(statement, (*values, *identity_of(run), *token)).fetchone()
        return None if found is None else str(found[0])

    async def tokens(self, runs: Sequence[Run]) -> Mapping[Identity, tuple[int | None, int, str]]:
        found = {run: self._conn.execute(_TOKEN, run).fetchone() for run in map(identity_of, runs)}
        return {identity: row for identity, row in found.items() if row is not None}


def _holder(item: Finished) -> str:
    return "store" if item.run.delivery is None else "broker"


def _done_values(item: Finished) -> tuple[Any, ...]:
    """One row of `all_done_statement`; its `?1` is the time of now."""
    run = item.run
    token, run_id = run.token, item.agent_run_id
    return (
        item.result,
        duration_ms(item),
        None if run_id is None else run_uuid(run_id),
        0 if run.attempt == 1 else run.failures,
        token.worker_id,
        token.epoch,
        run.message.id,
        run.row,
        "store" if run.delivery is None else "broker",
    )


def _assignments(write: Write, run: Run, now_us: int) -> tuple[str, list[Any]]:
    """`name = ?, …` of an UPDATE, and the values for its marks."""
    handed_back = write.status == HANDED_BACK
    parts: list[str] = [_HAND_BACK if handed_back else "status = ?"]
    values: list[Any] = [] if handed_back else [write.status]
    if write.hold:
        parts.append(_HOLD)
        values += [run.body, run_info(run), crc(run.body)]
    if write.ended:
        parts.append("body = NULL")
    due_us = None if write.wait_us is None else now_us + write.wait_us
    for column, value in (
        ("completed_at", now_us if write.ended else None),
        ("due_at", due_us),
        ("duration_ms", write.duration_ms),
        ("retry_count", write.failures),
        ("error_message", write.error),
        ("history", write.history),
        ("parked_kind", write.parked_kind),
    ):
        if value is not None:
            parts.append(f"{column} = ?")
            values.append(value)
    if write.given_back:
        parts.append("attempt = attempt - 1")
    if write.crashed:
        parts.append("crashes = crashes + 1")
    if write.leave_lane:
        parts.append("lane = NULL")
    return ", ".join(parts), values
