"""An operator as a worker of the store, and the answers if an action is not possible."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from ackbone.core import events
from ackbone.core.clock import from_us
from ackbone.core.errors import Conflict, StoreUnavailable
from ackbone.core.records import Replay
from ackbone.core.store import Worker
from ackbone.core.text import storable

log = logging.getLogger("ackbone.store")

LEAVE_S = 1.0
"""How long an operator that is done or interrupted tries to give back its worker id (seconds)."""


class Registry(Protocol):
    """The part of a store that registers workers."""

    async def register(self, name: str) -> Worker: ...

    async def leave(self, worker: Worker) -> None: ...

    def beat(self, worker: Worker) -> None: ...


class Operator:
    """An operator has a worker id while `async with` lasts. It chains the operator's events.

    `by`: the name of the operator, in every event.
    """

    def __init__(self, registry: Registry, *, by: str, beat_every_s: float) -> None:
        self._registry = registry
        self._by = by
        self._beat_every_s = beat_every_s
        self._worker: Worker | None = None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._worker = await self._registry.register(self._by)
        self._beating = asyncio.create_task(self._beat(self._worker), name="ackbone operator")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        beating, self._beating = self._beating, None
        worker, self._worker = self._worker, None
        if beating is not None:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating
        if worker is not None:
            # All actions are committed. A worker id that is not given back is reaped.
            with contextlib.suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._registry.leave(worker)

    async def _beat(self, worker: Worker) -> None:
        """Renew the lease. A paced replay may take hours, and must not be declared dead."""
        while True:
            try:
                await asyncio.to_thread(self._registry.beat, worker)
            except StoreUnavailable as error:
                log.warning("could not renew the lease of this operator: %s", error)
            await asyncio.sleep(self._beat_every_s)

    @property
    def _number(self) -> int:
        if self._worker is None:
            raise RuntimeError("operations are not open: use 'async with'")
        return self._worker.worker_id

    # -- events of actions ------------------------------------------------------------------------

    def _replayed(self, item: Replay) -> tuple[str, dict[str, Any]]:
        """Return the type and the data of the event."""
        data: dict[str, Any] = {
            "dead_letter_id": item.letter_id,
            "replay_id": item.send.outgoing.id,
            "queue": item.send.queue,
            "by": self._by,
        }
        if item.changed:
            data["changed"] = list(item.changed)
        return (events.DLQ_EDITED if item.changed else events.DLQ_REPLAYED), data

    def _discarded(self, letter_id: str, reason: str) -> dict[str, Any]:
        return {"dead_letter_id": letter_id, "reason": storable(reason), "by": self._by}


# ── why an action fails ──────────────────────────────────────────────────────────────────────────


def letter_is_settled(
    letter_id: str, state: str, replay_id: str | None, settled_us: int | None
) -> Conflict:
    when = "" if settled_us is None else f" at {from_us(settled_us):%Y-%m-%d %H:%M:%S} UTC"
    as_what = f" as message {replay_id}" if replay_id else ""
    return Conflict(f"dead letter {letter_id} was {state}{as_what}{when}; it is not open any more")


def waits_for_an_answer(message_id: str, question: str) -> Conflict:
    return Conflict(
        f"message {message_id} waits for an answer: 'ackbone approvals approve "
        f"{question}' lets it run, 'ackbone approvals reject {question}' ends it"
    )


def effects_are_unknown(message_id: str, names: Sequence[str]) -> Conflict:
    return Conflict(
        f"nobody knows whether {', '.join(names)} of message {message_id} "
        "happened. Look, and say so: "
        + " ".join(f"--effect {name}=done|not-done" for name in names)
    )


def no_such_effect(message_id: str, name: str, unknown: Sequence[str]) -> Conflict:
    return Conflict(
        f"message {message_id} has no effect {name!r} whose end is unknown "
        f"(there is: {', '.join(unknown) or 'none'})"
    )
