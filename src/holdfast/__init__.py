"""holdfast: a durable message backbone for AI agents. Nothing is lost on the way.

The public names. They are loaded when first used, so that `import holdfast` (and the command line's
`--help`) stays quick and pulls in no driver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast.app import App
    from holdfast.config import Config, load_config, load_queue_trigger_config
    from holdfast.core.errors import (
        AuthorizationError,
        ConfigError,
        FinalError,
        HoldfastError,
        InvalidMessage,
        NotFoundError,
        ParkMessage,
        ParseError,
        PublishUnknown,
        RetryableError,
        TemporaryError,
        ValidationError,
    )
    from holdfast.core.guard import Ask, Decision
    from holdfast.core.message import Message, Priority
    from holdfast.core.outcome import Dead, Done, Park, Rejected, Retry
    from holdfast.core.records import Cancelled
    from holdfast.core.retry import RetryPolicy
    from holdfast.engine.context import Context, SyncContext
    from holdfast.engine.sender import Receipt
    from holdfast.orchestrator import Orchestrator, TaskResult
    from holdfast.queue_trigger import QueueTrigger
    from holdfast.triggers.config import QueueTriggerConfig, validate_config
    from holdfast.triggers.messages import MessageEnvelope, RawMessage
    from holdfast.triggers.mock import MockQueueAdapter
    from holdfast.triggers.parsers import BinaryParser, JSONParser, MessageParser, TextParser
    from holdfast.triggers.ports import IdempotencyStore, QueueAdapter
    from holdfast.triggers.redis_idempotency import RedisIdempotencyStore

_HOME = {
    "App": "holdfast.app",
    "Receipt": "holdfast.engine.sender",
    "Config": "holdfast.config",
    "load_config": "holdfast.config",
    "load_queue_trigger_config": "holdfast.config",
    "Message": "holdfast.core.message",
    "Priority": "holdfast.core.message",
    "RetryPolicy": "holdfast.core.retry",
    "Done": "holdfast.core.outcome",
    "Retry": "holdfast.core.outcome",
    "Dead": "holdfast.core.outcome",
    "Park": "holdfast.core.outcome",
    "Rejected": "holdfast.core.outcome",
    "Context": "holdfast.engine.context",
    "SyncContext": "holdfast.engine.context",
    "Ask": "holdfast.core.guard",
    "Decision": "holdfast.core.guard",
    "HoldfastError": "holdfast.core.errors",
    "ConfigError": "holdfast.core.errors",
    "InvalidMessage": "holdfast.core.errors",
    "PublishUnknown": "holdfast.core.errors",
    "RetryableError": "holdfast.core.errors",
    "TemporaryError": "holdfast.core.errors",
    "FinalError": "holdfast.core.errors",
    "ValidationError": "holdfast.core.errors",
    "AuthorizationError": "holdfast.core.errors",
    "NotFoundError": "holdfast.core.errors",
    "ParkMessage": "holdfast.core.errors",
    "ParseError": "holdfast.core.errors",
    "Orchestrator": "holdfast.orchestrator",
    "TaskResult": "holdfast.orchestrator",
    "Cancelled": "holdfast.core.records",
    "QueueTrigger": "holdfast.queue_trigger",
    "QueueTriggerConfig": "holdfast.triggers.config",
    "validate_config": "holdfast.triggers.config",
    "MessageEnvelope": "holdfast.triggers.messages",
    "RawMessage": "holdfast.triggers.messages",
    "MockQueueAdapter": "holdfast.triggers.mock",
    "BinaryParser": "holdfast.triggers.parsers",
    "JSONParser": "holdfast.triggers.parsers",
    "MessageParser": "holdfast.triggers.parsers",
    "TextParser": "holdfast.triggers.parsers",
    "IdempotencyStore": "holdfast.triggers.ports",
    "QueueAdapter": "holdfast.triggers.ports",
    "RedisIdempotencyStore": "holdfast.triggers.redis_idempotency",
}

__all__ = [
    "App",
    "Ask",
    "AuthorizationError",
    "BinaryParser",
    "Cancelled",
    "Config",
    "ConfigError",
    "Context",
    "Dead",
    "Decision",
    "Done",
    "FinalError",
    "HoldfastError",
    "IdempotencyStore",
    "InvalidMessage",
    "JSONParser",
    "Message",
    "MessageEnvelope",
    "MessageParser",
    "MockQueueAdapter",
    "NotFoundError",
    "Orchestrator",
    "Park",
    "ParkMessage",
    "ParseError",
    "Priority",
    "PublishUnknown",
    "QueueAdapter",
    "QueueTrigger",
    "QueueTriggerConfig",
    "RawMessage",
    "Receipt",
    "RedisIdempotencyStore",
    "Rejected",
    "Retry",
    "RetryPolicy",
    "RetryableError",
    "SyncContext",
    "TaskResult",
    "TemporaryError",
    "TextParser",
    "ValidationError",
    "__version__",
    "load_config",
    "load_queue_trigger_config",
    "validate_config",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
