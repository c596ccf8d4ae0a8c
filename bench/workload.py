"""The messages of the bench, and queues filled with them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from ackbone import App, Config
from ackbone.core.broker import Outgoing

QUEUE = "default"
NOOP = "bench.noop"
ANSWER = "bench.answer"
_CHUNK = 5000


def payload(n: int) -> dict[str, Any]:
    """About 200 bytes of JSON, as an order or a chat message may have."""
    return {
        "order": f"{n:020d}",
        "customer": f"customer-{n % 1000:06d}",
        "channel": "telegram",
        "text": "Where is my parcel? It was promised for Tuesday.",
        "amount": 1234.56,
        "currency": "EUR",
        "items": [{"sku": "ABC-12345", "n": 2}],
    }


def queue_on(broker: str) -> str:
    """The queue that is measured: that of the task protocol on Redis."""
    return "stream:task" if broker.startswith("redis:") else QUEUE


def open_app(home: Path, broker: str = "sqlite") -> App:
    """An app on the database of `home`, with the defaults and nothing from the environment."""
    config = Config(home=home, broker=broker, default_queue=queue_on(broker))
    return App(config, name="bench-sender")


def database(home: Path) -> Path:
    return home / "ackbone.db"


def fill(home: Path, count: int, *, keyed: bool = False, first: int = 0, kind: str = NOOP) -> None:
    """Publish so many messages, in large batches, and let go of the file."""
    asyncio.run(_fill(home, count, keyed, first, kind))
    os.sync()  # what the kernel still has to write is not the next contender's to pay


async def _fill(home: Path, count: int, keyed: bool, first: int, kind: str) -> None:
    async with open_app(home) as app:
        await publish(app, QUEUE, range(first, first + count), _CHUNK, keyed=keyed, kind=kind)


async def publish(
    app: App, queue: str, numbers: range, chunk: int, *, keyed: bool = False, kind: str = NOOP
) -> None:
    """In batches of so many; raises what the broker says of any of them."""
    for at in range(0, len(numbers), chunk):
        batch = _outgoing(app, queue, numbers[at : at + chunk], keyed, kind)
        for result in await app.broker.publish(queue, batch):
            if result.error is not None:
                raise result.error


def _outgoing(app: App, queue: str, numbers: range, keyed: bool, kind: str) -> list[Outgoing]:
    return [
        app.outgoing(
            kind,
            payload(n),
            queue=queue,
            idempotency_key=f"order-{n:020d}" if keyed else None,
        ).outgoing
        for n in numbers
    ]


def write_messages(home: Path, count: int) -> Path:
    """The payloads as a file of JSON lines, for programs of others."""
    path = home / "messages.jsonl"
    path.write_text("".join(json.dumps(payload(n)) + "\n" for n in range(count)))
    return path
