"""Log lines about single messages."""

from __future__ import annotations

import logging

from ackbone.core.outcome import Park
from ackbone.core.store import Run

log = logging.getLogger("ackbone.engine")


def tell_parked(run: Run, park: Park) -> None:
    """A parked message waits for somebody: say for what, and which command shows it."""
    command = "parked" if park.question is None else "approvals"
    log.warning(
        "message %s: parked (%s): %s; see: ackbone %s show %s",
        run.message.id,
        park.kind,
        park.reason or "no reason was given",
        command,
        run.message.id,
        extra={"trace_id": run.message.trace_id},
    )


def stage(name: str, run: Run) -> None:
    """One line per stage of a message, for those who debug; at INFO there is one per batch."""
    log.debug(
        "%s %s",
        name,
        run.message.id,
        extra={"event": name, "trace_id": run.message.trace_id, "queue": run.queue},
    )
