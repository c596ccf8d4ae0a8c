"""The key that signs the ledger's anchors. It is kept outside the database: somebody who can write
the database should not be able to read the key.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ackbone.core.errors import ConfigError
from ackbone.sqlitefile.faults import translate

log = logging.getLogger("ackbone.ledger")

VARIABLE = "ACKBONE_LEDGER_KEY"
LENGTH = 32
SHORTEST = 16


def ledger_key(
    path: Path, *, environ: Mapping[str, str] | None = None, create: bool = False
) -> bytes:
    """`$ACKBONE_LEDGER_KEY`, else the bytes of the file. With `create`, a missing file is made.

    Raises ConfigError if there is no key, or if it is too short.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE)
    if text:
        return _long_enough(text.encode(), VARIABLE)
    if create and not path.exists():
        try:
            _create(path)
        except OSError as error:
            raise translate(error, path) from error
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            [
                f"there is no ledger key: {path} does not exist and {VARIABLE} is not set. "
                "The first worker makes it; ledger.key_file says where it is"
            ]
        ) from None
    except OSError as error:
        raise ConfigError([f"the ledger key {path} cannot be read: {error.strerror}"]) from None
    if path.stat().st_mode & 0o077:
        log.warning("the ledger key %s can be read by others: chmod 600 it", path)
    return _long_enough(key, str(path))


def _long_enough(key: bytes, place: str) -> bytes:
    if len(key) < SHORTEST:
        raise ConfigError([f"{place}: a ledger key has at least {SHORTEST} bytes, not {len(key)}"])
    return key


def _create(path: Path) -> None:
    """Make the file whole or not at all. Of two processes that start together, one makes it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secrets.token_bytes(LENGTH))
        os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(fd)
        draft.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
