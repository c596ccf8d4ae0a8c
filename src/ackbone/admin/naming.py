"""From what a person typed to the one thing that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ackbone.core.errors import Ambiguous, InvalidMessage, NotFound

T = TypeVar("T")
SHORTEST = 4
"""Characters that a prefix needs."""


def check_typed(name: str) -> str:
    """A name that can be looked for."""
    name = name.strip()
    if not name:
        raise InvalidMessage("the id is empty")
    return name


def the_one(
    found: Sequence[T],
    *,
    name: str,
    what: str,
    describe: Callable[[T], str],
    hint: str = "",
    several: str | None = None,
) -> T:
    """The only match. Raises NotFound, or Ambiguous with all matches; `several`: their plural."""
    if not found:
        raise NotFound(f"there is no {what} {name!r}{hint}")
    if len(found) > 1:
        things = several or f"{what}s"
        raise Ambiguous(
            f"{name!r} fits {len(found)} {things}; write more of the id, or name the tenant",
            [describe(each) for each in found],
        )
    return found[0]
