"""Show bodies of messages and tracebacks; control characters in them are escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .output import Output, dump, plain, safe

if TYPE_CHECKING:
    from ackbone.admin.bodies import Reading

_MOST = 4000


def show_body(out: Output, reading: Reading, body: bytes | None) -> None:
    """Show the message in a body, or its bytes and why they are not a message."""
    message = reading.message
    if message is not None:
        payload = message.payload
        if message.headers:
            out.line(f"  headers   {dump(message.headers)}")
        if message.metadata:
            out.line(f"  metadata  {dump(message.metadata)}")
        out.line("  payload")
        text = dump(plain(payload), indent=2)
        for line in text.splitlines():
            out.line(f"    {line}")
        return
    out.line(f"  unread    {safe(reading.problem or '')}")
    if body is not None:
        shown = body[:_MOST].decode("utf-8", "backslashreplace")
        rest = f" … {len(body) - _MOST} more bytes" if len(body) > _MOST else ""
        out.line(f"  bytes     {safe(shown)}{rest}")


def show_traceback(out: Output, attempt: Any, indent: str) -> None:
    """Show the traceback of a failed attempt, if it has one."""
    for line in str(attempt.get("traceback") or "").splitlines():
        out.line(f"{indent}{safe(line)}")
