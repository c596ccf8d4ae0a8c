"""Writes of a run before its end: effects, early replies, heartbeats; fenced by its token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ackbone.core import events
from ackbone.core.errors import LeaseLost
from ackbone.core.store import EffectState, Reply, Run, Token
from ackbone.store.outgoing import created_event, delivery_row
from ackbone.store.stored import crc, run_info
from ackbone.store.unit import Change

from .database import Tx
from .finish import DELIVERIES, delivery_values
from .tasks import PK
from .wake import OUTGOING

_FENCE = (
    # Shared: nobody may take the message away between this look and the commit.
    f"SELECT 1 FROM queue_executions WHERE {PK} AND worker_id = $4::bigint AND epoch = $5::int"
    " AND status = 'running' FOR SHARE"
)
_ADOPT = (
    "UPDATE queue_executions SET held = 'store', body = $6::bytea, body_info = $7::json,"
    f" body_crc = $8::bigint WHERE {PK} AND worker_id = $4::bigint AND epoch = $5::int"
    " AND status = 'running' RETURNING 1"
)
_EFFECT = f"SELECT state, value, worker_id, epoch FROM effects WHERE {PK} AND name = $4 FOR UPDATE"
_BEGIN = (
    "INSERT INTO effects (tenant_id, subscription, message_id, name, state, worker_id, epoch,"
    " created_at) VALUES ($1, $2, $3, $4, 'begun', $5::bigint, $6::int, clock_timestamp())"
)
_DONE = (
    "UPDATE effects SET state = 'done', value = $5::bytea, done_at = clock_timestamp()"
    f" WHERE {PK} AND name = $4 AND state = 'begun' RETURNING 1"
)
_RAISED = f"UPDATE effects SET value = $5::bytea WHERE {PK} AND name = $4 AND state = 'begun'"
_CONSUMER = "SELECT name FROM workers WHERE worker_id = $1::bigint"
_REPLY = f"{DELIVERIES} RETURNING 1"
_CLEAR = f"DELETE FROM effects WHERE {PK} AND name = $4 AND state = 'begun'"


async def adopt(tx: Tx, run: Run, worker_id: int) -> bool:
    """The store holds its body from now on; False: it is not this worker's any more."""
    found = await tx.rows(
        _ADOPT,
        *_identity(run),
        str(worker_id),
        str(run.token.epoch),
        run.body,
        run_info(run),
        str(crc(run.body)),
    )
    return bool(found)


async def effect_begin(
    tx: Tx, change: Change, run: Run, name: str, *, again: bool
) -> tuple[EffectState, bytes | None]:
    """Write the intent, unless an earlier attempt did: then say how far it got."""
    await fence(tx, run)
    identity = _identity(run)
    found = await tx.rows(_EFFECT, *identity, name)
    if found:
        state, value, worker_id, epoch = found[0]
        if state == "done":
            return EffectState.DONE, value
        own = Token(worker_id, epoch) == run.token and value is None
        if own and (again or tx.repeated):  # written by this very call, unheard
            return EffectState.NEW, None
        return EffectState.UNKNOWN, value
    await tx.send(_BEGIN, *identity, name, str(run.token.worker_id), str(run.token.epoch))
    change.entries.append((*identity, events.EFFECT_BEGUN, {"name": name}))
    return EffectState.NEW, None


async def effect_done(
    tx: Tx, change: Change, run: Run, name: str, value: bytes, *, again: bool
) -> None:
    """Record the result. Not fenced: what happened happened, whoever knows of it."""
    written = await tx.rows(_DONE, *_identity(run), name, value)
    if written or not (again or tx.repeated):
        change.entries.append((*_identity(run), events.EFFECT_DONE, {"name": name}))


async def effect_raised(tx: Tx, run: Run, name: str, error: str) -> None:
    tx.before_end(_RAISED, *_identity(run), name, error.encode())


async def effect_clear(tx: Tx, change: Change, run: Run, name: str) -> None:
    await fence(tx, run)
    tx.before_end(_CLEAR, *_identity(run), name)


async def heartbeat(tx: Tx, change: Change, run: Run, data: Mapping[str, Any]) -> None:
    await fence(tx, run)
    found = await tx.rows(_CONSUMER, str(run.token.worker_id))
    consumer = found[0][0] if found else ""
    told = {"attempt": run.attempt, "consumer": consumer, **data}
    change.entries.append((*_identity(run), events.HEARTBEAT, told))


async def reply_now(tx: Tx, change: Change, run: Run, reply: Reply, n: int) -> str:
    await fence(tx, run)
    row = delivery_row(run, reply, n, await tx.moment())
    if await tx.rows(_REPLY, *delivery_values([row])):  # else it was there before, and was told of
        change.entries.append(created_event(row))
    change.topics.add(OUTGOING)
    return str(row[0])


async def fence(tx: Tx, run: Run) -> None:
    """Raises LeaseLost unless the run still owns its message."""
    token = run.token
    if not await tx.rows(_FENCE, *_identity(run), str(token.worker_id), str(token.epoch)):
        raise LeaseLost(
            f"message {run.message.id} was taken away from worker {token.worker_id} "
            "while it ran; this run can no longer write anything"
        )


def _identity(run: Run) -> tuple[str, str, str]:
    return run.message.tenant_id, run.subscription, run.message.id
