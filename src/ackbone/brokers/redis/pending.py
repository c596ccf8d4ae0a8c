"""The pending entries of a consumer group (its PEL): scripts and answers for one stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

OURS = "ackbone-"
"""Prefix of our consumers' names. Entries of other consumers in the group are left to them."""
RELEASED = "_released"
"""The consumer that holds released entries. `RELEASED_MS`, their age, marks them."""
CHUNK = 500
START = b"0-0"

MOVE = """
local moved = 0
for i = 5, #ARGV do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[i], 'IDLE', ARGV[4], 'JUSTID')
    moved = moved + 1
  end
end
return moved
"""
"""Arguments: group, owner, new owner, age in ms, ids. Entries that another consumer has taken from
the owner are skipped. JUSTID: the move does not count as a delivery."""
RELEASED_MS = 10 * 365 * 86_400_000
ACK = """
local acked = redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 3))
local alone = ARGV[2] == 'auto' and redis.call('EXISTS', KEYS[1]) == 1
  and #redis.call('XINFO', 'GROUPS', KEYS[1]) == 1
if alone or ARGV[2] == 'always' then redis.call('XDEL', KEYS[1], unpack(ARGV, 3)) end
return acked
"""
"""Arguments: group, `delete_acked`, ids. XDEL takes an entry away from every group."""
BIND = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return owner end
if redis.call('PEXPIRE', KEYS[1], ARGV[2]) == 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return ARGV[1]
"""
"""Arguments: the store that wants the group, and for how many ms. Returns the name of the owner.

A server at its `maxmemory` stops a script only at its first write, and only if that write may take
memory. PEXPIRE takes none, so the SET after it is allowed: a full server can be worked empty."""
MAKE_GROUP = """
redis.pcall('XDEL', KEYS[1], '0-0')
return redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
"""
"""Create the group, from the stream's first entry on. XDEL removes nothing (no entry has this id);
it is the first write, for the reason that `BIND` gives."""
UNREAD = "return #redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])"
"""Arguments: the first id, and where to stop counting. Bodies stay on the server."""
COUNTED = 1000
"""Upper bound for the number of entries that `UNREAD` reads."""
FORGET = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  return redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
return -1
"""
"""Remove a consumer that has nothing pending, in one step: DELCONSUMER drops pending entries."""


class Owned(NamedTuple):
    """The consumer that had an entry, and how often the entry was delivered."""

    consumer: str
    deliveries: int


def pairs(answer: Sequence[Any]) -> dict[bytes, Any]:
    """Read an answer of names and values in turn, as XINFO gives it."""
    return dict(zip(answer[::2], answer[1::2], strict=True))


def owners(found: Sequence[Any] | None) -> dict[bytes, Owned]:
    """Read the answer to an XPENDING with a range: entry, consumer, age, deliveries."""
    return {entry: Owned(name.decode(), count) for entry, name, _, count in found or ()}


def counts(summary: Sequence[Any]) -> dict[str, int]:
    """Read the answer to an XPENDING without a range: how many entries each consumer has."""
    return {name.decode(): int(n) for name, n in summary[3] or ()}


def gone(consumers: Sequence[Sequence[Any]], me: str, idle_ms: int) -> list[str]:
    """Return our consumers, from an XINFO CONSUMERS, that hold nothing and were idle this long."""
    found = []
    for each in consumers:
        known = pairs(each)
        name = known[b"name"].decode()
        idle = known[b"pending"] == 0 and known[b"idle"] >= idle_ms
        if idle and name != me and name.startswith(OURS):
            found.append(name)
    return found


def others(summary: Sequence[Any], me: str) -> list[str]:
    """Return our other consumers that have pending entries."""
    found = counts(summary)
    return [name for name in found if name != me and name.startswith((OURS, RELEASED))]


def after(entry: bytes) -> bytes:
    """Return the next possible id. Servers before 6.2 have no exclusive ranges."""
    ms, _, seq = entry.partition(b"-")
    return b"%s-%d" % (ms, int(seq) + 1)


def place_in_order(entry: bytes) -> tuple[int, int]:
    """Return the sort key of an id, which is a pair of numbers written as text."""
    ms, _, seq = entry.partition(b"-")
    return int(ms), int(seq)
