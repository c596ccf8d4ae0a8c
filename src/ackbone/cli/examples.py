"""Examples below a command's help."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """An epilog that click prints as it stands."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
