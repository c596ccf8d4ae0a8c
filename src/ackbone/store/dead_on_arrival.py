"""Ends at the claim: a message that can never run ends at once, with its dead letter."""

from __future__ import annotations

import hashlib
import uuid

from ackbone.core.ids import derived_id, uuid7_bytes
from ackbone.core.message import DEFAULT_TENANT, Message
from ackbone.core.outcome import GIVEN_UP, UNSTORABLE, Status
from ackbone.core.store import Candidate, Run
from ackbone.core.text import storable

from .claiming import Claiming
from .outcomes import Letter, TaskRow, bury, identity_of, letter_of, task_of
from .tasks import Ready, body_info, conflicting, crc


async def undecodable(claim: Claiming, candidate: Candidate) -> None:
    """Keep bytes that are no message as they are.

    Broken bytes under the id of another message get an id of their own. Otherwise they would
    vanish as a further copy of that message.
    """
    failure = candidate.delivery.failure
    error = str(candidate.error) if failure is None else f"{failure}; {candidate.error}"
    await _bytes_alone(claim, candidate, candidate.reason, error)


async def unstorable(claim: Claiming, candidate: Candidate, error: Exception) -> None:
    """Keep a message that no row can hold (its id, its key) as bytes, under an id of its own."""
    await _bytes_alone(claim, candidate, UNSTORABLE, f"{type(error).__name__}: {error}")


async def _bytes_alone(claim: Claiming, candidate: Candidate, reason: str, error: str) -> None:
    delivery, sub = candidate.delivery, claim.sub
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
    task = (letter.tenant_id, letter.subscription, letter.message_id)
    known = await claim.tx.rows(claim.tx.sql.claims.known_hash, *task)
    if known and known[0][0] != digest:
        letter.message_id = derived_id(letter.message_id, digest.hex())
    await _write(claim, letter, digest)


async def id_conflict(
    claim: Claiming, candidate: Candidate, message: Message, differs: str
) -> None:
    """Keep a message whose id was used with another payload or type, under an id of its own."""
    message_id, error = conflicting(candidate, message, differs)
    sub, body = claim.sub, candidate.delivery.body
    task = TaskRow(message.tenant_id, sub.name, message_id, sub.queue, message.type, None)
    letter = task.letter("id_conflict", error, body=body, body_info=body_info(candidate))
    await _write(claim, letter, candidate.sha256)


async def expired(claim: Claiming, run: Run) -> None:
    """End a message whose time to live was over before it could run."""
    tx = claim.tx
    now_us = await tx.moment()
    await tx.send(tx.sql.claims.expire, *identity_of(run), now_us)
    letter = letter_of(run, "expired", "its time to live was over before it could run")
    final = task_of(run).final(Status.EXPIRED)
    claim.change.entries += [final, bury(tx, letter, now_us)]
    task_of(run).let_go(tx, claim.change, run.idem_key, run.lane)


async def given_up(claim: Claiming, run: Run, failure: str) -> None:
    """End a message that the broker's server moved to a dead-letter queue."""
    now_us = await claim.tx.moment()
    await claim.tx.send(claim.tx.sql.claims.fail, *identity_of(run), storable(failure), now_us)
    _failed_and_buried(claim, letter_of(run, GIVEN_UP, failure), now_us)
    task_of(run).let_go(claim.tx, claim.change, run.idem_key, run.lane)


async def unreadable(claim: Claiming, row: Ready, error: Exception) -> None:
    """End a message whose stored body is not what was written. It is kept as it is."""
    tx, sub = claim.tx, claim.sub
    now_us = await tx.moment()
    task = TaskRow(row.tenant_id, sub.name, row.message_id, sub.queue, None, None)
    await tx.send(tx.sql.claims.fail, *task.identity, storable(str(error)), now_us)
    retry_count = max(0, row.attempt - 1 - row.crashes)
    kept = {"retry_count": retry_count, "body": row.body, "body_info": row.info}
    _failed_and_buried(claim, task.letter("body_corrupt", str(error), **kept), now_us)
    task.let_go(tx, claim.change, row.key, row.lane)


async def complete_letter(claim: Claiming, candidate: Candidate, message: Message) -> None:
    """Add the body to the dead letter of a message that ended while the broker held its body."""
    body = candidate.delivery.body
    task = (message.tenant_id, claim.sub.name, message.id)
    sql = claim.tx.sql.claims.complete_letter
    await claim.tx.send(sql, *task, body, body_info(candidate), crc(body))


async def _write(claim: Claiming, letter: Letter, sha256: bytes) -> None:
    now_us = await claim.tx.moment()
    inserted = await claim.tx.rows(
        claim.tx.sql.claims.dead_on_arrival,
        str(uuid.UUID(bytes=uuid7_bytes())),
        letter.tenant_id,
        letter.subscription,
        letter.message_id,
        letter.queue,
        letter.event_name,
        claim.worker.worker_id,
        now_us,
        storable(letter.error),
        sha256,
    )
    if inserted:  # otherwise it is a further copy of a message that was dead-lettered before
        _failed_and_buried(claim, letter, now_us)


def _failed_and_buried(claim: Claiming, letter: Letter, now_us: int) -> None:
    identity = (letter.tenant_id, letter.subscription, letter.message_id)
    task = TaskRow(*identity, letter.queue, letter.event_name, None)
    final = task.final(Status.FAILED, reason=letter.reason, error=storable(letter.error))
    claim.change.entries += [final, bury(claim.tx, letter, now_us)]
