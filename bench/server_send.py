"""ackbone sends to a server: `python -m bench.server_send WHAT HOME URL COUNT` prints a rate.

batches: `send_many` of 500. each: many tasks, each of which awaits every send. A process of its
own, as the bare driver beside it has: what a bench has seen before slows down whoever sends from
it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from ackbone.core.message import Message

from . import workload
from .redis_drain import CHUNK
from .sections.sends import TASKS, send_all


async def send_batches(home: Path, count: int, url: str) -> float:
    """Seconds that it takes to make and to send so many messages, once their payloads are there."""
    payloads = [workload.payload(n) for n in range(count)]
    async with workload.open_app(home, url) as app:
        begin = time.perf_counter()
        for at in range(0, count, CHUNK):
            some = payloads[at : at + CHUNK]
            await app.send_many([Message(type=workload.NOOP, payload=each) for each in some])
        return time.perf_counter() - begin


def main(what: str, home: Path, url: str, count: int) -> None:
    sending = (
        send_batches(home, count, url) if what == "batches" else send_all(home, TASKS, count, url)
    )
    sys.stdout.write(json.dumps({"rate": count / asyncio.run(sending)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
