"""The stores that there are, and the store of an app as what it is, for tests that look inside."""

from __future__ import annotations

import pytest

from ackbone import App
from ackbone.store.sqlite.store import SqliteStore

STORES = ("sqlite", pytest.param("postgresql", marks=pytest.mark.xdist_group("postgres")))
"""For tests of what is the same on each."""


def store_url(request: pytest.FixtureRequest) -> str | None:
    """Of the store that a fixture with these parameters has; None for the file."""
    return request.getfixturevalue("postgres_url") if request.param == "postgresql" else None


def sqlite_store(app: App) -> SqliteStore:
    assert isinstance(app.store, SqliteStore)
    return app.store
