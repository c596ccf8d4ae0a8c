"""Ends at the claim: what can never run is final at once, with its dead letter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ackbone.core import events
from ackbone.core.ids import derived_id, uuid7_bytes
from ackbone.core.message import DEFAULT_TENANT, Message
from ackbone.core.outcome import Status
from ackbone.core.store import Candidate, Run
from ackbone.core.text import storable
from ackbone.store.letters import Letter, bury, letter_of
from ackbone.store.outcomes import final_data
from ackbone.store.stored import body_info, conflicting, crc

from .claiming import Claiming
from .keys import free_key, resolve_key
from .lanes import advance_lane
from .ledger import Entry
from .tx import SqliteTx


def undecodable(claim: Claiming, candidate: Candidate) -> list[Entry]:
    """Bytes that are no message: dead-lettered as they are.

    Broken bytes under the id of another message get an id of their own, or they would vanish as a
    further copy of it.
    """
    delivery = candidate.delivery
    digest = hashlib.sha256(delivery.body).digest()
    letter = Letter(
        tenant_id=claim.sub.tenant or DEFAULT_TENANT,
        subscription=claim.sub.name,
        message_id=delivery.identity or derived_id(claim.sub.queue, delivery.body.hex()),
        queue=claim.sub.queue,
        event_name=None,
        reason=candidate.reason,
        error=str(candidate.error),
        body=delivery.body,
        body_info=body_info(candidate),
    )
    if _known_as_other(claim, letter, digest):
        letter.message_id = derived_id(letter.message_id, digest.hex())
    return _dead_on_arrival(claim, letter, digest)


def _known_as_other(claim: Claiming, letter: Letter, digest: bytes) -> bool:
    found = claim.conn.execute(
        "SELECT body_sha256 FROM queue_executions WHERE tenant_id = ? AND subscription = ?"
        " AND message_id = ?",
        (letter.tenant_id, letter.subscription, letter.message_id),
    ).fetchone()
    return found is not None and found[0] != digest


def id_conflict(
    claim: Claiming, candidate: Candidate, message: Message, differs: str
) -> list[Entry]:
    """The same id with another payload or type: kept under an id of its own."""
    message_id, error = conflicting(candidate, message, differs)
    letter = Letter(
        tenant_id=message.tenant_id,
        subscription=claim.sub.name,
        message_id=message_id,
        queue=claim.sub.queue,
        event_name=message.type,
        reason="id_conflict",
        error=error,
        body=candidate.delivery.body,
        body_info=body_info(candidate),
    )
    return _dead_on_arrival(claim, letter, candidate.sha256)


def expired(claim: Claiming, run: Run) -> list[Entry]:
    """Its time to live was over before it could run."""
    message = run.message
    claim.conn.execute(
        "UPDATE queue_executions SET status = 'expired', completed_at = ?, body = NULL,"
        " error_message = 'expired before it could run' WHERE rowid = ?",
        (claim.now_us, run.row),
    )
    letter = letter_of(run, "expired", "its time to live was over before it could run")
    data = final_data(
        run.queue, message.tenant_id, message.id, message.type, message.trace_id, Status.EXPIRED
    )
    return [
        (message.tenant_id, run.subscription, message.id, events.EXPIRED, data),
        bury(SqliteTx(claim.conn, claim.now_us), letter, claim.now_us),
        *_let_go(claim, message.tenant_id, message.id, run.idem_key, run.lane),
    ]


def unreadable(claim: Claiming, row: Sequence[Any], error: Exception) -> list[Entry]:
    """A stored body (RUN_COLUMNS) that is not what was written: never run, kept as it is."""
    rowid, tenant_id, message_id, _, attempt, crashes, lane, key, _, _, body, info, *_ = row
    claim.conn.execute(
        "UPDATE queue_executions SET status = 'failed', completed_at = ?, error_message = ?,"
        " body = NULL WHERE rowid = ?",
        (claim.now_us, storable(str(error)), rowid),
    )
    letter = Letter(
        tenant_id=tenant_id,
        subscription=claim.sub.name,
        message_id=message_id,
        queue=claim.sub.queue,
        event_name=None,
        reason="body_corrupt",
        error=str(error),
        retry_count=max(0, attempt - 1 - crashes),
        body=body,
        body_info=info,
    )
    freed = _let_go(claim, tenant_id, message_id, key, lane)
    return [*_failed_and_buried(claim, letter), *freed]


def complete_letter(claim: Claiming, candidate: Candidate, message: Message) -> None:
    """A message that died while the broker held its body: the copy that comes back brings it."""
    body = candidate.delivery.body
    claim.conn.execute(
        "UPDATE dead_letters SET body = ?, body_info = ?, body_crc = ? WHERE tenant_id = ?"
        " AND message_id = ? AND subscription = ? AND body IS NULL",
        (
            body,
            body_info(candidate),
            crc(body),
            message.tenant_id,
            message.id,
            claim.sub.name,
        ),
    )


def _let_go(
    claim: Claiming, tenant_id: str, message_id: str, key: str | None, lane: str | None
) -> list[Entry]:
    """What ended holds neither its key nor its conversation; returns what that ended in turn."""
    if lane is not None:
        advance_lane(claim.conn, tenant_id, claim.sub.name, lane, claim.now_us)
    if key is None:
        return []
    free_key(claim.conn, tenant_id, claim.sub.name, key, message_id)
    return resolve_key(claim.conn, tenant_id, claim.sub.name, key, claim.now_us)


def _dead_on_arrival(claim: Claiming, letter: Letter, sha256: bytes) -> list[Entry]:
    inserted = claim.conn.execute(
        "INSERT OR IGNORE INTO queue_executions (id, tenant_id, subscription, message_id,"
        " queue_name, event_name, status, held, worker_id, started_at, completed_at,"
        " error_message, body_sha256) VALUES (?, ?, ?, ?, ?, ?, 'failed', 'store', ?, ?, ?, ?, ?)",
        (
            uuid7_bytes(),
            letter.tenant_id,
            letter.subscription,
            letter.message_id,
            letter.queue,
            letter.event_name,
            claim.worker_id,
            claim.now_us,
            claim.now_us,
            storable(letter.error),
            sha256,
        ),
    ).rowcount
    if not inserted:
        return []  # a further copy of what was dead-lettered before
    return _failed_and_buried(claim, letter)


def _failed_and_buried(claim: Claiming, letter: Letter) -> list[Entry]:
    data = final_data(
        letter.queue,
        letter.tenant_id,
        letter.message_id,
        letter.event_name,
        None,
        Status.FAILED,
    )
    data.update(reason=letter.reason, error=storable(letter.error))
    return [
        (letter.tenant_id, letter.subscription, letter.message_id, events.FAILED, data),
        bury(SqliteTx(claim.conn, claim.now_us), letter, claim.now_us),
    ]
