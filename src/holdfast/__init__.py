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
        NotDone,
        NotFoundError,
        ParkMessage,
        ParseError,
        PublishUnknown,
        RateLimited,
        RetryableError,
        SendUnknown,
        TemporaryError,
        ValidationError,
    )
    from holdfast.core.guard import Ask, Decision
    from holdfast.core.message import Message, Priority
    from holdfast.core.outcome import Dead, Done, Park, Rejected, Retry
    from holdfast.core.records import Cancelled
    from holdfast.core.retry import RetryPolicy
    from holdfast.delivery.apprise_channel import AppriseChannel
    from holdfast.delivery.channels import Channels
    from holdfast.delivery.discord_channel import DiscordChannel
    from holdfast.delivery.email_channel import EmailChannel
    from holdfast.delivery.file_queue import DeliveryQueue
    from holdfast.delivery.folder_channel import FolderChannel
    from holdfast.delivery.queued import QueuedDelivery
    from holdfast.delivery.recovery import recovery_report, recovery_scan
    from holdfast.delivery.runner import DeliveryRunner
    from holdfast.delivery.slack_channel import SlackChannel
    from holdfast.delivery.telegram_channel import TelegramChannel
    from holdfast.delivery.waits import BACKOFF_MS, compute_backoff_ms, is_ready_for_retry
    from holdfast.delivery.webhook import WebhookChannel
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
    "RateLimited": "holdfast.core.errors",
    "TemporaryError": "holdfast.core.errors",
    "FinalError": "holdfast.core.errors",
    "ValidationError": "holdfast.core.errors",
    "AuthorizationError": "holdfast.core.errors",
    "NotDone": "holdfast.core.errors",
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
    "SendUnknown": "holdfast.core.errors",
    "Channels": "holdfast.delivery.channels",
    "WebhookChannel": "holdfast.delivery.webhook",
    "AppriseChannel": "holdfast.delivery.apprise_channel",
    "DiscordChannel": "holdfast.delivery.discord_channel",
    "EmailChannel": "holdfast.delivery.email_channel",
    "SlackChannel": "holdfast.delivery.slack_channel",
    "TelegramChannel": "holdfast.delivery.telegram_channel",
    "DeliveryQueue": "holdfast.delivery.file_queue",
    "FolderChannel": "holdfast.delivery.folder_channel",
    "QueuedDelivery": "holdfast.delivery.queued",
    "recovery_report": "holdfast.delivery.recovery",
    "recovery_scan": "holdfast.delivery.recovery",
    "DeliveryRunner": "holdfast.delivery.runner",
    "BACKOFF_MS": "holdfast.delivery.waits",
    "compute_backoff_ms": "holdfast.delivery.waits",
    "is_ready_for_retry": "holdfast.delivery.waits",
}

__all__ = [
    "BACKOFF_MS",
    "App",
    "AppriseChannel",
    "Ask",
    "AuthorizationError",
    "BinaryParser",
    "Cancelled",
    "Channels",
    "Config",
    "ConfigError",
    "Context",
    "Dead",
    "Decision",
    "DeliveryQueue",
    "DeliveryRunner",
    "DiscordChannel",
    "Done",
    "EmailChannel",
    "FinalError",
    "FolderChannel",
    "HoldfastError",
    "IdempotencyStore",
    "InvalidMessage",
    "JSONParser",
    "Message",
    "MessageEnvelope",
    "MessageParser",
    "MockQueueAdapter",
    "NotDone",
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
    "QueuedDelivery",
    "RateLimited",
    "RawMessage",
    "Receipt",
    "RedisIdempotencyStore",
    "Rejected",
    "Retry",
    "RetryPolicy",
    "RetryableError",
    "SendUnknown",
    "SlackChannel",
    "SyncContext",
    "TaskResult",
    "TelegramChannel",
    "TemporaryError",
    "TextParser",
    "ValidationError",
    "WebhookChannel",
    "__version__",
    "compute_backoff_ms",
    "is_ready_for_retry",
    "load_config",
    "load_queue_trigger_config",
    "recovery_report",
    "recovery_scan",
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
