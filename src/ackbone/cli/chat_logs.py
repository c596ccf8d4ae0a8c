"""Where log lines go while somebody chats: those of deliveries to the screen, others to a file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ackbone.core.text import one_line
from ackbone.observe.logs import Redaction, make_handler

from .screen import Screen

DELIVERY = "ackbone.delivery"


class ScreenLines(logging.Handler):
    """Shows what a logger says, and nothing else of its records."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen
        self.addFilter(Redaction())

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.show(one_line(record.getMessage()))


@contextmanager
def chat_logs(screen: Screen, path: Path, level: str) -> Iterator[None]:
    """Inside, logging is set up so; `level`: how much the file gets."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    root, delivery = logging.getLogger(), logging.getLogger(DELIVERY)
    with os.fdopen(fd, "a", encoding="utf-8") as file:
        kept = make_handler(file, "text")
        kept.setLevel(level.upper())
        shown = ScreenLines(screen)
        before = root.level, delivery.level
        root.addHandler(kept)
        root.setLevel(level.upper())
        delivery.addHandler(shown)
        delivery.setLevel(logging.DEBUG)  # an ordinary end is a line, too
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.removeHandler(kept)
            delivery.removeHandler(shown)
            root.setLevel(before[0])
            delivery.setLevel(before[1])
