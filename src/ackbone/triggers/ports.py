"""The parts of a queue trigger: queue, agent runtime, governance, ledger, dedup store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from .messages import RawMessage


class QueueAdapter(Protocol):
    """A queue. It must redeliver a message that was neither acked, nacked nor sent to the DLQ.

    Each message is settled by exactly one of `ack`, `nack` and `send_to_dlq`, after the store has
    its final outcome.
    """

    async def connect(self) -> None:
        """Connect. Raises if the queue cannot be reached."""

    def consume(self) -> AsyncIterator[RawMessage]:
        """Yield the messages. It is an async generator that waits while there are none."""

    async def ack(self, message: RawMessage) -> None:
        """Report that the message was processed."""

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        """Report that the message was not processed. `requeue` asks for a redelivery."""

    async def send_to_dlq(self, message: RawMessage, reason: str) -> None:
        """Move it to the dead-letter queue. `metadata["retry_history"]` lists the attempts."""

    async def close(self) -> None:
        """Disconnect."""

    async def health_check(self) -> bool:
        """Return True if the queue can be used now."""


class AgentRuntime(Protocol):
    """Runs agents."""

    async def trigger_event(
        self,
        event_name: str,
        context: dict[str, Any],
        focus: str | None,
        tenant_id: str | None,
    ) -> Mapping[str, Any]:
        """Run the agent for an event, and return when it is done.

        `context` has message, headers, source, message_id and received_at (ISO 8601). The result's
        `run_id` names the run. Its `usage` (llm_calls, tokens, cost) is counted. Every error is
        retried, except a `FinalError`.
        """


class Permission(Protocol):
    """The answer of governance."""

    @property
    def allowed(self) -> bool: ...

    @property
    def reason(self) -> str | None: ...

    @property
    def policies(self) -> Sequence[str] | None: ...


class GovernanceLayer(Protocol):
    """Decides before each run whether it is allowed. An error or a hang never means yes."""

    async def check_permission(self, context: dict[str, Any]) -> Permission:
        """`context` has source (`queue_trigger`), queue, message_id and tenant_id."""


class Ledger(Protocol):
    """Your own audit log. It gets a record in addition to the store's ledger."""

    async def record(self, entry: dict[str, Any]) -> None: ...


class IdempotencyStore(ABC):
    """Your own dedup store, asked in addition to the dedup of ackbone's store.

    The store alone decides which message of a key runs. This one is for keys that other programs
    write, too. `exists` and then `set` is a race, so implement `claim` if it can be atomic.
    """

    @abstractmethod
    async def exists(self, key: str) -> bool:
        """Return True if a result was recorded for this key. A claim is not a result."""

    @abstractmethod
    async def set(self, key: str, value: Any, ttl: int) -> None:
        """Record the result, for `ttl` seconds."""

    @abstractmethod
    async def get(self, key: str) -> Any | None:
        """Return the recorded result, or None."""

    async def claim(self, key: str, owner: str, ttl: int) -> bool | None:
        """Optional: claim the key for `owner` in one atomic step.

        True: the owner has it, now or already; a recorded result is the owner's own. False: another
        owner has it or has recorded a result. None: this store cannot claim, and `exists` is used
        instead.
        """
        return None

    async def release(self, key: str, owner: str) -> None:  # noqa: B027 - optional, as it says
        """Optional, with `claim`: free the key, because the owner's run failed."""

    async def health_check(self) -> bool | None:
        """Optional: return whether it can be used now. None: unknown, and the last call counts."""
        return None
