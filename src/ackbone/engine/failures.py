"""How an attempt ends that did not succeed: the error or the cancellation becomes an outcome."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ackbone.core.errors import (
    EffectUnknown,
    HandlerCrashed,
    HandlerTimeout,
    ParkMessage,
    StoreUnavailable,
)
from ackbone.core.outcome import Discarded, Outcome, Park, ParkKind, Released, Retry
from ackbone.core.retry import decide, describe
from ackbone.core.store import Run

from .handlers import Handler, as_failure
from .tracebacks import Mask, bounded, user_trace, warn

if TYPE_CHECKING:
    from .executor import Active

log = logging.getLogger("ackbone.engine")


def raised(active: Active, handler: Handler, error: BaseException, mask: Mask) -> Outcome | None:
    """Return the outcome of an attempt whose guard or handler raised `error`."""
    if isinstance(error, ParkMessage):
        return Park(kind=error.kind, reason=mask(str(error)))
    if isinstance(error, EffectUnknown):
        return Park(kind=ParkKind.EFFECT_UNKNOWN, reason=mask(str(error)))
    if active.cause:  # whatever the handler raised, it ended because it was told to
        return cancelled(active, handler, mask)
    if isinstance(error, StoreUnavailable):
        return _store_away(active.run, error)
    return _failed(active, handler, as_failure(error), user_trace(error), mask)


def cancelled(active: Active, handler: Handler, mask: Mask) -> Outcome | None:
    """Return the outcome of a run that was told to stop. None: its claim is lost."""
    match active.cause:
        case "timeout":
            error = HandlerTimeout(f"{handler.name} ran longer than {handler.timeout_s} s")
            return _failed(active, handler, error, "", mask)
        case "store":
            return _store_away(active.run, f"{handler.name} waited for it past its timeout")
        case "drain":
            return Released()
        case "cancel":
            return Discarded(reason="cancelled")
        case _:
            return None


def _store_away(run: Run, error: BaseException | str) -> Outcome:
    """An outage of the store is not a failure of the handler. It costs no attempt, and the breaker
    does not count it."""
    log.warning(
        "message %s: the store was away for too long; it runs again without a lost attempt: %s",
        run.message.id,
        error,
    )
    return Released(after_s=1.0)


def _failed(
    active: Active, handler: Handler, error: BaseException, trace: str, mask: Mask
) -> Outcome:
    """Return the outcome of an attempt that raised `error`: a retry or a dead letter."""
    run = active.run
    active.trace = bounded(mask(trace))
    if isinstance(error, HandlerCrashed):
        log.warning("message %s: %s", run.message.id, error)
        return Retry(after_s=0.0, reason=describe(error, mask), crashed=True)
    decision = decide(handler.retry, failures=run.failures + 1, error=error, mask=mask)
    warn(
        log,
        "message %s: attempt %d of %d of %s failed: %s; %s",
        run.message.id,
        run.failures + 1,
        handler.retry.max_retries + 1,
        handler.name,
        describe(error, mask),
        f"retry in {decision.after_s:.1f} s"
        if isinstance(decision, Retry)
        else f"to dead letters (ackbone dlq show {run.message.id})",
        trace=active.trace,
        trace_id=run.message.trace_id,
    )
    log.debug("message %s: the whole traceback", run.message.id, exc_info=error)
    return decision
