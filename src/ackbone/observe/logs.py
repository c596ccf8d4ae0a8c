"""Log lines: text on a terminal, JSON elsewhere, secrets masked and control characters escaped.

Every line has the process id, the worker id once it is known, and the trace of the message that the
code works for, if any. Values that callers give as `extra` are shown after the message.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, TextIO

import msgspec

from ackbone.core.message import current_message
from ackbone.core.origin import is_users
from ackbone.core.text import json_line, lines, one_line

from .redact import redact, redact_value

Form = Literal["auto", "json", "text"]

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"asctime", "message", "taskName"}
_SHORT = {"DEBUG": "debug", "WARNING": "warn", "CRITICAL": "fatal"}
_worker: Callable[[], int] = lambda: 0  # noqa: E731 - nobody is registered yet


def identify(worker: Callable[[], int]) -> None:
    """Set the worker id for the lines of this process. 0: not registered yet."""
    global _worker  # noqa: PLW0603 - one process, one worker
    _worker = worker


def configure_logs(
    *, level: str | None = None, format: Form = "auto", users_info: bool = False
) -> logging.Handler:
    """Set up logging of this process, on standard error. It may be called again.

    `users_info`: lines of the user's own code are shown from level info on, whatever `level` is.
    """
    handler = make_handler(sys.stderr, format)
    least = logging.getLevelNamesMapping()[(level or "info").upper()]
    if users_info:
        handler.addFilter(lambda record: record.levelno >= least or is_users(record.pathname))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(min(least, logging.INFO) if users_info else least)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    return handler


def make_handler(stream: TextIO, format: Form = "auto") -> logging.Handler:
    """Return a handler that writes to `stream`. auto: text if that is a terminal, else JSON."""
    handler = _Handler(stream)
    as_text = format == "text" or (format == "auto" and stream.isatty())
    handler.setFormatter(TextLines() if as_text else JsonLines())
    handler.addFilter(Redaction())
    return handler


class _Handler(logging.StreamHandler[TextIO]):
    """A handler of ackbone. Its class lets a second call find it."""


class Redaction(logging.Filter):
    """Masks a record before it is formatted. The record keeps the whole text and no arguments.

    Handlers that come after this one get the masked record, too.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            self._rewrite(record)
        except Exception as error:  # a line that cannot be masked must not be logged
            record.msg = f"<a line that cannot be shown: {type(error).__name__}>"
            for name in set(record.__dict__) - _STANDARD:
                del record.__dict__[name]
            record.exc_info = record.exc_text = record.stack_info = None
        record.args = None
        return True

    def _rewrite(self, record: logging.LogRecord) -> None:
        record.msg = redact(_text_of(record))
        for name in set(record.__dict__) - _STANDARD:
            record.__dict__[name] = redact_value(record.__dict__[name], name)
        message = current_message.get()
        if message is not None and not hasattr(record, "trace_id"):
            record.trace_id = redact(message.trace_id)
        if record.exc_info and not record.exc_text:
            record.exc_text = _FORMATTER.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        # Another handler must not format the exception again.
        record.exc_info = None
        if record.stack_info:
            record.stack_info = redact(record.stack_info)


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process or os.getpid(),
        }
        worker = _worker()
        if worker:
            fields["worker_id"] = worker
        fields.update(_extras(record))
        if record.exc_text:
            fields["exception"] = record.exc_text
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json_line(msgspec.json.encode(_safe(fields)).decode())


class TextLines(logging.Formatter):
    """Lines for people: a short time, the message, and its other values."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = _SHORT.get(record.levelname, record.levelname.lower())
        place = record.name.removeprefix("ackbone.")
        parts = [f"{moment}.{int(record.msecs):03d} {level:<5} {one_line(place)}:"]
        parts.append(one_line(record.getMessage()))
        worker = _worker()
        known = {"pid": record.process, **({"worker": worker} if worker else {})}
        known.update(_extras(record))
        parts += [f"{one_line(name)}={one_line(str(value))}" for name, value in known.items()]
        text = " ".join(parts)
        for more in (record.exc_text, record.stack_info):
            if more:
                text += "\n    " + lines(more.rstrip())
        return text


_FORMATTER = logging.Formatter()
_CONTAINERS = (dict, list, tuple, set, frozenset)


def _text_of(record: logging.LogRecord) -> str:
    """Return the message with its arguments, each masked by its name, which only this place
    knows."""
    args = record.args
    if not args:
        return str(record.msg)
    masked: Any
    if isinstance(args, tuple):
        masked = tuple(_argument(value) for value in args)
    else:
        masked = redact_value(args)
    try:
        return str(str(record.msg) % masked)
    except Exception:  # the caller's arguments do not fit the text: show both
        return f"{record.msg} {masked!r}"


def _argument(value: Any) -> Any:
    """Mask a container by the names in it. Other values are masked within the line."""
    return redact_value(value) if isinstance(value, _CONTAINERS) else value


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in record.__dict__.items() if k not in _STANDARD}


def _safe(value: Any) -> Any:
    """Escape characters that cannot be encoded or that a terminal would obey."""
    if isinstance(value, str):
        return value if value.isascii() else "\n".join(map(one_line, value.split("\n")))
    if isinstance(value, dict):
        return {_safe(str(key)): _safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_safe(item) for item in value]
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - JSON has no NaN
        return None
    return value


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("ackbone").critical("uncaught", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "?"
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        logging.getLogger("ackbone").critical(
            "uncaught exception in thread %s",
            name,
            exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        )
