"""The waits between attempts: 5 s, 25 s, 2 min, 10 min, 10 min."""

from __future__ import annotations

import zlib

from ackbone.core.errors import RetryableError

BACKOFF_MS = [5000, 25000, 120000, 600000]
JITTER = 0.1
"""Largest share of a wait that is added to it: deliveries that failed together return apart."""
LONGEST_WAIT_S = 86_400.0
"""A service that asks for a longer wait is asked again after a day."""


def compute_backoff_ms(retry_count: int) -> int:
    """Return the wait after this many failures. The last one of the table repeats."""
    if retry_count <= 0:
        return BACKOFF_MS[0]
    return BACKOFF_MS[min(retry_count, len(BACKOFF_MS)) - 1]


def wait_s(retry_count: int, scale: float) -> float:
    """Return the wait of the table in seconds, multiplied by `scale`."""
    return compute_backoff_ms(retry_count) / 1000 * scale


def spread_s(delivery_id: str, retry_count: int, scale: float) -> float:
    """Return the same wait with jitter, which is fixed for one delivery and attempt."""
    share = zlib.crc32(f"{delivery_id}/{retry_count}".encode()) / 0xFFFFFFFF
    return wait_s(retry_count, scale) * (1 + JITTER * share)


def asked_s(error: BaseException) -> float:
    """Return the wait that the service asked for with its failure, at most a day; 0 for none."""
    asked = error.retry_after_s if isinstance(error, RetryableError) else None
    return min(LONGEST_WAIT_S, max(0.0, asked or 0.0))
