"""Writes of a run before its end: effects, early replies, heartbeats; fenced by its token."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

from ackbone.core import events
from ackbone.core.errors import LeaseLost
from ackbone.core.store import EffectState, Reply, Run, Token
from ackbone.sqlite import rows
from ackbone.store.outgoing import created_event, delivery_row

from .ledger import Ledger
from .outbox_rows import DELIVERY


class RunWriter:
    """Runs inside a transaction of the writer thread."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def effect_begin(
        self, conn: sqlite3.Connection, run: Run, name: str, now_us: int, *, again: bool
    ) -> tuple[EffectState, bytes | None]:
        """Write the intent, unless an earlier attempt did: then say how far it got."""
        fence(conn, run)
        identity = _identity(run, name)
        found = conn.execute(
            "SELECT state, value, worker_id, epoch FROM effects WHERE tenant_id = ?"
            " AND subscription = ? AND message_id = ? AND name = ?",
            identity,
        ).fetchone()
        if found is not None:
            state, value, *token = found
            if state == "done":
                return EffectState.DONE, value
            if again and value is None and Token(*token) == run.token:
                return EffectState.NEW, None  # written by this very call, unheard
            return EffectState.UNKNOWN, value
        conn.execute(
            "INSERT INTO effects (tenant_id, subscription, message_id, name, state, worker_id,"
            " epoch, created_at) VALUES (?, ?, ?, ?, 'begun', ?, ?, ?)",
            (*identity, run.token.worker_id, run.token.epoch, now_us),
        )
        self._event(conn, run, events.EFFECT_BEGUN, {"name": name}, now_us)
        return EffectState.NEW, None

    def effect_done(
        self,
        conn: sqlite3.Connection,
        run: Run,
        name: str,
        value: bytes,
        now_us: int,
        *,
        again: bool,
    ) -> None:
        """Record the result. Not fenced: what happened happened, whoever knows of it."""
        written = conn.execute(
            "UPDATE effects SET state = 'done', value = ?, done_at = ? WHERE tenant_id = ?"
            " AND subscription = ? AND message_id = ? AND name = ? AND state = 'begun'",
            (value, now_us, *_identity(run, name)),
        ).rowcount
        if written or not again:
            self._event(conn, run, events.EFFECT_DONE, {"name": name}, now_us)

    def effect_raised(self, conn: sqlite3.Connection, run: Run, name: str, error: str) -> None:
        conn.execute(
            "UPDATE effects SET value = ? WHERE tenant_id = ? AND subscription = ?"
            " AND message_id = ? AND name = ? AND state = 'begun'",
            (error.encode(), *_identity(run, name)),
        )

    def effect_clear(self, conn: sqlite3.Connection, run: Run, name: str) -> None:
        fence(conn, run)
        conn.execute(
            "DELETE FROM effects WHERE tenant_id = ? AND subscription = ? AND message_id = ?"
            " AND name = ? AND state = 'begun'",
            _identity(run, name),
        )

    def heartbeat(
        self, conn: sqlite3.Connection, run: Run, data: Mapping[str, Any], now_us: int
    ) -> None:
        fence(conn, run)
        (consumer,) = conn.execute(
            "SELECT name FROM workers WHERE worker_id = ?", (run.token.worker_id,)
        ).fetchone()
        told = {"attempt": run.attempt, "consumer": consumer, **data}
        self._event(conn, run, events.HEARTBEAT, told, now_us)

    def reply_now(
        self, conn: sqlite3.Connection, run: Run, reply: Reply, n: int, now_us: int
    ) -> str:
        fence(conn, run)
        row = delivery_row(run, reply, n, now_us)
        if rows.insert(conn, DELIVERY, [row]):  # else it was there before, and was told of
            self._ledger.append(conn, run.token.worker_id, [created_event(row)], now_us)
        return str(row[0])

    def _event(
        self,
        conn: sqlite3.Connection,
        run: Run,
        event_type: str,
        data: Mapping[str, Any],
        now_us: int,
    ) -> None:
        head = (run.message.tenant_id, run.subscription, run.message.id)
        self._ledger.append(conn, run.token.worker_id, [(*head, event_type, data)], now_us)


def fence(conn: sqlite3.Connection, run: Run) -> None:
    """Raises LeaseLost unless the run still owns its message."""
    found = conn.execute(
        "SELECT 1 FROM queue_executions WHERE tenant_id = ? AND subscription = ?"
        " AND message_id = ? AND worker_id = ? AND epoch = ? AND status = 'running'",
        (
            run.message.tenant_id,
            run.subscription,
            run.message.id,
            run.token.worker_id,
            run.token.epoch,
        ),
    ).fetchone()
    if found is None:
        raise LeaseLost(
            f"message {run.message.id} was taken away from worker {run.token.worker_id} "
            "while it ran; this run can no longer write anything"
        )


def _identity(run: Run, name: str) -> tuple[str, str, str, str]:
    return run.message.tenant_id, run.subscription, run.message.id, name
