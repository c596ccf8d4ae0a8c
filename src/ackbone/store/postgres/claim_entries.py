"""Claims of messages that another worker gets, and of messages that another worker lost."""

from __future__ import annotations

from ackbone.core.broker import Delivery
from ackbone.core.outcome import ParkKind
from ackbone.core.store import Answer, Run, Verdict
from ackbone.store.claimed import reclaimed
from ackbone.store.fleet import no_handler, parked

from .claiming import Claiming
from .tasks import BEGUN, PK, Identity
from .wake import WORK

_PASS_ON = (
    f"UPDATE queue_executions SET status = 'ready', due_at = least(due_at, {BEGUN}),"
    f" worker_id = NULL, attempt = attempt - 1 WHERE {PK}"
)
_PARK = (
    "UPDATE queue_executions SET status = 'parked', parked_kind = $4, error_message = $5,"
    f" worker_id = NULL, attempt = attempt - 1 WHERE {PK}"
)
_FOUND_AGAIN = f"UPDATE queue_executions SET lost_by = NULL WHERE {PK}"


async def pass_on(claim: Claiming, run: Run, delivery: Delivery | None) -> Verdict:
    """This worker has no handler for the message: leave it to a worker that has one, or park it.

    Costs no attempt.
    """
    if await claim.is_handled(run.message.type):
        await claim.tx.send(_PASS_ON, *_of(run))
        claim.change.topics.add(WORK)
        return Verdict(answer=Answer.PASSED_ON, delivery=delivery)
    await claim.tx.send(_PARK, *_of(run), ParkKind.WORKFLOW_PENDING.value, no_handler(run))
    claim.change.entries.append(parked(run))
    return Verdict(answer=Answer.PARKED, run=run, delivery=delivery)


async def reclaim(
    claim: Claiming, run: Run, delivery: Delivery | None, lost_by: str | None
) -> None:
    """Another worker or consumer had this message and died: name both in the ledger, once."""
    if lost_by is not None:
        await claim.tx.send(_FOUND_AGAIN, *_of(run))
    claim.change.entries.append(reclaimed(run, claim.worker, delivery, lost_by))


def _of(run: Run) -> Identity:
    return run.message.tenant_id, run.subscription, run.message.id
