"""Publishing once: of all messages with the same mark, a stream gets only the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter

from ackbone.core.broker import Outgoing
from ackbone.core.task_protocol import ONCE, FlatOutgoing

from .entries import fields_of
from .wire import Command

Part = str | bytes | int
MARK_S = 7 * 86_400
"""How long a mark is kept."""
SCRIPT = """
local at, key = 2, 2
while at <= #ARGV do
  local size, count, differ = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local entry = {unpack(ARGV, at + 3, at + 2 + size)}
  at = at + 3 + size
  local places = {}
  for i = 1, differ do places[i] = tonumber(ARGV[at + i - 1]) end
  at = at + differ
  for _ = 1, count do
    if redis.call('EXISTS', KEYS[key]) == 0 then
      for i = 1, differ do entry[places[i]] = ARGV[at + i - 1] end
      redis.call('XADD', KEYS[1], '*', unpack(entry))
      redis.call('SET', KEYS[key], '1', 'EX', ARGV[1])
    end
    at = at + differ
    key = key + 1
  end
end
return key
"""
"""Keys: the stream, and one mark for each message. Arguments: how long a mark is kept, then the
groups (`_group`). The entry is written before its mark, so that an entry that the server refuses
(full memory, a key of another type) leaves no mark."""


def once_command(queue: str, batch: Sequence[Outgoing]) -> Command:
    """Return the command that publishes the batch in one step. Raises InvalidMessage."""
    begin = f"{{{queue}}}:once:"  # the braces put it into the stream's slot of a cluster
    keys = [queue, *[begin + out.headers[ONCE] for out in batch]]
    values = _values_of_one_form(batch)
    if values is not None:
        places = range(2, 2 * len(values[0]) + 1, 2)  # each value follows its name
        groups = _group(fields_of(batch[0]), places, values)
    else:
        entries = [fields_of(out) for out in batch]
        groups = chain.from_iterable(
            _group(group[0], range(1, size + 1), group)
            for size, group in ((n, list(each)) for n, each in groupby(entries, key=len))
        )
    return ("EVAL", SCRIPT, len(keys), *keys, MARK_S, *groups)


def _values_of_one_form(batch: Sequence[Outgoing]) -> list[tuple[str, ...]] | None:
    """Return the values of each message, or None unless all have the same fields. Results of tasks
    do."""
    fields = [out.fields for out in batch if isinstance(out, FlatOutgoing)]
    if len(fields) < len(batch) or len(fields[0]) < 2 or len(set(map(len, fields))) > 1:
        return None
    try:
        return list(map(itemgetter(*fields[0]), fields))
    except KeyError:
        return None


def _group(
    entry: Sequence[Part], places: Sequence[int], rows: Sequence[Sequence[Part]]
) -> Iterator[Part]:
    """Write entries of one length. Values that all of them share are sent once.

    The parts: length, number of entries, number of places that differ; the first entry; those
    places, counted from one; the values of each entry there. `places`: the positions of the values
    of `rows` in an entry.
    """
    columns = list(zip(*rows, strict=True))
    differ = [n for n, column in enumerate(columns) if column.count(column[0]) < len(column)]
    return chain(
        (len(entry), len(rows), len(differ)),
        entry,
        [places[n] for n in differ],
        chain.from_iterable(zip(*[columns[n] for n in differ], strict=True)),
    )
