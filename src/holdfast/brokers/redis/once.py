"""Publishing once: of all messages with one mark, a stream gets the first."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.broker import ONCE, Outgoing

from .entries import fields_of
from .wire import Command

MARK_S = 7 * 86_400
"""How long it is known that something was published."""
SCRIPT = """
local at = 2
for i = 2, #KEYS do
  local n = tonumber(ARGV[at])
  if redis.call('EXISTS', KEYS[i]) == 0 then
    redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 1, at + n))
    redis.call('SET', KEYS[i], '1', 'EX', ARGV[1])
  end
  at = at + n + 1
end
return at
"""
"""Keys: the stream, and a mark for each message. Arguments: how long a mark stays; for each message
the number of its fields and values, and these. The entry comes before its mark: what refuses the
entry (a full server, a key of another kind) leaves no mark."""


def once_command(queue: str, batch: Sequence[Outgoing]) -> Command:
    """One step on the server. Raises InvalidMessage for what is no entry."""
    keys = [queue, *[_mark_of(queue, out.headers[ONCE]) for out in batch]]
    written: list[str | bytes | int] = []
    for out in batch:
        fields = fields_of(out)
        written.append(len(fields))
        written += fields
    return ("EVAL", SCRIPT, len(keys), *keys, MARK_S, *written)


def _mark_of(queue: str, mark: str) -> str:
    """The braces put it into the stream's slot of a cluster."""
    return f"{{{queue}}}:once:{mark}"
