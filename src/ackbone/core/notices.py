"""Notices: messages about the end of a task, published once each.

A queue may name a queue for results and one for dead letters. Every task that ends adds one message
to the first, every dead letter one to the second, in the fields of the task protocol. A
`TaskBroker` publishes a notice at most once: its mark (`ONCE`) names the task.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from .broker import Outgoing
from .clock import to_us
from .codecs.values import dumps, iso_us, key, loads, moment, named_tenant, short
from .errors import DecodeError, InvalidMessage
from .message import DEFAULT_TENANT, MAX_ID
from .outcome import Status
from .task_protocol import FLAT, ONCE, FlatOutgoing
from .text import storable

Notice = tuple[str, Outgoing]
"""A queue and a message for it."""

PROTOCOL_STATUS = {Status.SUCCEEDED: "succeeded", Status.DUPLICATE: "succeeded"}
"""The task protocol has two statuses. Every other status of ours is `failed` there."""
LETTER_ID = "dead_letter_id"
"""Field of a published dead letter: its id in the store. Entries of other programs have none."""
_encode = msgspec.json.Encoder().encode


class Notices(msgspec.Struct, frozen=True, kw_only=True):
    """The queues that get a message when a task of a queue ends."""

    results: str | None = None
    dead_letters: str | None = None
    on_ack: bool = False
    """The broker is a `TaskBroker`: it publishes the result of a success together with the
    acknowledgement, and the store's outbox is not used for it."""


class End(msgspec.Struct, kw_only=True):
    """The end of a task, as notices describe it."""

    tenant_id: str
    subscription: str
    task_id: str
    tool_name: str = ""
    status: Status
    result: bytes | None = None
    """The handler's result as JSON. A duplicate has the result of the first message."""
    error: str = ""
    retry_count: int = 0
    idempotency_key: str | None = None
    finished_at_us: int
    consumer: str = ""
    duplicate_of: str | None = None
    payload: str = ""
    """The payload as JSON. Only notices of dead letters contain it."""
    letter: str | None = None
    """Id of the dead letter, if there is one."""
    letter_task_id: str = ""
    """The sender's id of the task, if the store uses another one (undecodable, or an id
    conflict)."""


def notices_of(to: Notices, end: End) -> list[Notice]:
    """Return the notices of this end."""
    found: list[Notice] = []
    if to.results is not None:
        found.append((to.results, _outgoing(end, _result(end), _mark(end))))
    if to.dead_letters is not None and end.letter is not None:
        found.append((to.dead_letters, _outgoing(end, _letter(end), end.letter)))
    return found


def success_notice(
    identity: tuple[str, str, str],
    result: bytes | None,
    retry_count: int,
    idempotency_key: str | None,
    finished_at_us: int,
    consumer: str,
) -> Outgoing:
    """Return the notice of a success that is published with its acknowledgement.

    It has fields and no body. `notices_of` returns the same for such an end; this is faster,
    because most tasks end here. `identity`: tenant, subscription and task.
    """
    tenant_id, subscription, task_id = identity
    written = {
        "task_id": task_id,
        "status": "succeeded",
        "result": "null" if result is None else result.decode(),
        "error": "",
        "retry_count": str(retry_count),
        "idempotency_key": idempotency_key or "",
        "finished_at": iso_us(finished_at_us),
        "consumer": consumer,
    }
    if tenant_id != DEFAULT_TENANT:
        written["tenant_id"] = tenant_id
    headers = {FLAT: "1", ONCE: f"{tenant_id}/{subscription}/{task_id}"}
    return FlatOutgoing(id=task_id, body=b"", headers=headers, fields=written)


def _mark(end: End) -> str:
    return f"{end.tenant_id}/{end.subscription}/{end.task_id}"


def _result(end: End) -> dict[str, str]:
    written = {
        "task_id": end.task_id,
        "status": PROTOCOL_STATUS.get(end.status, "failed"),
        "result": "null" if end.result is None else end.result.decode(),
        "error": error_text(end.status, end.error),
        "retry_count": str(end.retry_count),
        "idempotency_key": end.idempotency_key or "",
        "finished_at": iso_us(end.finished_at_us),
        "consumer": end.consumer,
    }
    if end.duplicate_of is not None:
        written["duplicate_of"] = end.duplicate_of
    if end.tenant_id != DEFAULT_TENANT:
        written["tenant_id"] = end.tenant_id
    return written


