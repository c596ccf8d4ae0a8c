"""A wall clock that a test sets, for processes under libfaketime. Their steady clock is real."""

from __future__ import annotations

from pathlib import Path


def libfaketime() -> Path:
    """The build for threads. With the plain one a thread that reads the file beside another sees
    the machine's own clock for a moment: 315 of 84,000 looks of four threads did.
    """
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    assert found, "libfaketime is missing: run tests/prepare.sh (Debian package faketime)"
    return found[0]


class ClockFile:
    """What the clock says, as seconds ahead of the machine's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0)

    def set(self, seconds: int) -> None:
        draft = self._path.with_suffix(".new")
        draft.write_text(f"{seconds:+d}\n")
        draft.replace(self._path)

    @property
    def variables(self) -> dict[str, str]:
        """For the environment of a process that goes by it."""
        return {
            "LD_PRELOAD": str(libfaketime()),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
        }
