"""A reader that keeps its transaction open: the write-ahead log grows, and people are told why."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ackbone.backends import storage_of
from ackbone.config import load_config
from ackbone.core.findings import Check, Finding
from ackbone.sqlitefile import file as file_module
from ackbone.sqlitefile import wal as log_module
from ackbone.sqlitefile.file import SqliteFile, close_file, open_file
from ackbone.store.sqlite.migrate import ensure_schema

READER = Path(__file__).with_name("patient_reader.py")
LONG = 24 * 2**20
LIMIT = 2**20


def _grow(file: SqliteFile, megabytes: int = 1) -> None:
    def op(conn: sqlite3.Connection) -> None:
        for _ in range(megabytes * 16):
            conn.execute("INSERT INTO roles (role, state) VALUES (hex(randomblob(8)), ?)", (LUMP,))

    asyncio.run(file.write(op, durable=False))


LUMP = "x" * 2**16


def test_the_process_that_keeps_the_log_from_starting_over_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_module, "LONG_BYTES", LONG)
    monkeypatch.setattr(file_module, "LOG_LIMIT", LIMIT)
    database = home / "ackbone.db"
    ensure_schema(database)
    wal = Path(f"{database}-wal")
    file = open_file(database)
    try:
        locks = _locks(database)
        assert _doctor().finding is Finding.OK
        command = [sys.executable, str(READER), str(database)]
        with (
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as reader,
            caplog.at_level(logging.WARNING, "ackbone.sqlite"),
        ):
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
            while wal.stat().st_size < LONG + 4 * 2**20:
                _grow(file)
            (said,) = caplog.messages
            assert f"process {reader.pid} (python" in said
            assert READER.name in said
            found = _doctor()
            assert found.finding is Finding.WARNING
            assert f"process {reader.pid} (python" in found.detail
            assert f"'kill {reader.pid}'" in (found.hint or "")
            assert _locks(database) == locks, "SQLite lost its locks: another process may reset it"
            reader.communicate("go on\n")
            _grow(file)  # its checkpoint copies everything
            _grow(file)  # SQLite starts the log over
        (_, over) = caplog.messages
        assert "started the log over" in over
        assert _doctor().finding is Finding.OK
        assert wal.stat().st_size < LONG // 2
    finally:
        close_file(file)


def _locks(database: Path) -> list[str]:
    """The locks that SQLite holds for this process on the index of the log."""
    index = str(os.stat(f"{database}-shm").st_ino)
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    mine = [each for each in lines if each[4] == str(os.getpid())]
    return sorted(each[6] for each in mine if each[5].rpartition(":")[2] == index)


def _doctor() -> Check:
    checks = storage_of(load_config()).examine(deep=False)
    return next(check for check in checks if check.name == "log")
