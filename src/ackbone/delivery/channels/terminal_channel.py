"""The terminal channel: prints replies in the terminal of the worker."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

import msgspec

from ackbone.core.errors import RateLimited
from ackbone.core.outbound.delivery import Outbound
from ackbone.core.text import lines, one_line

from .reply_text import marked

CHANNEL = "terminal"
GONE_S = 5.0


def to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class _Page(Outbound, frozen=True, kw_only=True):
    """Several replies that are printed together."""

    replies: Sequence[Outbound]


class TerminalChannel:
    """Prints replies, each at least once. While the terminal is gone, they wait."""

    name = CHANNEL
    merges = True

    def __init__(self, *, write: Callable[[str], None] = to_stdout) -> None:
        self._write = write

    def merged(self, replies: Sequence[Outbound]) -> Outbound:
        """Return all replies as one, printed as if each went alone."""
        return _Page(**msgspec.structs.asdict(replies[0]), replies=tuple(replies))

    async def send(self, reply: Outbound) -> None:
        replies = reply.replies if isinstance(reply, _Page) else (reply,)
        text = "".join(_line(each) for each in replies)
        try:
            # In a thread: a terminal that is stopped with Ctrl-S must not stop the worker.
            await asyncio.to_thread(self._write, text)
        except (OSError, ValueError) as error:
            raise RateLimited(f"it cannot be printed: {error}", retry_after_s=GONE_S) from error

    async def close(self) -> None:
        pass


def _line(reply: Outbound) -> str:
    return f"[reply] to {one_line(reply.recipient)}: {lines(marked(reply).content)}\n"
