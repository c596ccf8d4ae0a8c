"""A process that sends messages, one durable commit each, until it is killed.

    python tests/faults/durable_writer.py DATABASE

Prints the id of each message once it was accepted.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.broker import Outgoing


async def main(path: Path) -> None:
    broker = SqliteBroker(path)
    await broker.open()
    n = 0
    while True:
        message = Outgoing(id=f"message-{n}", body=b'{"type": "job"}' + b" " * (n % 700))
        (result,) = await broker.publish("jobs", [message])
        if result.error is not None:
            raise result.error
        print(message.id, flush=True)
        n += 1


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
