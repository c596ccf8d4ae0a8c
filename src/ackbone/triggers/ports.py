"""What a queue trigger is put together from: the queue, the agent, and who watches over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from .messages import RawMessage


class QueueAdapter(Protocol):
    """A queue. It must give a message again that was neither acked, nacked nor sent to the DLQ.

    Each message is settled by exactly one of `ack`, `nack` and `send_to_dlq`, and only once the
    store holds its final outcome.
    """

    async def connect(self) -> None:
        """Raises if the queue cannot be reached."""
        ...

    def consume(self) -> AsyncIterator[RawMessage]:
        """The messages, as an async generator; it waits while there are none."""
        ...

    async def ack(self, message: RawMessage) -> None:
        """It was processed."""
        ...

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        """It was not processed; `requeue` asks for it again."""
        ...

    async def send_to_dlq(self, message: RawMessage, reason: str) -> None:
        """Move it to the dead-letter queue. `metadata["retry_history"]` tells of each attempt."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...

    async def health_check(self) -> bool:
        """Is the connection usable now?"""
        ...


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
        `run_id` names the run; its `usage` (llm_calls, tokens, cost) is counted. Whatever it raises
        is retried, save a `FinalError`.
        """
        ...


class Permission(Protocol):
    """What governance says about a run."""

    @property
    def allowed(self) -> bool: ...

    @property
    def reason(self) -> str | None: ...

    @property
    def policies(self) -> Sequence[str] | None: ...


class GovernanceLayer(Protocol):
    """Decides before each run whether it may happen. An error or a hang never means yes."""

    async def check_permission(self, context: dict[str, Any]) -> Permission:
        """`context` has source (`queue_trigger`), queue, message_id and tenant_id."""
        ...


class Ledger(Protocol):
    """An audit log of yours, told beside the store's own ledger."""

    async def record(self, entry: dict[str, Any]) -> None: ...


class IdempotencyStore(ABC):
    """A dedup memory of yours, asked beside the store's own.

    The store decides by itself which message of a key runs. This one is a second opinion for keys
    that others write, too; a check then a set is a race, so give it `claim` where it can be atomic.
    """

    @abstractmethod
    async def exists(self, key: str) -> bool:
        """Was a result recorded for this key? A mere claim is none."""

    @abstractmethod
    async def set(self, key: str, value: Any, ttl: int) -> None:
        """Record the result; forget it after `ttl` seconds."""

    @abstractmethod
    async def get(self, key: str) -> Any | None:
        """The recorded result; None if there is none."""

    async def claim(self, key: str, owner: str, ttl: int) -> bool | None:
        """Optional: take the key for `owner` in one atomic step.

        True: it is the owner's, now or already; a result that is there then is the owner's, too.
        False: somebody else has it or has recorded a result. None: this store cannot claim, and
        `exists` is asked instead.
        """
        return None

    async def release(self, key: str, owner: str) -> None:  # noqa: B027 - optional, as it says
        """Optional, beside `claim`: the owner's run failed, the key is free again."""

    async def health_check(self) -> bool | None:
        """Optional: can it be asked now? None: it cannot tell, and its last answer counts."""
        return None
