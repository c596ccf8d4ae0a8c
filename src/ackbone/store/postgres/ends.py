"""Ends at the claim: what can never run is final at once, with its dead letter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ackbone.core import events
from ackbone.core.broker import Subscription
from ackbone.core.ids import derived_id, uuid7_bytes
from ackbone.core.message import DEFAULT_TENANT, Message
from ackbone.core.outcome import UNSTORABLE, Status
from ackbone.core.store import Candidate, Run
from ackbone.core.text import storable
from ackbone.store.letters import Letter, bury, letter_of
from ackbone.store.outcomes import final_data
from ackbone.store.stored import body_info, conflicting, crc

from .arrays import moment
from .database import Tx
from .ledger import Entry
from .tasks import PK, Ready, row_uuid

_KNOWN_HASH = f"SELECT body_sha256 FROM queue_executions WHERE {PK}"
_EXPIRE = (
    "UPDATE queue_executions SET status = 'expired', completed_at = clock_timestamp(), body = NULL,"
    f" error_message = 'expired before it could run' WHERE {PK}"
)
_FAIL = (
    "UPDATE queue_executions SET status = 'failed', completed_at = clock_timestamp(),"
    f" error_message = $4, body = NULL WHERE {PK}"
)
_COMPLETE = (
    "UPDATE dead_letters SET body = $4::bytea, body_info = $5::json, body_crc = $6::bigint"
    f" WHERE {PK} AND body IS NULL"
)
_DEAD_ON_ARRIVAL = (
    "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name, event_name,"
    " status, held, worker_id, started_at, completed_at, error_message, body_sha256)"
    " VALUES ($1::uuid, $2, $3, $4, $5, $6, 'failed', 'store', $7::bigint,"
    f" {moment('$8::bigint')}, {moment('$8::bigint')}, $9, $10::bytea)"
    " ON CONFLICT (tenant_id, subscription, message_id) DO NOTHING RETURNING 1"
)


async def undecodable(
    tx: Tx, sub: Subscription, candidate: Candidate, worker_id: int
) -> list[Entry]:
    """Bytes that are no message: dead-lettered as they are.

    Broken bytes under the id of another message get an id of their own, or they would vanish as a
    further copy of it.
    """
    return await _bytes_alone(tx, sub, candidate, worker_id, candidate.reason, str(candidate.error))


async def unstorable(
    tx: Tx, sub: Subscription, candidate: Candidate, worker_id: int, error: Exception
) -> list[Entry]:
    """A message that no row can hold (its id, its key): kept as bytes, under an id of its own."""
    return await _bytes_alone(
        tx, sub, candidate, worker_id, UNSTORABLE, f"{type(error).__name__}: {error}"
    )


async def _bytes_alone(
    tx: Tx, sub: Subscription, candidate: Candidate, worker_id: int, reason: str, error: str
) -> list[Entry]:
    delivery = candidate.delivery
    digest = hashlib.sha256(delivery.body).digest()
    named = delivery.identity if reason != UNSTORABLE else None
    letter = Letter(
        tenant_id=sub.tenant or DEFAULT_TENANT,
        subscription=sub.name,
        message_id=named or derived_id(sub.queue, delivery.body.hex()),
        queue=sub.queue,
        event_name=None,
        reason=reason,
        error=error,
        body=delivery.body,
        body_info=body_info(candidate),
    )
    known = await tx.rows(_KNOWN_HASH, letter.tenant_id, letter.subscription, letter.message_id)
    if known and known[0][0] != digest:
        letter.message_id = derived_id(letter.message_id, digest.hex())
    return await _dead_on_arrival(tx, letter, digest, worker_id)


async def id_conflict(
    tx: Tx,
    sub: Subscription,
    candidate: Candidate,
    message: Message,
    differs: str,
    worker_id: int,
) -> list[Entry]:
    """The same id with another payload or type: kept under an id of its own."""
    message_id, error = conflicting(candidate, message, differs)
    letter = Letter(
        tenant_id=message.tenant_id,
        subscription=sub.name,
        message_id=message_id,
        queue=sub.queue,
        event_name=message.type,
        reason="id_conflict",
        error=error,
        body=candidate.delivery.body,
        body_info=body_info(candidate),
    )
    return await _dead_on_arrival(tx, letter, candidate.sha256, worker_id)


async def expired(tx: Tx, run: Run, now_us: int) -> list[Entry]:
    """Its time to live was over before it could run."""
    message = run.message
    await tx.send(_EXPIRE, message.tenant_id, run.subscription, message.id)
    letter = letter_of(run, "expired", "its time to live was over before it could run")
    data = final_data(
        run.queue, message.tenant_id, message.id, message.type, message.trace_id, Status.EXPIRED
    )
    return [
        (message.tenant_id, run.subscription, message.id, events.EXPIRED, data),
        bury(tx, letter, now_us),
    ]


async def unreadable(
    tx: Tx, sub: Subscription, row: Ready, error: Exception, now_us: int
) -> list[Entry]:
    """A stored body that is not what was written: never run, kept as it is."""
    await tx.send(_FAIL, row.tenant_id, sub.name, row.message_id, storable(str(error)))
    letter = Letter(
        tenant_id=row.tenant_id,
        subscription=sub.name,
        message_id=row.message_id,
        queue=sub.queue,
        event_name=None,
        reason="body_corrupt",
        error=str(error),
        retry_count=max(0, row.attempt - 1 - row.crashes),
        body=row.body,
        body_info=row.info,
    )
    return _failed_and_buried(tx, letter, now_us)


async def complete_letter(
    tx: Tx, sub: Subscription, candidate: Candidate, message: Message
) -> None:
    """A message that died while the broker held its body: the copy that comes back brings it."""
    body = candidate.delivery.body
    values: Sequence[Any] = (message.tenant_id, sub.name, message.id)
    await tx.send(_COMPLETE, *values, body, body_info(candidate), str(crc(body)))


async def _dead_on_arrival(tx: Tx, letter: Letter, sha256: bytes, worker_id: int) -> list[Entry]:
    now_us = await tx.moment()
    inserted = await tx.rows(
        _DEAD_ON_ARRIVAL,
        row_uuid(uuid7_bytes()),
        letter.tenant_id,
        letter.subscription,
        letter.message_id,
        letter.queue,
        letter.event_name,
        str(worker_id),
        str(now_us),
        storable(letter.error),
        sha256,
    )
    if not inserted:
        return []  # a further copy of what was dead-lettered before
    return _failed_and_buried(tx, letter, now_us)


def _failed_and_buried(tx: Tx, letter: Letter, now_us: int) -> list[Entry]:
    data = final_data(
        letter.queue, letter.tenant_id, letter.message_id, letter.event_name, None, Status.FAILED
    )
    data.update(reason=letter.reason, error=storable(letter.error))
    return [
        (letter.tenant_id, letter.subscription, letter.message_id, events.FAILED, data),
        bury(tx, letter, now_us),
    ]
