"""Show bodies of messages and failed attempts; control characters in them are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ackbone.admin.bodies import Reading

from .output import Output, dump, safe, when

_MOST = 4000


def show_body(out: Output, reading: Reading, body: bytes | None) -> None:
    """Show the message in a body, or its bytes and why they are not a message."""
    message = reading.message
    if message is not None:
        if message.headers:
            out.line(f"  headers   {dump(message.headers)}")
        if message.metadata:
            out.line(f"  metadata  {dump(message.metadata)}")
        out.line("  payload")
        for line in dump(message.payload, indent=2).splitlines():
            out.line(f"    {line}")
        return
    out.line(f"  unread    {safe(reading.problem or '')}")
    if body is not None:
        shown = body[:_MOST].decode("utf-8", "backslashreplace")
        rest = f" … {len(body) - _MOST} more bytes" if len(body) > _MOST else ""
        out.line(f"  bytes     {safe(shown)}{rest}")


def show_history(out: Output, history: Sequence[Any]) -> None:
    """Show the failed attempts, one line each, with their tracebacks."""
    if history:
        out.line("  history")
    shown = None
    for each in history:
        at = each.get("at")
        moment = when(at) if isinstance(at, int) else "-"
        crash = " (crash)" if each.get("crash") else ""
        out.line(
            f"    attempt {safe(each.get('attempt', '?'))}  {moment}{crash}  "
            f"{safe(each.get('error', ''))}"
        )
        trace = each.get("traceback")
        if trace and trace == shown:
            out.line("      (the same traceback)")
        else:
            show_traceback(out, each, "      ")
        shown = trace or shown


def show_traceback(out: Output, attempt: Any, indent: str) -> None:
    """Show the traceback of a failed attempt, if it has one."""
    for line in str(attempt.get("traceback") or "").splitlines():
        out.line(f"{indent}{safe(line)}")
