"""A claim that a quota puts off."""

from __future__ import annotations

from holdfast.core.events import Entry
from holdfast.core.quota import WAITS_FOR
from holdfast.core.store import Candidate, Run
from holdfast.store.claimed import waits_for_quota
from holdfast.store.quota_book import PutOff

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
