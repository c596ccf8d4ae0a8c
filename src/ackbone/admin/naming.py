"""Find the one object that a person named by its id or the beginning of it, and act on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ackbone.core.errors import Ambiguous, InvalidMessage, NotFound

T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A")
SHORTEST = 4
"""The least number of characters of a prefix."""


class Desk(Generic[R, A]):
    """Actions on objects of one kind. Without `operations` they can only be read."""

    def __init__(
        self,
        records: R,
        operations: A | None = None,
        *,
        codec_of: Callable[[str], str] = lambda queue: "standard",
    ) -> None:
        self._records = records
        self._operations = operations
        self._codec_of = codec_of

    @property
    def _acting(self) -> A:
        if self._operations is None:
            raise RuntimeError(f"{type(self).__name__} was created to read only")
        return self._operations


def check_length(name: str) -> None:
    """Raise InvalidMessage if the name is too short for the beginning of an id."""
    if len(name) < SHORTEST:
        raise InvalidMessage(f"{name!r} is too short: write at least {SHORTEST} characters")


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
