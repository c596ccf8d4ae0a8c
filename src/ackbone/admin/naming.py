"""Find the one object that a person named by its id or the beginning of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ackbone.core.errors import Ambiguous, InvalidMessage, NotFound

T = TypeVar("T")
SHORTEST = 4
"""The least number of characters of a prefix."""


def check_typed(name: str) -> str:
    """Return the name without blanks. Raises InvalidMessage if it is empty."""
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
    """Return the only match. Raises NotFound, or Ambiguous with all matches.

    `what` is the noun for the error message, `several` its plural if it does not end in "s".
    """
    if not found:
        raise NotFound(f"there is no {what} {name!r}{hint}")
    if len(found) > 1:
        things = several or f"{what}s"
        raise Ambiguous(
            f"{name!r} matches {len(found)} {things}; write more of the id, or give --tenant",
            [describe(each) for each in found],
        )
    return found[0]
