"""A process that writes one durable transaction after the other for some seconds, without a pause.

    python tests/faults/busy_writer.py DATABASE SECONDS

Says `ready`, begins when a line comes in, and prints how many it made and how long each took.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import time
from pathlib import Path

from ackbone.sqlitefile.file import close_file, open_file


async def main(path: Path, seconds: float) -> None:
    file = open_file(path)

    def write(conn: sqlite3.Connection) -> None:
        conn.execute(
            "INSERT INTO messages (queue, message_id, sent_at, headers, body, body_crc)"
            " VALUES ('busy', 'm', 0, '{}', zeroblob(200), 0)"
        )

    await file.write(write)
    print("ready", flush=True)
    sys.stdin.readline()
    waits = []
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        await file.write(write)
        waits.append(time.monotonic() - begun)
    close_file(file)
    waits.sort()
    p99 = waits[int(len(waits) * 0.99)]
    print(json.dumps({"writes": len(waits), "p99_ms": p99 * 1000, "max_ms": waits[-1] * 1000}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
