"""A process with a queue trigger, to be killed: `python trigger_victim.py FOLDER block|finish`."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast import QueueTrigger, QueueTriggerConfig
from holdfast.brokers.sqlite import SqliteBroker
from holdfast.triggers.broker_adapter import BrokerQueueAdapter


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


async def main(folder: Path, block: bool) -> None:
    adapter = BrokerQueueAdapter(SqliteBroker(folder / "queue.db"), "orders")
    config = QueueTriggerConfig("orders", "agents", concurrency=4)
    parts = (adapter, Runtime(block), None, Ledger(), None)
    trigger = QueueTrigger(config, *parts, store=folder / "store.db")
    await trigger.start()
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it
    await trigger.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "block"))
