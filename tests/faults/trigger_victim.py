"""A process with a queue trigger, to be killed: `python trigger_victim.py FOLDER MODE [STORE]`.

MODE is block, finish, or record: die as soon as the dedup memory at REDIS_URL has a result.
STORE is a URL; without it the truth is in a file in FOLDER.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ackbone import QueueTrigger, QueueTriggerConfig, RedisIdempotencyStore
from ackbone.brokers.sqlite import SqliteBroker
from ackbone.config import Worker
from ackbone.triggers.adapters import BrokerQueueAdapter


class Runtime:
    """Tells its parent of each run; blocks or finishes."""

    def __init__(self, block: bool) -> None:
        self._block = block

    async def trigger_event(
        self, event_name: str, context: dict[str, Any], focus: str | None, tenant_id: str | None
    ) -> Mapping[str, Any]:
        print("began", context["message_id"], flush=True)
        if self._block:
            await asyncio.Event().wait()
        print("finished", context["message_id"], flush=True)
        return {"run_id": "done"}


class Ledger:
    async def record(self, entry: dict[str, Any]) -> None:
        print("recorded", entry["message_id"], entry["status"], flush=True)


class DiesRecording(RedisIdempotencyStore):
    """Between the record and the store's commit."""

    async def set(self, key: str, value: Any, ttl: int) -> None:
        await super().set(key, value, ttl)
        os.kill(os.getpid(), signal.SIGKILL)


async def main(folder: Path, mode: str, store: str | None = None) -> None:
    adapter = BrokerQueueAdapter(SqliteBroker(folder / "queue.db"), "orders")
    config = QueueTriggerConfig("orders", "agents", concurrency=4)
    keys = None
    if "REDIS_URL" in os.environ:
        keys = DiesRecording() if mode == "record" else RedisIdempotencyStore()
    parts = (adapter, Runtime(mode == "block"), None, Ledger(), keys)
    worker = Worker(lease_s=1.0)  # a server knows of a death only when the lease is over
    trigger = QueueTrigger(config, *parts, store=store or folder / "store.db", worker=worker)
    await trigger.start()
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it
    await trigger.stop()
    if keys is not None:
        await keys.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