def _letter(end: End) -> dict[str, str]:
    written = {
        "task_id": end.letter_task_id or end.task_id,
        "tool_name": end.tool_name,
        "payload": end.payload,
        "error": error_text(end.status, end.error),
        "retry_count": str(end.retry_count),
        "failed_at": iso_us(end.finished_at_us),
        "idempotency_key": end.idempotency_key or "",
        LETTER_ID: end.letter or "",
    }
    if end.tenant_id != DEFAULT_TENANT:
        written["tenant_id"] = end.tenant_id
    return written


def _outgoing(end: End, written: dict[str, str], mark: str) -> Outgoing:
    return FlatOutgoing(
        id=end.task_id, body=_encode(written), headers={FLAT: "1", ONCE: mark}, fields=written
    )


def error_text(status: Status, error: str) -> str:
    """Return the protocol's error text. It names the statuses that the protocol does not have."""
    if status in PROTOCOL_STATUS:
        return ""
    if status is Status.FAILED:
        return error
    return f"{status}: {error}" if error else status.value


def read_result(body: bytes, subscription: str) -> End:
    """Read a published result of a task of this subscription. Raises DecodeError."""
    found = loads(body)
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise DecodeError("a result consists of fields, and each is text")
    task_id, word = found.get("task_id", ""), found.get("status", "")
    if not 0 < len(task_id) <= MAX_ID:
        raise DecodeError("a result must name its task in task_id")
    short("task_id", task_id)
    if word not in ("succeeded", "failed"):
        raise DecodeError(f"the result of task {task_id} has the status {word!r:.40}")
    result = found.get("result", "").encode()
    first = found.get("duplicate_of")
    try:
        loads(result)
    except DecodeError:
        result = dumps(found.get("result"))
    finished = moment("finished_at", found.get("finished_at")) or datetime.now(UTC)
    count = found.get("retry_count", "")
    return End(
        tenant_id=named_tenant(found.get("tenant_id")),
        subscription=subscription,
        task_id=task_id,
        tool_name=storable(found.get("tool_name", ""))[:MAX_ID],
        status=Status.DUPLICATE if first else Status(word),
        result=result,
        error=found.get("error", ""),
        retry_count=int(count) if count.isascii() and count.isdigit() and len(count) < 9 else 0,
        idempotency_key=key("idempotency_key", found.get("idempotency_key")),
        finished_at_us=to_us(finished),
        consumer=found.get("consumer", ""),
        duplicate_of=first,
    )


def letter_fields(end: End, body: bytes, codec: str, reason: str) -> None:
    """Fill in the task's fields from a dead letter's stored body, as far as it can be read."""
    found: Mapping[str, Any] = {}
    if codec in ("task", "standard"):
        try:
            read = loads(body)
        except DecodeError:
            read = None
        found = read if isinstance(read, dict) else {}
    if codec == "task":
        end.payload = _text_of(found.get("payload", ""))
        end.tool_name = end.tool_name or _text_of(found.get("tool_name", ""))
        end.idempotency_key = end.idempotency_key or _text_of(found.get("idempotency_key", ""))
        end.letter_task_id = _text_of(found.get("task_id", ""))[:MAX_ID]
        if reason == "undecodable" and end.letter_task_id:
            end.task_id = end.letter_task_id  # its sender waits for an answer under this id
    elif codec == "standard" and "payload" in found:
        end.payload = _text_of(found["payload"], always_json=True)
    elif codec == "binary":
        end.payload = base64.b64encode(body).decode()
    else:
        end.payload = body.decode("utf-8", "backslashreplace")


def _text_of(value: Any, *, always_json: bool = False) -> str:
    if isinstance(value, str) and not always_json:
        return value
    try:
        return dumps(value).decode()
    except InvalidMessage:
        return ""
