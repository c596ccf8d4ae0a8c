"""Find the one item of a batch that the database refuses, so that it ends alone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ackbone.core.errors import StoreError, StoreUnavailable
from ackbone.core.outcome import UNSTORABLE, Dead
from ackbone.core.store import Commit, Finished

from .outcomes import bare

log = logging.getLogger("ackbone.store")

Item = TypeVar("Item")
Answer = TypeVar("Answer")


async def commit_in_halves(
    batch: Sequence[Item],
    commit: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
    alone: Callable[[Item, Exception], Awaitable[Answer]],
) -> Sequence[Answer]:
    """`commit` the batch; if it is refused, commit it half by half until one item is left.

    `alone` answers for that item. Raises StoreError if the store itself is the reason.
    """
    try:
        return await commit(batch)
    except StoreError:
        raise
    except MemoryError as error:
        raise StoreUnavailable("there is no memory left to store it") from error
    except Exception as error:
        if len(batch) == 1:
            return [await alone(batch[0], error)]
        half = len(batch) // 2
        first = await commit_in_halves(batch[:half], commit, alone)
        return [*first, *await commit_in_halves(batch[half:], commit, alone)]


async def finish_in_halves(
    batch: Sequence[Finished],
    finish: Callable[[Sequence[Finished]], Awaitable[Sequence[Commit]]],
) -> Sequence[Commit]:
    """`finish` the batch. A run whose outcome no row can hold ends as a dead letter, and is
    answered BURIED."""

    async def unstorable(item: Finished, error: Exception) -> Commit:
        log.error("message %s: its outcome cannot be stored", item.run.message.id, exc_info=error)
        dead = Dead(reason=UNSTORABLE, error=f"{type(error).__name__}: {error}")
        (commit,) = await finish([bare(item, dead)])
        return Commit.FENCED if commit is Commit.FENCED else Commit.BURIED

    return await commit_in_halves(batch, finish, unstorable)
