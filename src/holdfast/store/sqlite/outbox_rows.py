"""Rows of the outbox: messages that a relay brings to their broker."""

from __future__ import annotations

OUTBOX = (
    "INSERT INTO outbox (id, tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
    " ordering_key, ttl_us, due_at, created_at)"
)
