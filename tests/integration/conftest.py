"""The lab, in each way to put broker and store together."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ackbone.store.sqlite.migrate import ensure_schema
from tests.integration.lab import MODES, ONE_FILE, Lab


@pytest.fixture(scope="session")
def schema() -> Iterator[Path]:
    """An empty database, migrated once and copied for each test."""
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp") as folder:
        path = Path(folder) / "schema.db"
        ensure_schema(path)
        yield path


@pytest.fixture(params=MODES)
async def lab(request: pytest.FixtureRequest, home: Path, schema: Path) -> AsyncIterator[Lab]:
    lab = Lab(home, request.param, schema)
    yield lab
    await lab.close()


@pytest.fixture
async def one_file(home: Path, schema: Path) -> AsyncIterator[Lab]:
    """For what does not depend on where the queue is."""
    lab = Lab(home, ONE_FILE, schema)
    yield lab
    await lab.close()
