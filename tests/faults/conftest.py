"""A fleet of worker processes with a seed that is printed, and ended with its test."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Fleet

MakeFleet = Callable[..., Fleet]


@pytest.fixture
def seed() -> int:
    """Another one each time; HOLDFAST_SEED repeats a run."""
    given = os.environ.get("HOLDFAST_SEED")
    found = int(given) if given else random.randrange(1_000_000)
    print(f"seed {found}")
    return found


@pytest.fixture
def make_fleet(home: Path, seed: int) -> Iterator[MakeFleet]:
    fleets: list[Fleet] = []

    def make(**settings: object) -> Fleet:
        fleets.append(Fleet(home, seed=seed, **settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
