"""holdfast: a durable message backbone for AI agents. Nothing is lost on the way.

The public names are the imports under TYPE_CHECKING, and no other list. Type checkers read them
there. At run time a name is loaded when it is first used, so that `import holdfast` (and the
command line's `--help`) stays quick and loads no driver.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast.app import App as App
    from holdfast.config import Config as Config
    from holdfast.config import load_config as load_config
    from holdfast.config import load_queue_trigger_config as load_queue_trigger_config
    from holdfast.core.errors import AuthorizationError as AuthorizationError
    from holdfast.core.errors import ConfigError as ConfigError
    from holdfast.core.errors import FinalError as FinalError
    from holdfast.core.errors import HoldfastError as HoldfastError
    from holdfast.core.errors import InvalidMessage as InvalidMessage
    from holdfast.core.errors import NotDone as NotDone
    from holdfast.core.errors import NotFoundError as NotFoundError
    from holdfast.core.errors import ParkMessage as ParkMessage
    from holdfast.core.errors import ParseError as ParseError
    from holdfast.core.errors import PublishUnknown as PublishUnknown
    from holdfast.core.errors import RateLimited as RateLimited
    from holdfast.core.errors import RetryableError as RetryableError
    from holdfast.core.errors import SendUnknown as SendUnknown
    from holdfast.core.errors import TemporaryError as TemporaryError
    from holdfast.core.errors import ValidationError as ValidationError
    from holdfast.core.guard import Ask as Ask
    from holdfast.core.guard import Decision as Decision
    from holdfast.core.message import Message as Message
    from holdfast.core.message import Priority as Priority
    from holdfast.core.outcome import Dead as Dead
    from holdfast.core.outcome import Done as Done
    from holdfast.core.outcome import Park as Park
    from holdfast.core.outcome import Rejected as Rejected
    from holdfast.core.outcome import Retry as Retry
    from holdfast.core.records import Cancelled as Cancelled
    from holdfast.core.retry import RetryPolicy as RetryPolicy
    from holdfast.delivery.apprise_channel import AppriseChannel as AppriseChannel
    from holdfast.delivery.channels import Channels as Channels
    from holdfast.delivery.discord_channel import DiscordChannel as DiscordChannel
    from holdfast.delivery.email_channel import EmailChannel as EmailChannel
    from holdfast.delivery.file_queue import DeliveryQueue as DeliveryQueue
    from holdfast.delivery.folder_channel import FolderChannel as FolderChannel
    from holdfast.delivery.queued import QueuedDelivery as QueuedDelivery
    from holdfast.delivery.recovery import recovery_report as recovery_report
    from holdfast.delivery.recovery import recovery_scan as recovery_scan
    from holdfast.delivery.runner import DeliveryRunner as DeliveryRunner
    from holdfast.delivery.slack_channel import SlackChannel as SlackChannel
    from holdfast.delivery.telegram_channel import TelegramChannel as TelegramChannel
    from holdfast.delivery.waits import BACKOFF_MS as BACKOFF_MS
    from holdfast.delivery.waits import compute_backoff_ms as compute_backoff_ms
    from holdfast.delivery.waits import is_ready_for_retry as is_ready_for_retry
    from holdfast.delivery.webhook import WebhookChannel as WebhookChannel
    from holdfast.engine.context import Context as Context
    from holdfast.engine.context import SyncContext as SyncContext
    from holdfast.engine.sender import Receipt as Receipt
    from holdfast.orchestrator import Orchestrator as Orchestrator
    from holdfast.orchestrator import TaskResult as TaskResult
    from holdfast.queue_trigger import QueueTrigger as QueueTrigger
    from holdfast.triggers.config import QueueTriggerConfig as QueueTriggerConfig
    from holdfast.triggers.config import validate_config as validate_config
    from holdfast.triggers.messages import MessageEnvelope as MessageEnvelope
    from holdfast.triggers.messages import RawMessage as RawMessage
    from holdfast.triggers.mock import MockQueueAdapter as MockQueueAdapter
    from holdfast.triggers.parsers import BinaryParser as BinaryParser
    from holdfast.triggers.parsers import JSONParser as JSONParser
    from holdfast.triggers.parsers import MessageParser as MessageParser
    from holdfast.triggers.parsers import TextParser as TextParser
    from holdfast.triggers.ports import IdempotencyStore as IdempotencyStore
    from holdfast.triggers.ports import QueueAdapter as QueueAdapter
    from holdfast.triggers.redis_idempotency import RedisIdempotencyStore as RedisIdempotencyStore


@functools.cache
def _homes() -> dict[str, str]:
    """Return the module of each public name: the imports above, read from this file.

    Type checkers understand import statements and nothing else, so a table would be a second list.
    """
    with open(__file__, encoding="utf-8") as file:
        imports = [line.split() for line in file if line.startswith("    from holdfast.")]
    return {name: module for _, module, _, name, *_ in imports}


def __getattr__(name: str) -> Any:
    homes = _homes()
    if name == "__all__":
        return __dir__()
    if name not in homes:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(importlib.import_module(homes[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_homes()])
