"""Queues: list, pause, resume."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

import msgspec

from ackbone.core.broker import QueueStats
from ackbone.core.errors import NotFound
from ackbone.core.records import Operations, QueueState, Records

Depths = Callable[[Collection[str]], Awaitable[Sequence[QueueStats]]]
"""Returns the number of messages at a broker's server, which the store does not know yet."""


async def list_queues(
    records: Records, configured: Iterable[str] = (), depths: Depths | None = None
) -> list[QueueState]:
    """Return every queue of the configuration, the store and the broker."""
    known = {state.queue: state for state in await records.queues()}
    for name in configured:
        known.setdefault(name, QueueState(queue=name))
    for there in await depths(known) if depths is not None else ():
        known[there.queue] = _with(known[there.queue], there)
    return [known[name] for name in sorted(known)]


def _with(state: QueueState, there: QueueStats) -> QueueState:
    ages = [age for age in (state.oldest_age_s, there.oldest_age_s) if age is not None]
    return msgspec.structs.replace(
        state,
        ready=state.ready + there.ready,
        delayed=state.delayed + there.delayed,
        oldest_age_s=max(ages, default=None),
    )


async def pause(
    records: Records, operations: Operations, queue: str, configured: Iterable[str] = ()
) -> bool:
    """Pause a queue; current runs go on. Return False if it was already paused."""
    await _known(records, queue, configured)
    return await operations.pause(queue)


async def resume(
    records: Records, operations: Operations, queue: str, configured: Iterable[str] = ()
) -> bool:
    """Resume a queue. Return False if it was not paused."""
    await _known(records, queue, configured)
    return await operations.unpause(queue)


async def _known(records: Records, queue: str, configured: Iterable[str]) -> None:
    """Raise NotFound for an unknown queue, which is probably mistyped."""
    names: Sequence[str] = [state.queue for state in await list_queues(records, configured)]
    if queue in names:
        return
    near = difflib.get_close_matches(queue, names, 1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else "a queue exists once it is in ackbone.yaml or a message was sent to it"
    )
    raise NotFound(f"there is no queue {queue!r}; {hint}")
