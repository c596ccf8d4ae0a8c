"""The app of the limits test: a bot whose Bot API server is the test's own."""

from __future__ import annotations

import os

from ackbone.app import App
from ackbone.delivery.channels.telegram_channel import TelegramChannel

app = App(name="bot")
app.channel(
    TelegramChannel(
        "123456:test-token",
        base_url=os.environ["ACKBONE_BOT_API"],
        merge="ACKBONE_BOT_MERGES" in os.environ,
    )
)
