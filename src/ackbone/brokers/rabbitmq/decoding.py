"""Messages of other programs that the driver's decoder refuses: our connections accept them.

A time in microseconds, a text that is not UTF-8 or a table of some hundred levels is an exception
in the decoder, which ends the connection. The server would deliver the message again and again, and
stop every queue.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from pamqp import decode

_TIME_BYTES = 8
Decoder = Callable[[bytes], tuple[int, Any]]
_ours = contextvars.ContextVar("_ours", default=False)
"""True in the tasks of our connections. Others in this process keep the strict decoders."""


def tolerant_context() -> contextvars.Context:
    """Return a context for a task that connects. The tasks that it starts inherit it."""
    context = contextvars.copy_context()
    context.run(_ours.set, True)
    return context


def _extend_decoders() -> None:
    """Replace the decoders of times, short texts and tables."""
    for name, code, instead in (
        ("timestamp", b"T", _no_time),
        ("shortstr", None, _escaped),
        ("table", b"F", _no_table),
    ):
        tolerant = _tolerant(decode.METHODS[name], instead)
        decode.METHODS[name] = tolerant
        if code is not None:
            decode.TABLE_MAPPING[code] = tolerant


def _tolerant(strict: Decoder, instead: Decoder) -> Decoder:
    def read(value: bytes) -> tuple[int, Any]:
        try:
            return strict(value)
        except (ValueError, OverflowError, OSError, RecursionError):
            if _ours.get():
                return instead(value)
            raise

    return read


def _no_time(value: bytes) -> tuple[int, None]:
    return _TIME_BYTES, None


def _escaped(value: bytes) -> tuple[int, str]:
    end = 1 + value[0]
    return end, value[1:end].decode("utf-8", "backslashreplace")


def _no_table(value: bytes) -> tuple[int, dict[str, Any]]:
    return 4 + int.from_bytes(value[:4]), {}


_extend_decoders()
