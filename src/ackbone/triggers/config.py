"""The settings of one queue trigger, and their rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ACK_POLICIES = ["ack", "nack", "requeue", "dlq"]
PARSERS = ["json", "text", "binary"]


@dataclass
class QueueTriggerConfig:
    """One queue whose messages start agent runs. Times are in seconds."""

    queue_name: str
    consumer_group: str
    concurrency: int = 1
    ack_policy: str = "ack"
    """How a message that finally failed is settled with its queue: ack, nack, requeue or dlq."""
    max_retries: int = 3
    """Retries after the first attempt."""
    retry_backoff_base: float = 1.0
    retry_backoff_multiplier: float = 2.0
    idempotency_window: int = 3600
    enable_dedup: bool = True
    parser_type: str = "json"
    """json, text or binary."""
    event_name_header: str = "x-event-name"
    focus: str | None = None
    """The skills that the agent runtime limits the run to."""
    metrics_enabled: bool = True
    """Whether the trigger writes metrics to the store's table `queue_metrics`."""
    metrics_export_interval: float | None = None
    """Seconds between two exports. None: as the store's `Config` says, else 60."""


def validate_config(config: QueueTriggerConfig) -> list[str]:
    """Return one sentence for each rule that the settings break. An empty list means valid."""
    errors: list[str] = []
    if not config.queue_name:
        errors.append("queue_name is required")
    if not config.consumer_group:
        errors.append("consumer_group is required")
    if not _number(config.concurrency) > 0:
        errors.append(f"concurrency must be positive, got {config.concurrency}")
    if config.ack_policy not in ACK_POLICIES:
        errors.append(f"ack_policy must be one of {ACK_POLICIES}, got {config.ack_policy}")
    if not _number(config.max_retries) >= 0:
        errors.append(f"max_retries must be non-negative, got {config.max_retries}")
    if not _number(config.retry_backoff_base) > 0:
        errors.append(f"retry_backoff_base must be positive, got {config.retry_backoff_base}")
    if not _number(config.retry_backoff_multiplier) >= 1:
        errors.append(
            f"retry_backoff_multiplier must be >= 1, got {config.retry_backoff_multiplier}"
        )
    if not _number(config.idempotency_window) > 0:
        errors.append(f"idempotency_window must be positive, got {config.idempotency_window}")
    if config.parser_type not in PARSERS:
        errors.append(f"parser_type must be one of {PARSERS}, got {config.parser_type}")
    every_s = config.metrics_export_interval
    if every_s is not None and not _number(every_s) > 0:
        errors.append(f"metrics_export_interval must be positive, got {every_s}")
    return errors


def _number(value: Any) -> float:
    """Return the value if it is a finite number, else NaN, which fails every comparison."""
    if not isinstance(value, int | float):
        return math.nan
    return value if math.isfinite(value) else math.nan
