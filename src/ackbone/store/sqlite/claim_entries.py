"""Claims that a quota puts off or another worker gets, and claims of what another worker lost."""

from __future__ import annotations

from ackbone.core.broker import Delivery
from ackbone.core.events import Entry
from ackbone.core.outcome import ParkKind
from ackbone.core.quota import WAITS_FOR
from ackbone.core.store import Answer, Candidate, Run, Verdict
from ackbone.store.claimed import reclaimed, waits_for_quota
from ackbone.store.fleet import no_handler, parked
from ackbone.store.quota_book import PutOff

from . import tasks
from .claiming import Claiming


def put_off(
    claim: Claiming, run: Run, wait: PutOff, candidate: Candidate | None, expires_us: int | None
) -> Entry:
    """A quota of its is used up: it waits for another window, and spends nothing."""
    if candidate is not None:
        tasks.hold(claim.conn, run.row, candidate)
    due = wait.until_us if expires_us is None else min(wait.until_us, expires_us)
    claim.conn.execute(
        "UPDATE queue_executions SET status = 'ready', due_at = ?, worker_id = NULL,"
        " attempt = attempt - 1, error_message = ? WHERE rowid = ?",
        (due, f"{WAITS_FOR}{wait.quota}", run.row),
    )
    return waits_for_quota(run, wait)


def pass_on(
    claim: Claiming, run: Run, candidate: Candidate | None, entries: list[Entry]
) -> Verdict:
    """This worker has no handler for the message: leave it to a worker that has one, or park it.

    Costs no attempt. `candidate`: the broker's copy, which goes into the row.
    """
    delivery = None
    if candidate is not None:
        tasks.hold(claim.conn, run.row, candidate)
        delivery = candidate.delivery
    if claim.is_handled(run.message.type):
        claim.conn.execute(
            "UPDATE queue_executions SET status = 'ready', due_at = min(coalesce(due_at, ?1), ?1),"
            " worker_id = NULL, attempt = attempt - 1 WHERE rowid = ?2",
            (claim.now_us, run.row),
        )
        return Verdict(answer=Answer.PASSED_ON, delivery=delivery)
    claim.conn.execute(
        "UPDATE queue_executions SET status = 'parked', parked_kind = ?, error_message = ?,"
        " worker_id = NULL, attempt = attempt - 1 WHERE rowid = ?",
        (ParkKind.WORKFLOW_PENDING, no_handler(run), run.row),
    )
    entries.append(parked(run))
    return Verdict(answer=Answer.PARKED, run=run, delivery=delivery)


def reclaim(claim: Claiming, run: Run, delivery: Delivery | None, lost_by: str | None) -> Entry:
    """Another worker or consumer had this message and died: name both in the ledger, once."""
    if lost_by is not None:
        claim.conn.execute("UPDATE queue_executions SET lost_by = NULL WHERE rowid = ?", (run.row,))
    return reclaimed(run, claim.worker, delivery, lost_by)
