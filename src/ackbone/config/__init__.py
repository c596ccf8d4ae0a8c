"""Load `ackbone.yaml`, the environment and the defaults into one frozen `Config`."""

from __future__ import annotations

from ackbone.core.secret import Secret, is_secret_name, mask_text
from ackbone.triggers.config import QueueTriggerConfig, validate_config

from .load import load_config, load_queue_trigger_config
from .queues import Queue, Retry, Tasks
from .settings import (
    Adapter,
    Breaker,
    Config,
    Ledger,
    Log,
    Metrics,
    Retention,
    Setting,
    Trigger,
    TriggerMetrics,
    Worker,
)

__all__ = [
    "Adapter",
    "Breaker",
    "Config",
    "Ledger",
    "Log",
    "Metrics",
    "Queue",
    "QueueTriggerConfig",
    "Retention",
    "Retry",
    "Secret",
    "Setting",
    "Tasks",
    "Trigger",
    "TriggerMetrics",
    "Worker",
    "is_secret_name",
    "load_config",
    "load_queue_trigger_config",
    "mask_text",
    "validate_config",
]
