"""The machine that this process runs on, and how its processes ended."""

from __future__ import annotations

import functools
import signal
import socket
from pathlib import Path


@functools.cache
def boot_id() -> bytes:
    """Return the id of this boot. Uptimes can be compared only within one boot."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return bytes.fromhex(text.replace("-", ""))
    except (OSError, ValueError):
        return b"\0" * 16


@functools.cache
def this_machine() -> str:
    """Return a name that another machine, another container or another boot does not have."""
    return f"{socket.gethostname()}/{boot_id().hex()}"


def fate(code: int) -> str:
    """Describe an exit code. A negative number is a signal, which may have no name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
