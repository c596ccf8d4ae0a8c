"""Conversion between a queue's messages and those of the engine.

The engine reads only the headers that are written here. One of them contains all headers of the
queue, so that a producer's `x-priority: urgent` reaches the agent and does not concern the engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.clock import to_us
from ackbone.core.ids import derived_id, new_id
from ackbone.core.message import DEFAULT_TENANT, MAX_ID, Message
from ackbone.core.text import encodable

from .config import QueueTriggerConfig
from .messages import DEDUP_HEADER, EVENT_HEADER, TENANT_HEADER, MessageEnvelope, RawMessage, header

RAW_HEADER = "x-ackbone-raw"
DEFAULT_EVENT = "queue_message"
_LATEST_US = 4_102_444_800_000_000
"""The year 2100. A later timestamp comes from a wrong clock."""


@dataclass(eq=False)
class Copy:
    """One unsettled copy: as the adapter gave it, and as the store knows it."""

    raw: RawMessage
    envelope: MessageEnvelope
    """The envelope with the body as payload. Only the engine parses the body."""
    task_id: str

    @property
    def identity(self) -> tuple[str, str]:
        """Tenant and task id of the message in the store."""
        return self.envelope.tenant_id or DEFAULT_TENANT, self.task_id


def subscription_of(config: QueueTriggerConfig) -> Subscription:
    """Return the subscription for the trigger's queue. Each consumer group has its own tasks."""
    return Subscription(
        name=f"{config.queue_name}/{config.consumer_group}",
        queue=config.queue_name,
        group=config.consumer_group,
        codec=config.parser_type,
        ordered=False,
        # The announcer applies the policy, from the store's outcome. The engine only needs to know
        # whether to keep a rejected message.
        ack_policy="dlq" if config.ack_policy == "dlq" else "ack",
        dedup=config.enable_dedup,
        dedup_window_s=float(config.idempotency_window),
        dedup_by_id=True,
    )


def copy_of(raw: RawMessage, config: QueueTriggerConfig) -> Copy:
    """Return the copy for a message that the adapter just delivered."""
    envelope = MessageEnvelope.from_raw_message(
        raw, config.queue_name, event_name_header=config.event_name_header
    )
    # Without an id a redelivery cannot be recognized. It gets a new id, and no dedup.
    task_id = _storable("id", raw.message_id) if raw.message_id else new_id()
    return Copy(raw, envelope, task_id)


def delivery_of(copy: Copy) -> Delivery:
    """Return the copy as the engine receives it."""
    raw, envelope = copy.raw, copy.envelope
    headers = {"x-message-id": copy.task_id, RAW_HEADER: _described(raw)}
    if envelope.event_name is not None:
        headers[EVENT_HEADER] = envelope.event_name
    if envelope.tenant_id is not None:
        headers[TENANT_HEADER] = envelope.tenant_id
    if envelope.dedup_key is not None:
        headers[DEDUP_HEADER] = _storable("key", envelope.dedup_key)
    trace = header(raw.headers, "traceparent")
    if trace is not None:
        headers["traceparent"] = trace
    return Delivery(
        body=bytes(raw.body),
        headers=headers,
        tag=copy,
        identity=copy.task_id,
        sent_at_us=min(max(0, to_us(raw.timestamp)), _LATEST_US),
    )


def envelope_of(message: Message, config: QueueTriggerConfig) -> MessageEnvelope:
    """Return the envelope for a run, from the stored message: the same on each attempt."""
    described = json.loads(message.headers[RAW_HEADER])
    raw = RawMessage(
        message_id=described["message_id"],
        body=b"",
        headers=described["headers"],
        timestamp=datetime.fromisoformat(described["timestamp"]),
        metadata={},
    )
    envelope = MessageEnvelope.from_raw_message(
        raw, config.queue_name, event_name_header=config.event_name_header
    )
    envelope.payload = message.payload
    return envelope


def _described(raw: RawMessage) -> str:
    """Write headers as ASCII: they may contain text that no database accepts, such as
    surrogates."""
    return json.dumps(
        {
            "message_id": raw.message_id,
            "headers": raw.headers,
            "timestamp": raw.timestamp.isoformat(),
        }
    )


def _storable(kind: str, text: str) -> str:
    """Return the text, or an id derived from it if it is too long or cannot be stored."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return derived_id(f"odd-{kind}", encodable(text))
    if len(text) > MAX_ID or "\0" in text:
        return derived_id(f"long-{kind}", text)
    return text
