"""`PostgresOperations`: what an operator does, each act one transaction with its ledger event.

Every change is a compare-and-set on the state that the operator saw: two people who act on one
thing at once cannot both win, and the loser is told what it is now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from holdfast.core import events
from holdfast.core.approvals import Approval
from holdfast.core.clock import from_us, to_us
from holdfast.core.errors import Conflict, HoldfastError, NotFound, StoreUnavailable
from holdfast.core.message import DEFAULT_TENANT
from holdfast.core.notices import End
from holdfast.core.outcome import Status
from holdfast.core.records import Cancelled, EffectWord, Identity, Replay, Resumption
from holdfast.core.store import Worker
from holdfast.store.approval import Answering
from holdfast.store.letter import storable
from holdfast.store.outgoing import outbox_row
from holdfast.store.seen import uuid_text

from . import approvals, orchestration, parked
from .change import Change
from .database import Tx
from .finish import OUTBOX, outbox_values
from .store import Operation, PostgresStore
from .tasks import PK
from .wake import OUTGOING, WORK

T = TypeVar("T")
log = logging.getLogger("holdfast.store")

_SETTLE = (
    "UPDATE dead_letters SET state = $2, settled_at = clock_timestamp(), replay_id = $3"
    " WHERE id = $1::uuid AND state = 'open' RETURNING tenant_id, subscription, message_id"
)
_LETTER = "SELECT state, settled_at, replay_id FROM dead_letters WHERE id = $1::uuid"
_UNKNOWN = f"SELECT name FROM effects WHERE {PK} AND state = 'begun' ORDER BY name"
_EFFECT_DONE = (
    "UPDATE effects SET state = 'done', value = $5::bytea, done_at = clock_timestamp()"
    f" WHERE {PK} AND name = $4 AND state = 'begun' RETURNING 1"
)
_EFFECT_CLEARED = f"DELETE FROM effects WHERE {PK} AND name = $4 AND state = 'begun' RETURNING 1"
_PAUSE = (
    "INSERT INTO sources (subscription, paused_at) VALUES ($1, clock_timestamp())"
    " ON CONFLICT (subscription, part) DO UPDATE SET paused_at = excluded.paused_at"
    " WHERE sources.paused_at IS NULL RETURNING 1"
)
_UNPAUSE = (
    "UPDATE sources SET paused_at = NULL WHERE subscription = $1 AND paused_at IS NOT NULL"
    " RETURNING 1"
)


class PostgresOperations:
    """`Operations` and `Answers` under a worker number of their own, which chains their events in
    the ledger. What is sent goes through the outbox. Use it as an async context manager."""

    def __init__(self, store: PostgresStore, *, by: str, beat_every_s: float = 1.0) -> None:
        self._store = store
        self._by = by
        self._beat_every_s = beat_every_s
        self._worker: Worker | None = None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PostgresOperations:
        self._worker = await self._store.register(self._by)
        self._beating = asyncio.create_task(self._beat(self._worker), name="holdfast operator")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        beating, self._beating = self._beating, None
        worker, self._worker = self._worker, None
        if beating is not None:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating
        if worker is not None:
            await self._store.leave(worker)

    async def _beat(self, worker: Worker) -> None:
        """A paced replay may take hours: stay alive, or the fleet declares this number dead."""
        while True:
            try:
                await asyncio.to_thread(self._store.beat, worker)
            except StoreUnavailable as error:
                log.warning("no sign of life could be given: %s", error)
            await asyncio.sleep(self._beat_every_s)

    # -- dead letters -----------------------------------------------------------------------------

    async def replay(self, batch: Sequence[Replay]) -> Sequence[HoldfastError | None]:
        async def op(tx: Tx, change: Change) -> list[HoldfastError | None]:
            answers: list[HoldfastError | None] = []
            for item in batch:
                answers.append(await self._replay(tx, change, item))
            return answers

        return await self._write(op)

    async def _replay(self, tx: Tx, change: Change, item: Replay) -> HoldfastError | None:
        new_id = item.send.outgoing.id
        settled = await _settle(tx, item.letter_id, "replayed", new_id)
        if settled is None:  # by this very call, unheard
            return None
        if isinstance(settled, HoldfastError):
            return settled
        data: dict[str, Any] = {
            "dead_letter_id": item.letter_id,
            "replay_id": new_id,
            "queue": item.send.queue,
            "by": self._by,
        }
        if item.changed:
            data["changed"] = list(item.changed)
        kind = events.DLQ_EDITED if item.changed else events.DLQ_REPLAYED
        change.entries.append((*settled, kind, data))
        tx.at_end(OUTBOX, *outbox_values([outbox_row(item.send, await tx.moment())]))
        change.topics.add(OUTGOING)
        return None

    async def discard_letters(
        self, letter_ids: Sequence[str], *, reason: str
    ) -> Sequence[HoldfastError | None]:
        async def op(tx: Tx, change: Change) -> list[HoldfastError | None]:
            answers: list[HoldfastError | None] = []
            for letter_id in letter_ids:
                settled = await _settle(tx, letter_id, "discarded", None)
                if settled is None or isinstance(settled, HoldfastError):
                    answers.append(settled)
                    continue
                data = {
                    "dead_letter_id": letter_id,
                    "reason": storable(reason),
                    "by": self._by,
                }
                change.entries.append((*settled, events.DLQ_DISCARDED, data))
                answers.append(None)
            return answers

        return await self._write(op)

    # -- parked tasks -----------------------------------------------------------------------------

    async def resume(self, task: Identity, *, effects: Sequence[EffectWord] = ()) -> None:
        identity = (task.tenant_id, task.subscription, task.message_id)

        async def op(tx: Tx, change: Change) -> None:
            kind = await parked.parked_kind(tx, identity)
            question = await approvals.pending_of(tx, identity)
            if question is not None:
                raise Conflict(
                    f"message {task.message_id} waits for an answer: 'holdfast approvals approve "
                    f"{question}' lets it run, 'holdfast approvals reject {question}' ends it"
                )
            for effect in effects:
                await self._settle_effect(tx, change, identity, effect)
            unknown = await _unknown_effects(tx, identity)
            if kind == "effect_unknown" and unknown:
                raise Conflict(
                    f"nobody knows whether {', '.join(unknown)} of message {task.message_id} "
                    "happened. Look, and say so: "
                    + " ".join(f"--effect {name}=done|not-done" for name in unknown)
                )
            await parked.resume(tx, change, identity, by=self._by)

        await self._write(op)

    async def _settle_effect(
        self, tx: Tx, change: Change, identity: tuple[str, str, str], effect: EffectWord
    ) -> None:
        if effect.word is Resumption.DONE:
            changed = await tx.rows(_EFFECT_DONE, *identity, effect.name, effect.value)
            kind = events.EFFECT_DONE
        else:
            changed = await tx.rows(_EFFECT_CLEARED, *identity, effect.name)
            kind = events.EFFECT_CLEARED
        if not changed:
            names = ", ".join(await _unknown_effects(tx, identity)) or "none"
            raise Conflict(
                f"message {identity[2]} has no effect {effect.name!r} whose end is unknown "
                f"(there is: {names})"
            )
        change.entries.append((*identity, kind, {"name": effect.name, "by": self._by}))

    async def discard_parked(self, task: Identity, *, reason: str) -> None:
        identity = (task.tenant_id, task.subscription, task.message_id)

        async def op(tx: Tx, change: Change) -> None:
            kind = await parked.parked_kind(tx, identity)
            await approvals.withdraw(tx, change, identity, by=self._by)
            await parked.end(
                tx,
                change,
                identity,
                Status.DISCARDED,
                reason=reason,
                data={"kind": kind, "by": self._by},
                keep_letter=False,
            )

        await self._write(op)

    # -- approvals --------------------------------------------------------------------------------

    async def approve(self, approval_id: str, *, by: str, note: str = "") -> Approval:
        return await self._answer(approvals.approve, approval_id, by, note)

    async def reject(self, approval_id: str, *, by: str, note: str = "") -> Approval:
        return await self._answer(approvals.reject, approval_id, by, note)

    async def _answer(
        self,
        say: Callable[[Tx, Change, str, Answering], Awaitable[Approval]],
        approval_id: str,
        by: str,
        note: str,
    ) -> Approval:
        async def op(tx: Tx, change: Change) -> Approval:
            now_us = await tx.moment()
            expiry_us = 0 if self._store.expiry_paused else now_us
            answer = Answering(by=by, note=note, now_us=now_us, expiry_us=expiry_us)
            return await say(tx, change, approval_id, answer)

        return await self._write(op)

    # -- tasks of an orchestrator -----------------------------------------------------------------

    async def cancel(self, task: Identity, *, queue: str, reason: str) -> Cancelled:
        why = {"reason": storable(reason), "by": self._by}
        identity = (task.tenant_id, task.subscription, task.message_id)
        return await self._write(
            lambda tx, change: orchestration.cancel(tx, change, identity, queue, why)
        )

    async def record(self, ends: Sequence[End]) -> int:
        worker = self._worker.worker_id if self._worker is not None else 0
        return await self._write(lambda tx, change: orchestration.record(tx, change, ends, worker))

    # -- queues -----------------------------------------------------------------------------------

    async def pause(self, queue: str) -> bool:
        return await self._set_paused(queue, _PAUSE, events.QUEUE_PAUSED)

    async def unpause(self, queue: str) -> bool:
        return await self._set_paused(queue, _UNPAUSE, events.QUEUE_RESUMED)

    async def _set_paused(self, queue: str, statement: str, event_type: str) -> bool:
        async def op(tx: Tx, change: Change) -> bool:
            if not await tx.rows(statement, queue):
                return False
            # An act on a queue belongs to no message: its events stand under an empty task id.
            data = {"queue": queue, "by": self._by}
            change.entries.append((DEFAULT_TENANT, queue, "", event_type, data))
            change.topics.add(WORK)
            return True

        return await self._write(op)

    async def _write(self, op: Operation[T]) -> T:
        if self._worker is None:
            raise RuntimeError("operations are not open: use 'async with'")
        return await self._store.write(op, worker_id=self._worker.worker_id)


async def _settle(
    tx: Tx, letter_id: str, state: str, replay_id: str | None
) -> tuple[str, str, str] | HoldfastError | None:
    """An open letter gets its end: its task's identity, or why it cannot.

    None: an attempt of this very call did it, whose answer was lost.
    """
    changed = await tx.rows(_SETTLE, uuid_text(letter_id), state, replay_id)
    if changed:
        tenant_id, subscription, message_id = changed[0]
        return tenant_id, subscription, message_id
    found = await tx.rows(_LETTER, uuid_text(letter_id))
    if not found:
        return NotFound(f"there is no dead letter {letter_id}")
    was, settled_at, as_id = found[0]
    if tx.repeated and (was, as_id) == (state, replay_id):
        return None
    when = "" if settled_at is None else f" at {from_us(to_us(settled_at)):%Y-%m-%d %H:%M:%S} UTC"
    as_what = f" as message {as_id}" if as_id else ""
    return Conflict(f"dead letter {letter_id} was {was}{as_what}{when}; it is not open any more")


async def _unknown_effects(tx: Tx, identity: tuple[str, str, str]) -> list[str]:
    return [name for (name,) in await tx.rows(_UNKNOWN, *identity)]
