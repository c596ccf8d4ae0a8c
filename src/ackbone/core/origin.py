"""Tell source files of ackbone, of libraries and of the user apart."""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = tuple(
    f"{path}{os.sep}"
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@functools.lru_cache(maxsize=4096)
def is_ours(filename: str) -> bool:
    """Return True for a file of ackbone."""
    return filename.startswith(_OURS)


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return True for a file of neither ackbone, an installed package nor the standard library.

    An app that is itself installed as a package counts as a library.
    """
    if is_ours(filename) or filename.startswith(("<frozen", *_LIBRARIES)):
        return False
    return not any(part in filename for part in _INSTALLED)
