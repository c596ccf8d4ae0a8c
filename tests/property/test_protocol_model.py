"""The claim / finish protocol under random interleavings: kills, power cuts, zombies, redelivery,
lost answers.

A seed is one story, told by `protocol_world`; `protocol_checks` says what must be true at its end.
A failing seed is printed; tell it again alone with

    ACKBONE_MODEL_SEED=fused:1234 pytest tests/property/test_protocol_model.py -k every_story
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from ackbone.store import workers
from tests.conftest import SOAK
from tests.property.protocol_checks import violations
from tests.property.protocol_faults import PLANTS, Plant
from tests.property.protocol_world import Mode, World

SEEDS = 50_000 if SOAK else 500
CHUNKS = 100 if SOAK else 6
"""Several tests, so that they spread over the processes of a run."""
PLANTED_SEEDS = 800
"""A planted fault must show within so many."""


@pytest.fixture(autouse=True)
def few_crashes_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A story is short: each crash counts against the budget, so that some messages spend it."""
    monkeypatch.setattr(workers, "SUSPECT_AT", 1)
    monkeypatch.setattr(workers, "ALONE_AT", 0)


async def told(seed: int, mode: Mode, plant: Plant | None = None) -> tuple[list[str], int]:
    """One story; returns what was wrong, and how often a plant changed something."""
    world = World(seed, mode)
    try:
        if plant is not None:
            plant.into(world)
        await world.run()
        return violations(world), world.file.conn.rewritten
    finally:
        world.file.close()


def stories(chunk: int) -> Iterator[tuple[int, Mode]]:
    asked = os.environ.get("ACKBONE_MODEL_SEED")
    if asked is not None:
        name, _, number = asked.partition(":")
        yield int(number), Mode(name)
        return
    modes = list(Mode)
    for seed in range(chunk, SEEDS, CHUNKS):
        yield seed, modes[seed % len(modes)]


@pytest.mark.parametrize("chunk", range(CHUNKS))
async def test_promises_hold_in_every_story(chunk: int) -> None:
    for seed, mode in stories(chunk):
        found, _ = await told(seed, mode)
        assert not found, f"ACKBONE_MODEL_SEED={mode}:{seed}\n" + "\n".join(found)


async def test_a_seed_tells_the_same_story_each_time() -> None:
    logs = []
    for _ in range(2):
        world = World(7, Mode.FUSED)
        await world.run()
        rows = world.file.conn.execute(
            "SELECT tenant_id, task_id, event_type, created_at, worker_id FROM event_log"
        )
        logs.append(rows.fetchall())
        world.file.close()
    assert logs[0] == logs[1]
    assert len(logs[0]) > 10


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
async def test_a_planted_fault_is_found(plant: Plant) -> None:
    changed = 0
    for seed in range(PLANTED_SEEDS):
        found, rewritten = await told(seed, plant.mode, plant)
        changed += rewritten
        if any(re.search(plant.shows, text) for text in found):
            print(f"{plant.name}: found at seed {seed}")
            return
    assert changed, f"the plant no longer matches any statement: {plant.name}"
    pytest.fail(f"not found within {PLANTED_SEEDS} seeds: {plant.name}")
