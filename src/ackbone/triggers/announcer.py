"""Reports the end of each message to the queue and the ledger, once the store has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ackbone.core.broker import Subscription
from ackbone.core.errors import ParseError, StoreError
from ackbone.core.outcome import RECORD_WORDS, Ending, Endings, Identity, Status
from ackbone.core.secret import mask_line
from ackbone.core.store import Answer, Decode

from .broker import AdapterBroker
from .config import QueueTriggerConfig
from .mapping import Copy, delivery_of
from .messages import PARSER_OF
from .ports import Ledger, QueueAdapter

log = logging.getLogger("ackbone.trigger")

LOOK_EVERY_S = 0.5
"""How often to look for messages that another process has ended."""


class Announcer:
    """A loop that settles the copies of ended messages by the trigger's `ack_policy`."""

    def __init__(
        self,
        broker: AdapterBroker,
        adapter: QueueAdapter,
        config: QueueTriggerConfig,
        subscription: Subscription,
        ledger: Ledger | None,
        endings: Endings,
        decode: Decode,
    ) -> None:
        self._broker = broker
        self._adapter = adapter
        self._config = config
        self._subscription = subscription
        self._ledger = ledger
        self._endings = endings
        self._decode = decode
        self._finishing = False

    async def run(self) -> None:
        """Look at each wake-up, and from time to time without one, until `finish`."""
        changed = self._broker.changed
        while not self._finishing:
            try:
                async with asyncio.timeout(LOOK_EVERY_S if self._broker.ended else None):
                    await changed.wait()
            except TimeoutError:
                pass  # no wake-up came: look anyway, in case one was lost
            changed.clear()
            try:
                await self.announce()
            except StoreError as error:
                log.warning(
                    "the store cannot be asked, so messages of the queue stay unsettled: %s", error
                )
                await asyncio.sleep(LOOK_EVERY_S)
            except Exception:  # without this loop nothing would be acknowledged any more
                log.exception("settling messages of %s failed", self._config.queue_name)
                await asyncio.sleep(LOOK_EVERY_S)

    def finish(self) -> None:
        """End `run` after one more look."""
        self._finishing = True
        self._broker.changed.set()

    async def announce(self) -> None:
        """Settle every copy whose message has ended, and keep the others."""
        batch, self._broker.ended = self._broker.ended, []
        told: set[Identity] = set()
        left = iter(batch)
        try:
            found = await self._ask({c.identity for c, verdict in batch if verdict != Answer.DEAD})
            for copy, verdict in left:
                if not await self._announce(copy, verdict, found, told):
                    self._broker.ended.append((copy, verdict))
        finally:
            self._broker.ended += left  # after an error: copies that were not looked at

    async def _announce(
        self, copy: Copy, verdict: str, found: Mapping[Identity, Ending], told: set[Identity]
    ) -> bool:
        """Settle one copy. Returns False if its message has not ended yet."""
        if verdict == Answer.DEAD:
            await self._dead_on_arrival(copy)
            return True
        ending = found.get(copy.identity)
        if ending is None:
            return False
        if copy.identity in told:  # the policy applies once; another copy is only acknowledged
            await self._broker.tell(copy.raw, self._adapter.ack)
            return True
        told.add(copy.identity)
        await self._record(copy, ending)
        await self._by_policy(copy, ending)
        return True

    async def _ask(self, identities: set[Identity]) -> Mapping[Identity, Ending]:
        if not identities:
            return {}
        return await self._endings(self._subscription.name, sorted(identities))

    async def _by_policy(self, copy: Copy, ending: Ending) -> None:
        policy = self._config.ack_policy
        failed = ending.status in (Status.FAILED, Status.EXPIRED)
        if policy == "dlq" and (failed or ending.status is Status.REJECTED):
            await self._bury(copy, ending.reason, ending.history)
        elif failed and policy in ("nack", "requeue"):
            nack = partial(self._adapter.nack, requeue=policy == "requeue")
            await self._broker.tell(copy.raw, nack)
        else:
            await self._broker.tell(copy.raw, self._adapter.ack)

    async def _record(self, copy: Copy, ending: Ending) -> None:
        """Write one record for each message that ended, except duplicates."""
        if self._ledger is None or ending.status not in _RECORDED:
            return
        envelope, data = copy.envelope, ending.data
        entry = {
            "trace_id": data.get("trace_id"),
            "message_id": envelope.message_id,
            "queue": self._config.queue_name,
            "event_name": envelope.event_name,
            "tenant_id": envelope.tenant_id,
            "status": RECORD_WORDS[ending.status],
            "duration_ms": data.get("duration_ms", 0),
            "agent_run_id": data.get("agent_run_id"),
        }
        if ending.status is Status.REJECTED:
            entry["reason"] = data.get("reason", "")
            entry["policies"] = list(data.get("policies", ()))
        try:
            await self._ledger.record(entry)
        except Exception as error:
            log.warning(
                "message %s: your ledger refused the record (the store's ledger has it): %s",
                envelope.message_id,
                mask_line(str(error)),
                extra={"trace_id": entry["trace_id"]},
            )

    async def _dead_on_arrival(self, copy: Copy) -> None:
        """Log a message that never ran: unreadable, or a known id with another payload."""
        reason = self._why_dead(copy)
        log.error(
            "Failed to parse message %s: %s",
            copy.envelope.message_id,
            mask_line(reason),
            extra={"trace_id": f"queue-{copy.task_id}"},
        )
        await self._bury(copy, reason, ())

    def _why_dead(self, copy: Copy) -> str:
        try:
            PARSER_OF[self._config.parser_type].parse(copy.raw.body)
        except ParseError as error:
            return str(error)
        candidate = self._decode(delivery_of(copy))
        if candidate.error is not None:
            return str(candidate.error)
        message_id = copy.envelope.message_id
        return f"message id {message_id} was used before, with another payload or type"

    async def _bury(self, copy: Copy, reason: str, history: Sequence[Mapping[str, Any]]) -> None:
        metadata = {**copy.raw.metadata, "retry_history": [dict(entry) for entry in history]}
        raw = replace(copy.raw, metadata=metadata)
        bury = partial(self._adapter.send_to_dlq, reason=mask_line(reason))
        await self._broker.tell(raw, bury)


_RECORDED = (Status.SUCCEEDED, Status.FAILED, Status.REJECTED, Status.EXPIRED)
