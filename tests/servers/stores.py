"""The store of an app as what it is, for tests that look inside."""

from __future__ import annotations

from holdfast import App
from holdfast.store.sqlite.store import SqliteStore


def sqlite_store(app: App) -> SqliteStore:
    assert isinstance(app.store, SqliteStore)
    return app.store
