"""Rows of what leaves: messages that a relay brings to their broker, replies for channels."""

from __future__ import annotations

from ackbone.store.outgoing import DELIVERY_COLUMNS

OUTBOX = (
    "INSERT INTO outbox (id, tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
    " ordering_key, ttl_us, due_at, created_at)"
)
DELIVERY = f"INSERT OR IGNORE INTO deliveries ({DELIVERY_COLUMNS})"
