"""The sender of the folder's fault test: it sends to a webhook, and writes down what it is told."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from holdfast.core.breaker import BreakerPolicy
from holdfast.core.events import Entry
from holdfast.delivery.attempts import Policy
from holdfast.delivery.file_deliveries import FileDeliveries
from holdfast.delivery.folder_sender import FolderSender
from holdfast.delivery.webhook import WebhookChannel
from tests.faults.delivery_app import KEY


async def main(folder: str, log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def heard(entries: Sequence[Entry]) -> None:
        lines = (json.dumps([kind, data["delivery_id"]]) + "\n" for *_, kind, data in entries)
        os.write(out, "".join(lines).encode())

    deliveries = FileDeliveries(folder)
    deliveries.on_events(heard)
    channel = WebhookChannel([KEY], allow=["127.0.0.0/8"], https_only=False)
    policy = Policy(timeout_s=0.5, wait_scale=0.01)
    # One receiver for all: its moods are not an outage.
    breaker = BreakerPolicy(failures=1_000_000)
    async with FolderSender(deliveries, [channel], policy=policy, breaker=breaker) as sender:
        await sender.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
