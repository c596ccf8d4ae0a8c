"""Keys that a memory beside the store knows: asked before a run, told of its end, by the batch.

| keys       | before the run                       | after it                   |
|------------|--------------------------------------|----------------------------|
| cached     | a result of others ends it           | it is committed, then told |
| redis-only | taken; a result ends it, or it waits | it is told, then committed |

With `redis-only` a worker that dies between telling and commit leaves a result behind, for others:
the message itself runs again, for its replies went with the worker. Told the other way round, the
key would be held for its whole window by a message that has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.core.broker import Keys, Subscription
from holdfast.core.errors import DecodeError, HoldfastError, LeaseLost
from holdfast.core.json_text import loads, result_bytes
from holdfast.core.key_memory import KeyHolder, KeyMemory, SharedKey
from holdfast.core.outcome import Done, Duplicate, Park, Released, Retry
from holdfast.core.store import Finished, Run

from .batcher import Batcher
from .context import Context
from .executor import CallNext
from .results import outcome_of

log = logging.getLogger("holdfast.engine")

HELD_ELSEWHERE_S, LONGEST_S = 1.0, 30.0
"""Before a message asks again whose key another one has: at first, and at most. Each look is two
events in the ledger, and what has the key may run for hours."""
AWAY_S = 5.0
"""Before a message asks again while nobody answers."""
_NULL = b"null"


class SharedKeys:
    """A middleware around handlers, and a listener to commits."""

    def __init__(
        self,
        memory: KeyMemory,
        subscriptions: Sequence[Subscription],
        *,
        may_miss: bool,
        unavailable: Callable[[str, int], None],
    ) -> None:
        """`may_miss`: a message runs although the only memory of its key is away, else it waits.
        `unavailable` hears of such messages, and of results that could not be told: queue, number.
        """
        self._memory = memory
        self._subs = {sub.name: sub for sub in subscriptions if sub.keys is not Keys.STORE}
        self._may_miss = may_miss
        self._unavailable = unavailable
        self._looking: Batcher[SharedKey, KeyHolder | None] = Batcher(memory.look)
        self._taking: Batcher[SharedKey, KeyHolder] = Batcher(memory.take)
        self._keeping: Batcher[tuple[SharedKey, bytes], None] = Batcher(self._keep)
        self._freeing: Batcher[SharedKey, None] = Batcher(self._free)

    async def close(self) -> None:
        """Returns when all that was to be told is told, or could not be."""
        await self._keeping.drain()
        await self._freeing.drain()
        await self._memory.close()

    # -- around a run -----------------------------------------------------------------------------

    async def around(self, ctx: Context, call_next: CallNext) -> Any:
        """The handler's result, or the outcome that the memory knows already."""
        key = self._key(ctx._run)
        if key is None:
            return await call_next(ctx)
        if self._subs[key.subscription].keys is Keys.CACHED:
            return await self._behind_cache(key, ctx, call_next)
        return await self._taken(key, ctx, call_next)

    async def _behind_cache(self, key: SharedKey, ctx: Context, call_next: CallNext) -> Any:
        try:
            holder = await self._looking.add(key)
        except HoldfastError as error:  # the store has answered, and its word is the truth
            self._warn(key, "was not asked", error)
            holder = None
        if holder is None or holder.result is None or holder.message_id == key.message_id:
            return await call_next(ctx)
        return _duplicate(key, holder)

    async def _taken(self, key: SharedKey, ctx: Context, call_next: CallNext) -> Any:
        try:
            holder = await self._taking.add(key)
        except HoldfastError as error:
            if not self._may_miss:
                self._warn(key, f"was not asked, the message waits {AWAY_S:g} s", error)
                return Released(after_s=AWAY_S)
            self._warn(key, "was not asked, the message runs without dedup", error)
            ctx._without_dedup = True
            return await call_next(ctx)
        if holder.message_id != key.message_id:
            if holder.result is not None:
                return _duplicate(key, holder)
            return Released(after_s=_wait_s(ctx._run))
        try:
            result = await call_next(ctx)
            outcome = outcome_of(result)
            written = result_bytes(outcome.result) if type(outcome) is Done else None
        except LeaseLost:  # nor if it is cancelled: it may go on elsewhere
            raise
        except Exception:
            await self._freeing.add(key)
            raise
        if type(outcome) is Done:
            await self._keeping.add((key, written or _NULL))
        return result

    # -- after a commit ---------------------------------------------------------------------------

    def committed(self, batch: Sequence[Finished]) -> None:
        """Tell of these ends; nobody waits for it."""
        for item in batch:
            key = self._key(item.run)
            if key is None:
                continue
            alone = self._subs[key.subscription].keys is Keys.REDIS_ONLY
            if type(item.outcome) is Done:
                if not alone:
                    self._keeping.add((key, item.result or _NULL))
            elif alone and not isinstance(item.outcome, Retry | Park | Released | Duplicate):
                self._freeing.add(key)

    # -- the memory, which may be away ------------------------------------------------------------

    async def _keep(self, done: Sequence[tuple[SharedKey, bytes]]) -> Sequence[None]:
        try:
            await self._memory.keep(done)
        except HoldfastError as error:  # it has run: to run it again would be worse
            self._warn(done[0][0], "was not told of its result, the run stands", error, len(done))
        return [None] * len(done)

    async def _free(self, keys: Sequence[SharedKey]) -> Sequence[None]:
        try:
            await self._memory.free(keys)
        except HoldfastError as error:
            self._warn(keys[0], "still keeps it, until its window ends", error, len(keys))
        return [None] * len(keys)

    def _warn(self, key: SharedKey, what: str, error: Exception, messages: int = 1) -> None:
        others = f" and {messages - 1} more" if messages > 1 else ""
        log.warning(
            "message %s%s: the memory of its key %s: %s", key.message_id, others, what, error
        )
        self._unavailable(self._subs[key.subscription].queue, messages)

    def _key(self, run: Run) -> SharedKey | None:
        sub = self._subs.get(run.subscription)
        if sub is None or run.idem_key is None:
            return None
        message = run.message
        return SharedKey(
            message.tenant_id, run.subscription, run.idem_key, message.id, sub.dedup_window_s
        )


def _wait_s(run: Run) -> float:
    """A quarter of the time that it has waited already."""
    age_s = (run.claimed_at_us - run.created_at_us) / 1e6
    return min(LONGEST_S, max(HELD_ELSEWHERE_S, age_s / 4))


def _duplicate(key: SharedKey, holder: KeyHolder) -> Duplicate:
    value = _value(key, holder.result or _NULL)
    return Duplicate(
        of=holder.message_id or key.key, result=None if value is None else holder.result
    )


def _value(key: SharedKey, result: bytes) -> Any:
    """What somebody recorded; None if that is no JSON: the key is done all the same."""
    try:
        return loads(result)
    except DecodeError as error:
        log.warning("message %s: the result of its key is no JSON: %s", key.message_id, error)
        return None
