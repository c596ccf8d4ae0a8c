"""The machine that this process runs on, and which start of that machine this is."""

from __future__ import annotations

import functools
import socket
from pathlib import Path


@functools.cache
def boot_id() -> bytes:
    """Return the id of this start of the machine. Uptimes compare within one start only."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return bytes.fromhex(text.replace("-", ""))
    except (OSError, ValueError):
        return b"\0" * 16


@functools.cache
def this_machine() -> str:
    """Return a name that another machine, another container or another boot does not have."""
    return f"{socket.gethostname()}/{boot_id().hex()}"
