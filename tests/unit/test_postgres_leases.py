"""Signs of life on PostgreSQL: silence after a sleep of this machine is nobody's death."""

from __future__ import annotations

import time

import pytest

from ackbone.pgserver.address import Address
from ackbone.store.postgres.leases import LeaseRenewal


def test_a_machine_that_slept_has_missed_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """`time.monotonic` stands still while it sleeps. Its other workers slept as well: a reaper that
    wakes first must give them time."""
    renewal = LeaseRenewal(Address.from_url("postgresql:///none"), lease_s=10.0)
    assert renewal.is_steady
    clock = time.clock_gettime

    def slept(which: int) -> float:
        return clock(which) + (3600.0 if which == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", slept)
    assert not renewal.is_steady
