"""A process that stops itself inside a write transaction, as SIGSTOP at a bad moment would do.

    python tests/faults/stopped_writer.py DATABASE

Prints `holding` and stops. Prints `committed` after SIGCONT.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from pathlib import Path

from ackbone.sqlitefile.file import close_file, open_file


def stand_still(conn: sqlite3.Connection) -> None:
    print("holding", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    file = open_file(Path(sys.argv[1]))
    asyncio.run(file.write(stand_still))
    print("committed", flush=True)
    close_file(file)
