"""The handler that the engine calls for a trigger's messages: one agent run for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ackbone.core.outcome import Done, Duplicate, Rejected, Released
from ackbone.core.secret import mask_line
from ackbone.engine.context import Context

from .config import QueueTriggerConfig
from .mapping import DEFAULT_EVENT, envelope_of
from .messages import MessageEnvelope
from .ports import AgentRuntime, GovernanceLayer, IdempotencyStore

log = logging.getLogger("ackbone.trigger")

CLAIMED_ELSEWHERE_S = 1.0
"""Seconds until a message asks again for a key that another process has claimed. It waits as long
as that process's run takes, without using up an attempt."""
DEDUP_AWAY_S = 5.0
"""Seconds until a message that needs the user's dedup store asks it again."""


_GOES_ON = "continuing without dedup"


class AgentRunner:
    """Asks the user's dedup store, then governance, then runs the agent. Errors are retried."""

    def __init__(
        self,
        config: QueueTriggerConfig,
        runtime: AgentRuntime,
        governance: GovernanceLayer | None,
        idempotency_store: IdempotencyStore | None,
        *,
        guard_timeout_s: float,
        may_miss_dedup: bool,
        dedup_unavailable: Callable[[], None],
    ) -> None:
        """`may_miss_dedup`: a message runs even if the dedup store gives no answer; otherwise it
        waits. `dedup_unavailable` is called each time that there was no answer."""
        self._config = config
        self._runtime = runtime
        self._governance = governance
        self._guard_timeout_s = guard_timeout_s
        self._keys = idempotency_store if config.enable_dedup else None
        self._may_miss_dedup = may_miss_dedup
        self._dedup_unavailable = dedup_unavailable
        self.dedup_works = True
        """True if the dedup store answered the last call."""

    async def run(self, ctx: Context) -> Any:
        """Handle one message. Returns a result, or the outcome that the message ends with."""
        envelope = envelope_of(ctx.message, self._config)
        try:
            known = await self._known(ctx, envelope)
            if known is not None:
                return known
            try:
                outcome = await self._permitted_run(ctx, envelope)
            except BaseException:
                await self._release(ctx, envelope)
                raise
            if isinstance(outcome, Rejected):
                await self._release(ctx, envelope)
            return outcome
        except Exception as error:
            scrub(error)
            raise

    async def _permitted_run(self, ctx: Context, envelope: MessageEnvelope) -> Any:
        rejected = await self._ask_governance(envelope)
        if rejected is not None:
            log.warning(
                "message %s rejected by governance: %s",
                envelope.message_id,
                mask_line(rejected.reason),
                extra={"trace_id": ctx.message.trace_id},
            )
            return rejected
        result: Any = await self._runtime.trigger_event(
            event_name=envelope.event_name or DEFAULT_EVENT,
            context={
                "message": envelope.payload,
                "headers": envelope.headers,
                "source": envelope.source,
                "message_id": envelope.message_id,
                "received_at": envelope.received_at.isoformat(),
            },
            focus=self._config.focus,
            tenant_id=envelope.tenant_id,
        )
        _count_usage(ctx, result)
        await self._remember(envelope, result)
        return dict(result) if isinstance(result, Mapping) else result

    async def _ask_governance(self, envelope: MessageEnvelope) -> Rejected | None:
        """Ask governance. None: allowed. An error or a hang is raised, and never means allowed."""
        if self._governance is None:
            return None
        async with asyncio.timeout(self._guard_timeout_s):
            permission = await self._governance.check_permission(
                context={
                    "source": "queue_trigger",
                    "queue": self._config.queue_name,
                    "message_id": envelope.message_id,
                    "tenant_id": envelope.tenant_id,
                }
            )
        if permission.allowed is True:
            return None
        return Rejected(
            reason=permission.reason or "rejected by governance",
            policies=tuple(permission.policies or ()),
        )

    # -- the user's dedup store -------------------------------------------------------------------

    async def _known(
        self, ctx: Context, envelope: MessageEnvelope
    ) -> Duplicate | Done | Released | None:
        """Ask the dedup store about this key. None: run the message."""
        keys = self._keys
        if keys is None or not envelope.key:
            return None
        key = envelope.shared_key
        try:
            claimed = None
            if isinstance(
                keys, IdempotencyStore
            ):  # a store with only the three simple methods is fine
                claimed = await keys.claim(key, ctx.message.id, self._config.idempotency_window)
            recorded = await keys.exists(key)
            # Our own result: an earlier attempt died before it was committed.
            result = await keys.get(key) if recorded and claimed else None
        except Exception as error:
            if self._may_miss_dedup:
                self._without_dedup("check", error, _GOES_ON)
                ctx._without_dedup = True
                return None
            self._without_dedup("check", error, f"message {envelope.message_id} waits for it")
            return Released(after_s=DEDUP_AWAY_S)
        self.dedup_works = True
        if recorded:
            return Done(result) if claimed else Duplicate(of=envelope.key)
        if claimed is False:
            log.info(
                "message %s waits: another process has claimed key %s", envelope.message_id, key
            )
            return Released(after_s=CLAIMED_ELSEWHERE_S)
        return None

    async def dedup_is_up(self) -> bool:
        """Return True if the dedup store can be asked, or if the trigger has no dedup store."""
        if isinstance(self._keys, IdempotencyStore):
            try:
                answer = await self._keys.health_check()
            except Exception as error:
                log.warning("health check of the dedup store failed: %s", mask_line(str(error)))
                return False
            if answer is not None:
                return answer
        return self.dedup_works

    async def _remember(self, envelope: MessageEnvelope, result: Any) -> None:
        if self._keys is not None and envelope.key:
            try:
                await self._keys.set(envelope.shared_key, result, self._config.idempotency_window)
            except Exception as error:
                # The message has run. Running it again would be worse than a missing record.
                then = _GOES_ON if self._may_miss_dedup else "the run stands"
                self._without_dedup("record", error, then)
            else:
                self.dedup_works = True

    async def _release(self, ctx: Context, envelope: MessageEnvelope) -> None:
        """Free the key of a failed run."""
        if isinstance(self._keys, IdempotencyStore) and envelope.key:
            try:
                await self._keys.release(envelope.shared_key, ctx.message.id)
            except Exception as error:
                then = (
                    _GOES_ON
                    if self._may_miss_dedup
                    else "its key stays claimed until the window ends"
                )
                self._without_dedup("release", error, then)

    def _without_dedup(self, step: str, error: Exception, then: str) -> None:
        """Log and count that the dedup store gave no answer. ackbone's own dedup still works."""
        log.warning("Idempotency %s failed: %s, %s", step, mask_line(str(error)), then)
        self._dedup_unavailable()
        self.dedup_works = False


def scrub(error: BaseException) -> None:
    """Mask credentials in the texts of an error and of the errors that caused it, for the log."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        at.args = tuple(mask_line(arg) if isinstance(arg, str) else arg for arg in at.args)
        at = at.__cause__ or at.__context__


def _count_usage(ctx: Context, result: Any) -> None:
    """Return the usage from the agent's result. A wrong form is logged, and the message
    succeeds."""
    usage = result.get("usage") if isinstance(result, Mapping) else None
    if not isinstance(usage, Mapping):
        return
    try:
        ctx.usage(
            llm_calls=int(usage.get("llm_calls") or 0),
            tokens=int(usage.get("tokens") or 0),
            cost=float(usage.get("cost") or 0.0),
        )
    except (TypeError, ValueError, OverflowError):
        log.warning("message %s: the result's usage cannot be counted", ctx.message.id)
