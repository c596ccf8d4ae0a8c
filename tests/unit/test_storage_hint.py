"""A database of the time when the project had another name is named, and left alone."""

import logging
from pathlib import Path

import pytest

from ackbone.backends import Storage, storage_of
from ackbone.config import load_config
from ackbone.core.errors import NotFound


def storage_in(folder: Path) -> Storage:
    return storage_of(load_config(environ={}, cwd=folder))


def older(folder: Path) -> Path:
    path = folder / ".holdfast" / "holdfast.db"
    path.parent.mkdir()
    path.write_bytes(b"")
    return path


def test_commands_that_find_no_database_name_the_older_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as without:
        storage_in(tmp_path).require()
    assert "holdfast" not in str(without.value)
    path = older(tmp_path)
    with pytest.raises(NotFound, match="rename its folder") as found:
        storage_in(tmp_path).require()
    assert str(path) in str(found.value)


def test_whoever_makes_a_new_one_is_told_of_the_older_one_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = older(tmp_path)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        storage_in(tmp_path).ensure()
    assert [str(path) in line for line in caplog.messages] == [True]
    assert path.read_bytes() == b""
