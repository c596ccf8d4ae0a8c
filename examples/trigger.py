"""A queue trigger: each message of a foreign queue starts an agent run, once in effect.

Run it:     python examples/trigger.py

The queue is played by `MockQueueAdapter`, so that nothing has to be installed; the store is a real
file in ACKBONE_HOME (./.ackbone). Two messages carry the same dedup key, one is no JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ackbone import MockQueueAdapter, QueueTrigger, QueueTriggerConfig, RawMessage, load_config


class Greeter:
    """An agent runtime. A real one calls a model; this one is polite at once."""

    async def trigger_event(
        self, event_name: str, context: dict[str, Any], focus: str | None, tenant_id: str | None
    ) -> Mapping[str, Any]:
        print(f"{event_name}: hello, {context['message']['name']}")
        return {"run_id": f"run-{context['message_id']}", "usage": {"llm_calls": 1}}


def message(number: int, body: bytes, **headers: str) -> RawMessage:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RawMessage(f"m-{number}", body, named, datetime.now(UTC), {})


async def main() -> None:
    queue = MockQueueAdapter()
    queue.enqueue(message(1, b'{"name": "Ada"}', x_event_name="greeting", x_dedup_key="ada"))
    queue.enqueue(message(2, b'{"name": "Ada"}', x_event_name="greeting", x_dedup_key="ada"))
    queue.enqueue(message(3, b'{"name": '))
    config = load_config()
    config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    trigger = QueueTrigger(
        config=QueueTriggerConfig(queue_name="people", consumer_group="greeters", concurrency=2),
        adapter=queue,
        agent_runtime=Greeter(),
        governance=None,
        ledger=None,
        idempotency_store=None,
        store=config,
    )
    await trigger.start()
    await queue.wait_settled(3)
    await trigger.stop()
    print("acknowledged:", ", ".join(sorted(queue.get_acked())))
    for raw, reason in queue.get_dlq():
        print(f"dead: {raw.message_id}: {reason}")


if __name__ == "__main__":
    asyncio.run(main())
