"""Queues: list, pause, resume."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from ackbone.core.broker import QueueStats
from ackbone.core.errors import NotFound
from ackbone.core.records import Operations, QueueState, Records


class AtBrokers(msgspec.Struct, frozen=True, kw_only=True):
    """The brokers of queues, and the messages at their servers, which the store does not know."""

    brokers: Mapping[str, str] = {}
    """Names of brokers, by queue."""
    stats: Sequence[QueueStats] = ()
    uncounted: Mapping[str, str] = {}
    """Brokers whose messages could not be counted, by name, each with the reason."""


LookAtBrokers = Callable[[Collection[str]], Awaitable[AtBrokers]]
"""Looks at the brokers of some queues."""


async def list_queues(
    records: Records, configured: Iterable[str] = (), look: LookAtBrokers | None = None
) -> tuple[list[QueueState], AtBrokers]:
    """Return every queue of the configuration and the store, and what `look` found."""
    known = {state.queue: state for state in await records.queues()}
    for name in configured:
        known.setdefault(name, QueueState(queue=name))
    found = AtBrokers() if look is None else await look(known)
    for name, broker in found.brokers.items():
        known[name] = msgspec.structs.replace(known[name], broker=broker)
    for there in found.stats:
        known[there.queue] = _with(known[there.queue], there)
    return [known[name] for name in sorted(known)], found


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
    states, _ = await list_queues(records, configured)
    names = [state.queue for state in states]
    if queue in names:
        return
    near = difflib.get_close_matches(queue, names, 1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else "a queue exists once it is in ackbone.yaml or a message was sent to it"
    )
    raise NotFound(f"there is no queue {queue!r}; {hint}")
