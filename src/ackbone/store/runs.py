"""Writes of a run before its end: effects, early replies, heartbeats, adoption.

Each is refused with LeaseLost once the run has lost its message, except the result of an effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ackbone.core import events
from ackbone.core.errors import LeaseLost
from ackbone.core.store import EffectState, Reply, Run, Token

from .delivery_rows import created_event, delivery_row
from .tasks import crc, run_info
from .unit import OUTGOING, Change, Identity, Tx


async def adopt(tx: Tx, batch: Sequence[Run], worker_id: int) -> list[bool]:
    """Write whole messages into the store. False for a run that is not this worker's any more."""
    return [
        bool(
            await tx.rows(
                tx.sql.runs.adopt,
                *_identity(run),
                worker_id,
                run.token.epoch,
                run.body,
                run_info(run),
                crc(run.body),
            )
        )
        for run in batch
    ]


async def effect_begin(
    tx: Tx, change: Change, run: Run, name: str, *, again: bool
) -> tuple[EffectState, bytes | None]:
    """Write the intent. If an earlier attempt wrote it, return how far that attempt got.

    `again`: the caller repeats a call whose answer it did not get.
    """
    await _fence(tx, run)
    identity = _identity(run)
    found = await tx.rows(tx.sql.runs.effect, *identity, name)
    if found:
        state, value, worker_id, epoch = found[0]
        if state == "done":
            return EffectState.DONE, value
        own = Token(worker_id, epoch) == run.token and value is None
        if own and (again or tx.repeated):  # this very call wrote it, and its answer was lost
            return EffectState.NEW, None
        return EffectState.UNKNOWN, value
    token = (run.token.worker_id, run.token.epoch)
    await tx.send(tx.sql.runs.begin_effect, *identity, name, *token, await tx.moment())
    change.entries.append((*identity, events.EFFECT_BEGUN, {"name": name}))
    return EffectState.NEW, None


async def effect_done(
    tx: Tx, change: Change, run: Run, name: str, value: bytes, *, again: bool
) -> None:
    """Record the result, even if the run has lost its message: the effect has happened."""
    identity = _identity(run)
    written = await tx.rows(
        tx.sql.operations.effect_done, *identity, name, value, await tx.moment()
    )
    if written or not (again or tx.repeated):
        change.entries.append((*identity, events.EFFECT_DONE, {"name": name}))


async def effect_raised(tx: Tx, run: Run, name: str, error: str) -> None:
    """Keep the error of an effect that may have happened, for people to read."""
    tx.before_end(tx.sql.runs.effect_raised, *_identity(run), name, error.encode())


async def effect_clear(tx: Tx, run: Run, name: str) -> None:
    """Forget the intent of an effect that certainly did not happen."""
    await _fence(tx, run)
    tx.before_end(tx.sql.operations.effect_cleared, *_identity(run), name)


async def heartbeat(tx: Tx, change: Change, run: Run, data: Mapping[str, Any]) -> None:
    await _fence(tx, run)
    found = await tx.rows(tx.sql.workers.name, run.token.worker_id)
    consumer = found[0][0] if found else ""
    shown = {"attempt": run.attempt, "consumer": consumer, **data}
    change.entries.append((*_identity(run), events.HEARTBEAT, shown))


async def reply_now(tx: Tx, change: Change, run: Run, reply: Reply, n: int) -> str:
    """Write a reply that does not wait for the end of the run; return the id of its delivery."""
    await _fence(tx, run)
    row = delivery_row(run, reply, n, await tx.moment())
    if await tx.deliveries.add(row):  # else an earlier attempt of this call wrote it
        change.entries.append(created_event(row))
    change.topics.add(OUTGOING)
    return str(row[0])


async def _fence(tx: Tx, run: Run) -> None:
    """Raise LeaseLost unless the run still owns its message."""
    token = run.token
    if not await tx.rows(tx.sql.runs.fence, *_identity(run), token.worker_id, token.epoch):
        raise LeaseLost(
            f"message {run.message.id} was taken away from worker {token.worker_id} "
            "while it ran; this run can no longer write anything"
        )


def _identity(run: Run) -> Identity:
    return run.message.tenant_id, run.subscription, run.message.id
