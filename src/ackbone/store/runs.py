"""Writes of a run before its end: effects, early replies, heartbeats, adoption.

Each is refused with LeaseLost once the run has lost its message, except the result of an effect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from ackbone.core import events
from ackbone.core.errors import LeaseLost
from ackbone.core.store import EffectState, Reply, Run, Token, Worker

from .commit import Transactions, X
from .delivery_rows import created_event, delivery_row
from .outcomes import identity_of
from .tasks import crc, run_info
from .unit import OUTGOING, Change, Tx

T = TypeVar("T")


class RunWrites(Transactions[X]):
    """The part of a store that runs use."""

    async def adopt(self, batch: Sequence[Run], *, worker: Worker) -> Sequence[bool]:
        """Write whole messages into the store. False for a run that is not this worker's now."""

        async def op(tx: Tx, change: Change) -> list[bool]:
            return [
                bool(
                    await tx.rows(
                        tx.sql.runs.adopt,
                        *identity_of(run),
                        worker.worker_id,
                        run.token.epoch,
                        run.body,
                        run_info(run),
                        crc(run.body),
                    )
                )
                for run in batch
            ]

        return await self.write(op, worker_id=worker.worker_id)

    async def effect_begin(
        self, run: Run, name: str, *, again: bool = False
    ) -> tuple[EffectState, bytes | None]:
        """Write the intent. If an earlier attempt wrote it, return how far that attempt got.

        `again`: the caller repeats a call whose answer it did not get.
        """
        identity, token = identity_of(run), (run.token.worker_id, run.token.epoch)

        async def op(tx: Tx, change: Change) -> tuple[EffectState, bytes | None]:
            await _fence(tx, run)
            found = await tx.rows(tx.sql.runs.effect, *identity, name)
            if found:
                state, value, worker_id, epoch = found[0]
                if state == "done":
                    return EffectState.DONE, value
                own = Token(worker_id, epoch) == run.token and value is None
                if own and (again or tx.repeated):  # this very call wrote it
                    return EffectState.NEW, None
                return EffectState.UNKNOWN, value
            await tx.send(tx.sql.runs.begin_effect, *identity, name, *token, await tx.moment())
            change.entries.append((*identity, events.EFFECT_BEGUN, {"name": name}))
            return EffectState.NEW, None

        return await self._of_run(run, op)

    async def effect_done(self, run: Run, name: str, result: bytes, *, again: bool = False) -> None:
        """Record the result, even if the run has lost its message: the effect has happened."""
        identity = identity_of(run)

        async def op(tx: Tx, change: Change) -> None:
            done = tx.sql.operations.effect_done
            written = await tx.rows(done, *identity, name, result, await tx.moment())
            if written or not (again or tx.repeated):
                change.entries.append((*identity, events.EFFECT_DONE, {"name": name}))

        await self._of_run(run, op)

    async def effect_raised(self, run: Run, name: str, error: str) -> None:
        """Keep the error of an effect that may have happened, for people to read."""

        async def op(tx: Tx, change: Change) -> None:
            tx.before_end(tx.sql.runs.effect_raised, *identity_of(run), name, error.encode())

        await self._of_run(run, op)

    async def effect_clear(self, run: Run, name: str) -> None:
        """Forget the intent of an effect that certainly did not happen."""

        async def op(tx: Tx, change: Change) -> None:
            await _fence(tx, run)
            tx.before_end(tx.sql.operations.effect_cleared, *identity_of(run), name)

        await self._of_run(run, op)

    async def heartbeat(self, run: Run, data: Mapping[str, Any]) -> None:
        async def op(tx: Tx, change: Change) -> None:
            await _fence(tx, run)
            found = await tx.rows(tx.sql.workers.name, run.token.worker_id)
            consumer = found[0][0] if found else ""
            shown = {"attempt": run.attempt, "consumer": consumer, **data}
            change.entries.append((*identity_of(run), events.HEARTBEAT, shown))

        await self._of_run(run, op)

    async def reply_now(self, run: Run, reply: Reply, n: int) -> str:
        """Write a reply that does not wait for the end of the run; return its delivery's id."""

        async def op(tx: Tx, change: Change) -> str:
            await _fence(tx, run)
            row = delivery_row(run, reply, n, await tx.moment())
            if await tx.deliveries.add(row):  # else an earlier attempt of this call wrote it
                change.entries.append(created_event(row))
            change.topics.add(OUTGOING)
            return str(row[0])

        return await self._of_run(run, op)

    async def _of_run(self, run: Run, op: Callable[[X, Change], Awaitable[T]]) -> T:
        return await self.write(op, worker_id=run.token.worker_id)


async def _fence(tx: Tx, run: Run) -> None:
    """Raise LeaseLost unless the run still owns its message."""
    token = run.token
    if not await tx.rows(tx.sql.runs.fence, *identity_of(run), token.worker_id, token.epoch):
        raise LeaseLost(
            f"message {run.message.id} was taken away from worker {token.worker_id} "
            "while it ran; this run can no longer write anything"
        )
