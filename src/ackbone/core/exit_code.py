"""How a process ended, in words."""

from __future__ import annotations

import signal


def fate(code: int) -> str:
    """Describe an exit code. A signal is a negative number, and not every signal has a name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
