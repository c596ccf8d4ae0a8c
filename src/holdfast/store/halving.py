"""A batch is one transaction; where an item of it cannot be stored, that one ends alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from holdfast.core.errors import StoreError

Item = TypeVar("Item")
Answer = TypeVar("Answer")


async def commit_in_halves(
    batch: Sequence[Item],
    commit: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
    alone: Callable[[Item, Exception], Awaitable[Answer]],
) -> Sequence[Answer]:
    """`commit` the batch; after an error of an item, half by half, until it stands by itself.

    `alone` is asked for its answer then. Raises StoreError if the store is the reason.
    """
    try:
        return await commit(batch)
    except StoreError:
        raise
    except Exception as error:
        if len(batch) == 1:
            return [await alone(batch[0], error)]
        half = len(batch) // 2
        first = await commit_in_halves(batch[:half], commit, alone)
        return [*first, *await commit_in_halves(batch[half:], commit, alone)]
