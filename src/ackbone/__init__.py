"""ackbone: a durable message backbone for AI agents. Nothing is lost on the way.

The public names are the imports under TYPE_CHECKING, and no other list. Type checkers read them
there. At run time a name is loaded when it is first used, so that `import ackbone` (and the
command line's `--help`) stays quick and loads no driver.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ackbone.app import App as App
    from ackbone.config import Config as Config
    from ackbone.config import load_config as load_config
    from ackbone.config import load_queue_trigger_config as load_queue_trigger_config
    from ackbone.core.errors import AckboneError as AckboneError
    from ackbone.core.errors import AuthorizationError as AuthorizationError
    from ackbone.core.errors import ConfigError as ConfigError
    from ackbone.core.errors import FinalError as FinalError
    from ackbone.core.errors import InvalidMessage as InvalidMessage
    from ackbone.core.errors import NotDone as NotDone
    from ackbone.core.errors import NotFoundError as NotFoundError
    from ackbone.core.errors import ParkMessage as ParkMessage
    from ackbone.core.errors import ParseError as ParseError
    from ackbone.core.errors import PublishUnknown as PublishUnknown
    from ackbone.core.errors import RateLimited as RateLimited
    from ackbone.core.errors import RetryableError as RetryableError
    from ackbone.core.errors import SendUnknown as SendUnknown
    from ackbone.core.errors import TemporaryError as TemporaryError
    from ackbone.core.errors import ValidationError as ValidationError
    from ackbone.core.guard import Ask as Ask
    from ackbone.core.guard import Decision as Decision
    from ackbone.core.message import Message as Message
    from ackbone.core.message import Priority as Priority
    from ackbone.core.outcome import Dead as Dead
    from ackbone.core.outcome import Done as Done
    from ackbone.core.outcome import Park as Park
    from ackbone.core.outcome import Rejected as Rejected
    from ackbone.core.outcome import Retry as Retry
    from ackbone.core.records import Cancelled as Cancelled
    from ackbone.core.retry import RetryPolicy as RetryPolicy
    from ackbone.delivery.backoff import BACKOFF_MS as BACKOFF_MS
    from ackbone.delivery.backoff import compute_backoff_ms as compute_backoff_ms
    from ackbone.delivery.channels.apprise_channel import AppriseChannel as AppriseChannel
    from ackbone.delivery.channels.discord_channel import DiscordChannel as DiscordChannel
    from ackbone.delivery.channels.email_channel import EmailChannel as EmailChannel
    from ackbone.delivery.channels.folder_channel import FolderChannel as FolderChannel
    from ackbone.delivery.channels.slack_channel import SlackChannel as SlackChannel
    from ackbone.delivery.channels.telegram_channel import TelegramChannel as TelegramChannel
    from ackbone.delivery.channels.webhook_channel import WebhookChannel as WebhookChannel
    from ackbone.delivery.files.channel_sender import Channels as Channels
    from ackbone.delivery.files.delivery_queue import DeliveryQueue as DeliveryQueue
    from ackbone.delivery.files.delivery_runner import DeliveryRunner as DeliveryRunner
    from ackbone.delivery.files.queued_delivery import QueuedDelivery as QueuedDelivery
    from ackbone.delivery.files.queued_delivery import is_ready_for_retry as is_ready_for_retry
    from ackbone.delivery.recovery_report import recovery_report as recovery_report
    from ackbone.delivery.recovery_report import recovery_scan as recovery_scan
    from ackbone.engine.context import Context as Context
    from ackbone.engine.context import SyncContext as SyncContext
    from ackbone.engine.sender import Receipt as Receipt
    from ackbone.orchestrator import Orchestrator as Orchestrator
    from ackbone.orchestrator import TaskResult as TaskResult
    from ackbone.queue_trigger import QueueTrigger as QueueTrigger
    from ackbone.triggers.adapters import MockQueueAdapter as MockQueueAdapter
    from ackbone.triggers.config import QueueTriggerConfig as QueueTriggerConfig
    from ackbone.triggers.config import validate_config as validate_config
    from ackbone.triggers.messages import BinaryParser as BinaryParser
    from ackbone.triggers.messages import JSONParser as JSONParser
    from ackbone.triggers.messages import MessageEnvelope as MessageEnvelope
    from ackbone.triggers.messages import MessageParser as MessageParser
    from ackbone.triggers.messages import RawMessage as RawMessage
    from ackbone.triggers.messages import TextParser as TextParser
    from ackbone.triggers.ports import IdempotencyStore as IdempotencyStore
    from ackbone.triggers.ports import QueueAdapter as QueueAdapter
    from ackbone.triggers.redis_idempotency import RedisIdempotencyStore as RedisIdempotencyStore


@functools.cache
def _homes() -> dict[str, str]:
    """Return the module of each public name: the imports above, read from this file.

    Type checkers understand import statements and nothing else, so a table would be a second list.
    """
    with open(__file__, encoding="utf-8") as file:
        imports = [line.split() for line in file if line.startswith("    from ackbone.")]
    return {name: module for _, module, _, name, *_ in imports}


def __getattr__(name: str) -> Any:
    homes = _homes()
    if name == "__all__":
        return __dir__()
    if name not in homes:
        raise AttributeError(f"module 'ackbone' has no attribute {name!r}")
    try:
        module = importlib.import_module(homes[name])
    except ModuleNotFoundError as error:
        if not name.endswith("Channel"):
            raise
        from ackbone.core.errors import install_extra

        how = install_extra(name.removesuffix("Channel").lower())
        raise ModuleNotFoundError(
            f"ackbone.{name} needs {error.name}: {how}", name=error.name
        ) from None
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_homes()])
