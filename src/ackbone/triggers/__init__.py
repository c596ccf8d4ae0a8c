"""Queue triggers: messages of foreign queues start agent runs.

`QueueTrigger` itself is in `ackbone/queue_trigger.py`, because it names a concrete store.
"""

from ackbone.core.errors import ParseError

from .adapters import BrokerQueueAdapter, MockQueueAdapter
from .config import QueueTriggerConfig, validate_config
from .messages import (
    BinaryParser,
    JSONParser,
    MessageEnvelope,
    MessageParser,
    RawMessage,
    TextParser,
)
from .ports import AgentRuntime, GovernanceLayer, IdempotencyStore, Ledger, Permission, QueueAdapter
from .redis_idempotency import RedisIdempotencyStore

__all__ = [
    "AgentRuntime",
    "BinaryParser",
    "BrokerQueueAdapter",
    "GovernanceLayer",
    "IdempotencyStore",
    "JSONParser",
    "Ledger",
    "MessageEnvelope",
    "MessageParser",
    "MockQueueAdapter",
    "ParseError",
    "Permission",
    "QueueAdapter",
    "QueueTriggerConfig",
    "RawMessage",
    "RedisIdempotencyStore",
    "TextParser",
    "validate_config",
]
