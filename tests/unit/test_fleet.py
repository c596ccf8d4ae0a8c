"""What a process knows of the types that living workers offer."""

from __future__ import annotations

import math

import pytest

from ackbone.core.store import Offers
from ackbone.store import claiming as fleet_module
from ackbone.store.claiming import Fleet, offers_text, read_offers


def test_what_was_read_counts_when_all_of_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SQLite the event loop and the writer thread ask the same object: one that is half read
    would have a message parked that a new worker handles."""
    fleet = Fleet()
    ages: list[float] = []

    def read(text: str | None) -> Offers | None:
        ages.append(fleet.age_s)
        return read_offers(text)

    monkeypatch.setattr(fleet_module, "read_offers", read)
    fleet.update([offers_text(Offers(types={"s": frozenset({"t"})}))])
    assert ages == [math.inf]
    assert fleet.age_s < math.inf
    assert fleet.handles("s", "t")
