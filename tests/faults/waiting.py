"""Waiting for what must come to pass, and saying what did not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""How long something that must happen may take on a slow machine that many share."""
POLL_S = 0.02


def wait_until(true: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s in vain: {what}"
        time.sleep(POLL_S)


async def until(true: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
    """`wait_until` for a test whose own loop has work to do meanwhile."""
    await asyncio.to_thread(wait_until, true, what, patience_s=patience_s)
