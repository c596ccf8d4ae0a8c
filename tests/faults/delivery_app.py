"""The app of the delivery tests: it runs nothing, and sends what waits to a webhook."""

from __future__ import annotations

from ackbone.app import App
from ackbone.delivery.channels.webhook_channel import WebhookChannel

KEY = "whsec_c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IQ=="

app = App(name="sender")
app.channel(WebhookChannel([KEY], allow=["127.0.0.0/8"], https_only=False))
