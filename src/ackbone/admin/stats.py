"""Counts and rates of messages, workers and replies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from ackbone.core import events
from ackbone.core.clock import Clock
from ackbone.core.outbound.delivery import Status
from ackbone.core.outbound.delivery_records import DeliveryRecords
from ackbone.core.records import Count, QueueState, Records, WorkerState
from ackbone.core.serving import uncarried, unserved

from .queues import LookAtBrokers, list_queues

_RATES = {
    "succeeded": (events.SUCCEEDED,),
    "failed": (events.FAILED, events.EXPIRED, events.REJECTED),
    "duplicate": (events.DUPLICATE,),
    "retried": (events.RETRIED,),
    "reclaimed": (events.RECLAIMED,),
    "parked": (events.PARKED,),
}
_ORDER: Mapping[str, int] = {status: place for place, status in enumerate(Status)}
"""The order in which the states of replies are listed: from waiting to ended."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and rates at one moment."""

    at_us: int
    window_s: float
    queues: Sequence[QueueState]
    statuses: Mapping[str, Mapping[str, int]]
    """Messages by queue and status, as far back as messages are kept."""
    rates: Mapping[str, Mapping[str, float]]
    """Rates per minute over the window, by queue."""
    workers: Sequence[WorkerState]
    replies: Mapping[str, Mapping[str, int]]
    """Replies by channel and status."""
    paused_channels: Sequence[str] = ()
    uncarried: Mapping[str, int] = {}
    """Waiting replies by channel, for channels that no living worker has."""
    unserved: Mapping[str, int] = {}
    """Waiting messages by queue, for queues that no living worker reads."""
    uncounted: Mapping[str, str] = {}
    """Brokers whose messages could not be counted, by name, each with the reason."""


class Looking(Records, DeliveryRecords, Protocol):
    """The records that `stats` reads."""


async def stats(
    records: Looking,
    clock: Clock,
    *,
    window_s: float = 300.0,
    configured: Iterable[str] = (),
    look: LookAtBrokers | None = None,
) -> Stats:
    """Return the current counts, and the rates over the last `window_s` seconds."""
    now = clock.now_us()
    (queues, at_brokers), counts, recent, workers, replies, paused = await asyncio.gather(
        list_queues(records, configured, look),
        records.counts(),
        records.event_counts(now - int(window_s * 1e6)),
        records.workers(),
        records.reply_counts(),
        records.paused_channels(),
    )
    in_order = sorted(replies, key=lambda count: _ORDER.get(count.kind, len(_ORDER)))
    minutes = window_s / 60
    return Stats(
        at_us=now,
        window_s=window_s,
        queues=queues,
        statuses=_by_queue(counts),
        rates={
            queue: {
                name: round(sum(found.get(kind, 0) for kind in kinds) / minutes, 2)
                for name, kinds in _RATES.items()
            }
            for queue, found in _by_queue(recent).items()
        },
        workers=workers,
        replies=dict(sorted(_by_queue(in_order).items())),
        paused_channels=sorted(paused),
        uncarried=uncarried(replies, workers),
        unserved=unserved(queues, workers),
        uncounted=at_brokers.uncounted,
    )


def _by_queue(counts: Iterable[Count]) -> dict[str, dict[str, int]]:
    """Return the counts by queue (or channel) and kind."""
    found: dict[str, dict[str, int]] = {}
    for each in counts:
        found.setdefault(each.queue, {})[each.kind] = each.count
    return found
