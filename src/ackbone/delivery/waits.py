"""How long a reply waits after each failure: 5 s, 25 s, 2 min, 10 min, 10 min."""

from __future__ import annotations

import time
import zlib

from ackbone.core.errors import RetryableError

from .answers import LONGEST_WAIT_S
from .queued import QueuedDelivery

BACKOFF_MS = [5000, 25000, 120000, 600000]
JITTER = 0.1
"""At most so much of a wait is added to it, so that what failed together does not return so."""


def compute_backoff_ms(retry_count: int) -> int:
    """The wait after so many failures, by the table; the last one is used again and again."""
    if retry_count <= 0:
        return BACKOFF_MS[0]
    return BACKOFF_MS[min(retry_count, len(BACKOFF_MS)) - 1]


def is_ready_for_retry(delivery: QueuedDelivery) -> bool:
    """Has it waited long enough? One that never failed has."""
    if delivery.retry_count == 0:
        return True
    waited_ms = (time.time() - delivery.last_attempt_at) * 1000
    return waited_ms >= compute_backoff_ms(delivery.retry_count)


def due_at(delivery: QueuedDelivery, *, scale: float = 1.0) -> float:
    """When it is tried next (seconds since 1970), jitter included. `scale` multiplies the waits of
    the table."""
    if delivery.not_before > 0 or delivery.retry_count <= 0:
        return delivery.not_before
    wait_s = compute_backoff_ms(delivery.retry_count) / 1000 * scale
    return delivery.last_attempt_at + wait_s * (1 + JITTER * _share(delivery))


def asked_s(error: BaseException) -> float:
    """The wait that the other side asked for with its failure, up to a day; 0: for none."""
    wait_s = error.retry_after_s if isinstance(error, RetryableError) else None
    return min(LONGEST_WAIT_S, max(0.0, wait_s or 0.0))


def _share(delivery: QueuedDelivery) -> float:
    """From 0 to 1, the same for one delivery and attempt however often it is asked."""
    return zlib.crc32(f"{delivery.id}/{delivery.retry_count}".encode()) / 0xFFFFFFFF
