"""What an operator does, each act one transaction with its ledger event.

Every change is a compare-and-set on the state that the operator saw: two people who act on one
thing at once cannot both succeed: the second one gets an error with the present state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from ackbone.core import events
from ackbone.core.approvals import Approval
from ackbone.core.clock import from_us
from ackbone.core.errors import AckboneError, Conflict, NotFound, StoreUnavailable
from ackbone.core.message import DEFAULT_TENANT, Message
from ackbone.core.notices import End
from ackbone.core.outcome import Status
from ackbone.core.records import Cancelled, EffectWord, Identity, Replay, Resumption
from ackbone.core.store import Worker
from ackbone.core.text import storable

from . import delivery_operations, orchestration, parked
from .base import BaseStore
from .parked import Answering
from .record_rows import uuid_text
from .unit import NOTHING_EXPIRES, OUTGOING, WORK, Change, Operation, Tx

log = logging.getLogger("ackbone.store")

T = TypeVar("T")

LEAVE_S = 1.0
"""How long an operator that is done or interrupted tries to give back its worker id (seconds)."""


class StoreOperations:
    """`Operations`, `Answers` and `DeliveryActs` under a worker id of their own, which chains their
    events in the ledger while `async with` lasts.

    `by`: the name of the operator, in every event.
    """

    def __init__(self, store: BaseStore[Any], *, by: str, beat_every_s: float = 1.0) -> None:
        self._store = store
        self._by = by
        self._beat_every_s = beat_every_s
        self._worker: Worker | None = None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._worker = await self._store.register(self._by)
        self._beating = asyncio.create_task(self._beat(self._worker), name="ackbone operator")
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
            # All actions are committed. A worker id that is not given back is reaped.
            with contextlib.suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._store.leave(worker)

    async def _beat(self, worker: Worker) -> None:
        """Renew the lease. A paced replay may take hours, and must not be declared dead."""
        while True:
            try:
                await asyncio.to_thread(self._store.beat, worker)
            except StoreUnavailable as error:
                log.warning("could not renew the lease of this operator: %s", error)
            await asyncio.sleep(self._beat_every_s)

    @property
    def _number(self) -> int:
        if self._worker is None:
            raise RuntimeError("operations are not open: use 'async with'")
        return self._worker.worker_id

    async def _write(self, op: Operation[T]) -> T:
        return await self._store.write_once(op, worker_id=self._number)

    # -- dead letters -----------------------------------------------------------------------------

    async def replay(self, batch: Sequence[Replay]) -> Sequence[AckboneError | None]:
        async def op(tx: Tx, change: Change) -> list[AckboneError | None]:
            answers: list[AckboneError | None] = []
            for item in batch:
                answers.append(await self._replay(tx, change, item))
            return answers

        return await self._write(op)

    async def _replay(self, tx: Tx, change: Change, item: Replay) -> AckboneError | None:
        new_id = item.send.outgoing.id
        settled = await _settle(tx, item.letter_id, "replayed", new_id)
        if settled is None:  # by this very call, unheard
            return None
        if isinstance(settled, AckboneError):
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
        change.sends.append(item.send)
        return None

    async def discard_letters(
        self, letter_ids: Sequence[str], *, reason: str
    ) -> Sequence[AckboneError | None]:
        async def op(tx: Tx, change: Change) -> list[AckboneError | None]:
            answers: list[AckboneError | None] = []
            for letter_id in letter_ids:
                settled = await _settle(tx, letter_id, "discarded", None)
                if settled is None or isinstance(settled, AckboneError):
                    answers.append(settled)
                    continue
                why = storable(reason)
                data = {"dead_letter_id": letter_id, "reason": why, "by": self._by}
                change.entries.append((*settled, events.DLQ_DISCARDED, data))
                answers.append(None)
            return answers

        return await self._write(op)

    # -- parked tasks -----------------------------------------------------------------------------

    async def resume(self, task: Identity, *, effects: Sequence[EffectWord] = ()) -> None:
        identity = (task.tenant_id, task.subscription, task.message_id)

        async def op(tx: Tx, change: Change) -> None:
            kind = await parked.parked_kind(tx, identity)
            question = await parked.pending_of(tx, identity)
            if question is not None:
                raise waits_for_an_answer(task.message_id, question)
            for effect in effects:
                await self._settle_effect(tx, change, identity, effect)
            unknown = await _unknown_effects(tx, identity)
            if kind == "effect_unknown" and unknown:
                raise effects_are_unknown(task.message_id, unknown)
            await parked.resume(tx, change, identity, by=self._by)

        await self._write(op)

    async def _settle_effect(
        self, tx: Tx, change: Change, identity: tuple[str, str, str], effect: EffectWord
    ) -> None:
        if effect.word is Resumption.DONE:
            if await tx.rows(tx.sql.operations.effect_is_done, *identity, effect.name):
                return  # its own result came late, and counts
            changed = await tx.rows(
                tx.sql.operations.effect_done,
                *identity,
                effect.name,
                effect.value,
                await tx.moment(),
            )
            kind = events.EFFECT_DONE
        else:
            changed = await tx.rows(tx.sql.operations.effect_cleared, *identity, effect.name)
            kind = events.EFFECT_CLEARED
        if not changed:
            raise no_such_effect(identity[2], effect.name, await _unknown_effects(tx, identity))
        change.entries.append((*identity, kind, {"name": effect.name, "by": self._by}))

    async def discard_parked(self, task: Identity, *, reason: str) -> None:
        identity = (task.tenant_id, task.subscription, task.message_id)

        async def op(tx: Tx, change: Change) -> None:
            kind = await parked.parked_kind(tx, identity)
            await parked.withdraw(tx, change, identity, by=self._by)
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
        return await self._answer(parked.approve, approval_id, by, note)

    async def reject(self, approval_id: str, *, by: str, note: str = "") -> Approval:
        return await self._answer(parked.reject, approval_id, by, note)

    async def _answer(
        self,
        say: Callable[[Tx, Change, str, Answering], Awaitable[Approval]],
        approval_id: str,
        by: str,
        note: str,
    ) -> Approval:
        async def op(tx: Tx, change: Change) -> Approval:
            now_us = await tx.moment()
            expiry_us = NOTHING_EXPIRES if self._store.expiry_paused else now_us
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

    async def submitted(self, subscription: str, tasks: Sequence[Message]) -> None:
        await self._write(
            lambda tx, change: orchestration.submitted(tx, change, subscription, tasks)
        )

    async def record(self, ends: Sequence[End]) -> int:
        worker = self._number
        return await self._write(lambda tx, change: orchestration.record(tx, change, ends, worker))

    # -- queues -----------------------------------------------------------------------------------

    async def pause(self, queue: str) -> bool:
        return await self._set_paused(queue, on=True)

    async def unpause(self, queue: str) -> bool:
        return await self._set_paused(queue, on=False)

    async def _set_paused(self, queue: str, *, on: bool) -> bool:
        async def op(tx: Tx, change: Change) -> bool:
            sql = tx.sql.operations
            if on:
                changed = await tx.rows(sql.pause_queue, queue, await tx.moment())
            else:
                changed = await tx.rows(sql.unpause_queue, queue)
            if not changed:
                return False
            # An act on a queue belongs to no message: its events have an empty task id.
            kind = events.QUEUE_PAUSED if on else events.QUEUE_RESUMED
            data = {"queue": queue, "by": self._by}
            change.entries.append((DEFAULT_TENANT, queue, "", kind, data))
            change.topics.add(WORK)
            return True

        return await self._write(op)

    # -- replies ----------------------------------------------------------------------------------

    async def retry_deliveries(self, ids: Sequence[str]) -> Sequence[AckboneError | None]:
        async def op(tx: Tx, change: Change) -> list[AckboneError | None]:
            now = await tx.hold_deliveries()
            change.topics.add(OUTGOING)
            return await delivery_operations.each(
                ids, lambda each: delivery_operations.retry(tx, change, each, self._by, now)
            )

        return await self._write(op)

    async def edit_delivery(self, delivery_id: str, *, content: str) -> None:
        async def op(tx: Tx, change: Change) -> None:
            await tx.hold_deliveries()
            await delivery_operations.edit(tx, change, delivery_id, content, self._by)

        await self._write(op)

    async def discard_deliveries(
        self, ids: Sequence[str], *, reason: str
    ) -> Sequence[AckboneError | None]:
        async def op(tx: Tx, change: Change) -> list[AckboneError | None]:
            now = await tx.hold_deliveries()
            change.topics.add(OUTGOING)
            return await delivery_operations.each(
                ids,
                lambda each: delivery_operations.discard(tx, change, each, reason, self._by, now),
            )

        return await self._write(op)

    async def pause_channel(self, channel: str) -> bool:
        return await self._set_channel(channel, on=True)

    async def unpause_channel(self, channel: str) -> bool:
        return await self._set_channel(channel, on=False)

    async def _set_channel(self, channel: str, *, on: bool) -> bool:
        async def op(tx: Tx, change: Change) -> bool:
            await tx.hold_deliveries()
            change.topics.add(OUTGOING)
            return await delivery_operations.set_paused(tx, change, channel, self._by, on=on)

        return await self._write(op)


async def _settle(
    tx: Tx, letter_id: str, state: str, replay_id: str | None
) -> tuple[str, str, str] | AckboneError | None:
    """An open letter gets its end: its task's identity, or why it cannot.

    None: an attempt of this very call did it, whose answer was lost.
    """
    changed = await tx.rows(
        tx.sql.operations.settle_letter, uuid_text(letter_id), state, replay_id, await tx.moment()
    )
    if changed:
        tenant_id, subscription, message_id = changed[0]
        return tenant_id, subscription, message_id
    found = await tx.rows(tx.sql.operations.letter_state, uuid_text(letter_id))
    if not found:
        return NotFound(f"there is no dead letter {letter_id}")
    was, settled_us, as_id = found[0]
    if tx.repeated and (was, as_id) == (state, replay_id):
        return None
    return letter_is_settled(letter_id, was, as_id, settled_us)


async def _unknown_effects(tx: Tx, identity: tuple[str, str, str]) -> list[str]:
    return [name for (name,) in await tx.rows(tx.sql.operations.unknown_effects, *identity)]


# ── why an action fails ──────────────────────────────────────────────────────────────────────────


def letter_is_settled(
    letter_id: str, state: str, replay_id: str | None, settled_us: int | None
) -> Conflict:
    when = "" if settled_us is None else f" at {from_us(settled_us):%Y-%m-%d %H:%M:%S} UTC"
    as_what = f" as message {replay_id}" if replay_id else ""
    return Conflict(f"dead letter {letter_id} was {state}{as_what}{when}; it is not open any more")


def waits_for_an_answer(message_id: str, question: str) -> Conflict:
    return Conflict(
        f"message {message_id} waits for an answer: 'ackbone approvals approve "
        f"{question}' lets it run, 'ackbone approvals reject {question}' ends it"
    )


def effects_are_unknown(message_id: str, names: Sequence[str]) -> Conflict:
    return Conflict(
        f"nobody knows whether {', '.join(names)} of message {message_id} "
        "happened. Look, and say so: "
        + " ".join(f"--effect {name}=done|not-done" for name in names)
    )


def no_such_effect(message_id: str, name: str, unknown: Sequence[str]) -> Conflict:
    return Conflict(
        f"message {message_id} has no effect {name!r} whose end is unknown "
        f"(there is: {', '.join(unknown) or 'none'})"
    )
