"""`SqliteOperations`: what an operator does, each act one transaction with its ledger event.

Every change is a compare-and-set on the state that the operator saw: two people who act on one
thing at once cannot both win, and the loser is told what it is now.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast.core import events
from holdfast.core.approvals import Approval
from holdfast.core.broker import Transactional
from holdfast.core.errors import HoldfastError, NotFound
from holdfast.core.message import DEFAULT_TENANT, Message
from holdfast.core.notices import End
from holdfast.core.outcome import Status
from holdfast.core.records import Cancelled, EffectWord, Identity, Replay, Resumption
from holdfast.core.store import Send
from holdfast.core.text import storable
from holdfast.sqlite import rows
from holdfast.sqlite.file import TURN_WAIT_S
from holdfast.sqlite.wake import OUTGOING
from holdfast.store.approval import Answering
from holdfast.store.operator import (
    Operator,
    effects_are_unknown,
    letter_is_settled,
    no_such_effect,
    waits_for_an_answer,
)
from holdfast.store.outgoing import outbox_row

from . import approvals, delivery_desk, orchestration, parked
from .ledger import Entry
from .outbox_rows import OUTBOX
from .store import SqliteStore

T = TypeVar("T")
_TASK = parked.TASK


class SqliteOperations(Operator):
    """`Operations` under a worker number of their own, which chains their events in the ledger.

    `queue` is the broker on the store's file, if there is one; else what is sent goes through the
    outbox. Use it as an async context manager.
    """

    def __init__(
        self, store: SqliteStore, queue: Transactional | None, *, by: str, beat_every_s: float = 1.0
    ) -> None:
        super().__init__(store, by=by, beat_every_s=beat_every_s)
        self._store = store
        self._queue = queue

    # -- dead letters -----------------------------------------------------------------------------

    async def replay(self, batch: Sequence[Replay]) -> Sequence[HoldfastError | None]:
        return await self._write(lambda conn, now: self._replay(conn, batch, now))

    def _replay(
        self, conn: sqlite3.Connection, batch: Sequence[Replay], now_us: int
    ) -> list[HoldfastError | None]:
        answers: list[HoldfastError | None] = []
        entries: list[Entry] = []
        sends: list[Send] = []
        for item in batch:
            new_id = item.send.outgoing.id
            settled = _settle(conn, item.letter_id, "replayed", new_id, now_us)
            if isinstance(settled, HoldfastError):
                answers.append(settled)
                continue
            entries.append((*settled, *self._replayed(item)))
            sends.append(item.send)
            answers.append(None)
        self._publish(conn, sends, now_us)
        self._append(conn, entries, now_us)
        return answers

    def _publish(self, conn: sqlite3.Connection, sends: Sequence[Send], now_us: int) -> None:
        if not sends:
            return
        if self._queue is None:
            rows.insert(conn, OUTBOX, [outbox_row(send, now_us) for send in sends])
            self._store.file.wake_after_commit(OUTGOING)
            return
        for queue in dict.fromkeys(send.queue for send in sends):
            batch = [send.outgoing for send in sends if send.queue == queue]
            self._queue.publish_in(conn, queue, batch)

    async def discard_letters(
        self, letter_ids: Sequence[str], *, reason: str
    ) -> Sequence[HoldfastError | None]:
        def op(conn: sqlite3.Connection, now_us: int) -> list[HoldfastError | None]:
            answers: list[HoldfastError | None] = []
            entries: list[Entry] = []
            for letter_id in letter_ids:
                settled = _settle(conn, letter_id, "discarded", None, now_us)
                if isinstance(settled, HoldfastError):
                    answers.append(settled)
                    continue
                data = self._discarded(letter_id, reason)
                entries.append((*settled, events.DLQ_DISCARDED, data))
                answers.append(None)
            self._append(conn, entries, now_us)
            return answers

        return await self._write(op)

    # -- parked tasks -----------------------------------------------------------------------------

    async def resume(self, task: Identity, *, effects: Sequence[EffectWord] = ()) -> None:
        await self._write(lambda conn, now: self._resume(conn, task, effects, now))

    def _resume(
        self,
        conn: sqlite3.Connection,
        task: Identity,
        effects: Sequence[EffectWord],
        now_us: int,
    ) -> None:
        identity = (task.tenant_id, task.subscription, task.message_id)
        kind = parked.parked_kind(conn, identity)
        question = approvals.pending_of(conn, identity)
        if question is not None:
            raise waits_for_an_answer(task.message_id, question)
        entries: list[Entry] = []
        for effect in effects:
            entries += self._settle_effect(conn, identity, effect, now_us)
        unknown = _unknown_effects(conn, identity)
        if kind == "effect_unknown" and unknown:
            raise effects_are_unknown(task.message_id, unknown)
        entries.append(parked.resume(conn, identity, by=self._by, now_us=now_us))
        self._append(conn, entries, now_us)
        self._store.file.wake_after_commit()

    def _settle_effect(
        self,
        conn: sqlite3.Connection,
        identity: tuple[str, str, str],
        effect: EffectWord,
        now_us: int,
    ) -> list[Entry]:
        if effect.word is Resumption.DONE:
            done = f"SELECT 1 FROM effects{_TASK} AND name = ? AND state = 'done'"
            if conn.execute(done, (*identity, effect.name)).fetchone():
                return []  # its own result came late, and counts
            changed = conn.execute(
                f"UPDATE effects SET state = 'done', value = ?, done_at = ?{_TASK}"
                " AND name = ? AND state = 'begun'",
                (effect.value, now_us, *identity, effect.name),
            ).rowcount
            kind = events.EFFECT_DONE
        else:
            changed = conn.execute(
                f"DELETE FROM effects{_TASK} AND name = ? AND state = 'begun'",
                (*identity, effect.name),
            ).rowcount
            kind = events.EFFECT_CLEARED
        if changed != 1:
            raise no_such_effect(identity[2], effect.name, _unknown_effects(conn, identity))
        return [(*identity, kind, {"name": effect.name, "by": self._by})]

    async def discard_parked(self, task: Identity, *, reason: str) -> None:
        await self._write(lambda conn, now: self._discard_parked(conn, task, reason, now))

    def _discard_parked(
        self, conn: sqlite3.Connection, task: Identity, reason: str, now_us: int
    ) -> None:
        identity = (task.tenant_id, task.subscription, task.message_id)
        data = {"kind": parked.parked_kind(conn, identity), "by": self._by}
        entries = approvals.withdraw(conn, identity, by=self._by, now_us=now_us)
        entries += parked.end(
            conn,
            identity,
            Status.DISCARDED,
            reason=reason,
            data=data,
            keep_letter=False,
            now_us=now_us,
        )
        self._append(conn, entries, now_us)
        self._store.file.wake_after_commit()

    # -- approvals --------------------------------------------------------------------------------

    async def approve(self, approval_id: str, *, by: str, note: str = "") -> Approval:
        return await self._answer(approvals.approve, approval_id, by, note)

    async def reject(self, approval_id: str, *, by: str, note: str = "") -> Approval:
        return await self._answer(approvals.reject, approval_id, by, note)

    async def _answer(
        self,
        say: Callable[[sqlite3.Connection, str, Answering], tuple[Approval, list[Entry]]],
        approval_id: str,
        by: str,
        note: str,
    ) -> Approval:
        def op(conn: sqlite3.Connection, now_us: int) -> Approval:
            answer = Answering(
                by=by, note=note, now_us=now_us, expiry_us=self._store.expiry_us(now_us)
            )
            approval, entries = say(conn, approval_id, answer)
            self._append(conn, entries, now_us)
            self._store.file.wake_after_commit()
            return approval

        return await self._write(op)

    # -- tasks of an orchestrator -----------------------------------------------------------------

    async def cancel(self, task: Identity, *, queue: str, reason: str) -> Cancelled:
        def op(conn: sqlite3.Connection, now_us: int) -> Cancelled:
            identity = (task.tenant_id, task.subscription, task.message_id)
            why = {"reason": storable(reason), "by": self._by}
            came, entries = orchestration.cancel(conn, identity, queue, why, now_us)
            self._append(conn, entries, now_us)
            if entries:
                self._store.file.wake_after_commit()
            return came

        return await self._write(op)

    async def submitted(self, subscription: str, tasks: Sequence[Message]) -> None:
        def op(conn: sqlite3.Connection, now_us: int) -> None:
            entries = orchestration.submitted(conn, subscription, tasks)
            self._append(conn, entries, now_us)

        await self._write(op)

    async def record(self, ends: Sequence[End]) -> int:
        def op(conn: sqlite3.Connection, now_us: int) -> int:
            worker = self._number
            entries = orchestration.record(conn, ends, worker, now_us)
            # They were told by whoever ran them: nobody is told again.
            told = {(tenant_id, sub, task_id) for tenant_id, sub, task_id, _, _ in entries}
            self._store.ledger.append(conn, worker, entries, now_us, told=told)
            return len(told)

        return await self._write(op)

    # -- queues -----------------------------------------------------------------------------------

    async def pause(self, queue: str) -> bool:
        return await self._write(
            lambda conn, now: self._set_paused(conn, queue, now, events.QUEUE_PAUSED)
        )

    async def unpause(self, queue: str) -> bool:
        return await self._write(
            lambda conn, now: self._set_paused(conn, queue, now, events.QUEUE_RESUMED)
        )

    def _set_paused(
        self, conn: sqlite3.Connection, queue: str, now_us: int, event_type: str
    ) -> bool:
        if event_type == events.QUEUE_PAUSED:
            changed = conn.execute(
                "INSERT INTO sources (subscription, paused_at) VALUES (?, ?)"
                " ON CONFLICT (subscription, part) DO UPDATE SET paused_at = excluded.paused_at"
                " WHERE sources.paused_at IS NULL RETURNING 1",
                (queue, now_us),
            ).fetchall()
        else:
            changed = conn.execute(
                "UPDATE sources SET paused_at = NULL WHERE subscription = ?"
                " AND paused_at IS NOT NULL RETURNING 1",
                (queue,),
            ).fetchall()
        if not changed:
            return False
        # An act on a queue belongs to no message: its events stand under an empty task id.
        entry: Entry = (DEFAULT_TENANT, queue, "", event_type, {"queue": queue, "by": self._by})
        self._append(conn, [entry], now_us)
        self._store.file.wake_after_commit()
        return True

    # -- replies ----------------------------------------------------------------------------------

    async def retry_deliveries(self, ids: Sequence[str]) -> Sequence[HoldfastError | None]:
        return await self._on_replies(
            ids, lambda conn, each, now: delivery_desk.retry(conn, each, self._by, now)
        )

    async def edit_delivery(self, delivery_id: str, *, content: str) -> None:
        def op(conn: sqlite3.Connection, now_us: int) -> None:
            entry = delivery_desk.edit(conn, delivery_id, content, self._by)
            self._append(conn, [entry], now_us)

        await self._write(op)

    async def discard_deliveries(
        self, ids: Sequence[str], *, reason: str
    ) -> Sequence[HoldfastError | None]:
        return await self._on_replies(
            ids, lambda conn, each, now: delivery_desk.discard(conn, each, reason, self._by, now)
        )

    async def _on_replies(
        self, ids: Sequence[str], act: Callable[[sqlite3.Connection, str, int], Entry]
    ) -> list[HoldfastError | None]:
        def op(conn: sqlite3.Connection, now_us: int) -> list[HoldfastError | None]:
            answers, entries = delivery_desk.each(ids, lambda each: act(conn, each, now_us))
            self._append(conn, entries, now_us)
            self._store.file.wake_after_commit(OUTGOING)
            return answers

        return await self._write(op)

    async def pause_channel(self, channel: str) -> bool:
        return await self._set_channel(channel, on=True)

    async def unpause_channel(self, channel: str) -> bool:
        return await self._set_channel(channel, on=False)

    async def _set_channel(self, channel: str, *, on: bool) -> bool:
        def op(conn: sqlite3.Connection, now_us: int) -> bool:
            entry = delivery_desk.set_paused(conn, channel, self._by, on=on)
            self._append(conn, [] if entry is None else [entry], now_us)
            self._store.file.wake_after_commit(OUTGOING)
            return entry is not None

        return await self._write(op)

    # -- the transaction --------------------------------------------------------------------------

    async def _write(self, op: Callable[[sqlite3.Connection, int], T]) -> T:
        clock = self._store.clock
        return await self._store.file.write(
            lambda conn: op(conn, clock.now_us()), within_s=TURN_WAIT_S
        )

    def _append(self, conn: sqlite3.Connection, entries: Sequence[Entry], now_us: int) -> None:
        self._store.ledger.append(conn, self._number, entries, now_us)


def _settle(
    conn: sqlite3.Connection, letter_id: str, state: str, replay_id: str | None, now_us: int
) -> tuple[str, str, str] | HoldfastError:
    """An open letter gets its end: its task's identity, or why it cannot."""
    blob = uuid.UUID(letter_id).bytes
    changed = conn.execute(
        "UPDATE dead_letters SET state = ?, settled_at = ?, replay_id = ? WHERE id = ?"
        " AND state = 'open' RETURNING tenant_id, subscription, message_id",
        (state, now_us, replay_id, blob),
    ).fetchone()
    if changed is not None:
        return changed[0], changed[1], changed[2]
    found = conn.execute(
        "SELECT state, settled_at, replay_id FROM dead_letters WHERE id = ?", (blob,)
    ).fetchone()
    if found is None:
        return NotFound(f"there is no dead letter {letter_id}")
    was, settled_us, as_id = found
    return letter_is_settled(letter_id, was, as_id, settled_us)


def _unknown_effects(conn: sqlite3.Connection, identity: tuple[str, str, str]) -> list[str]:
    found = conn.execute(
        f"SELECT name FROM effects{_TASK} AND state = 'begun' ORDER BY name", identity
    )
    return [name for (name,) in found]
