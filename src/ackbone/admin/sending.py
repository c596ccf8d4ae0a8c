"""Send a file of messages: lines are checked, sent in batches, and answered by line number.

A line is a standard message as JSON. An invalid field (an id that is too long, a priority out of
range) is reported and never corrected, so that no message differs from its line.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Protocol

import msgspec

from ackbone.core.broker import Delivery, Result, Subscription
from ackbone.core.codecs.codec import CODECS
from ackbone.core.codecs.values import loads
from ackbone.core.errors import (
    AckboneError,
    DecodeError,
    InvalidMessage,
    MessageTooLarge,
    PublishUnknown,
)
from ackbone.core.message import Message
from ackbone.core.store import Send

BATCH = 500
_BOM = b"\xef\xbb\xbf"

Publish = Callable[[str, Sequence[Send]], Awaitable[Sequence[Result]]]
"""Publishes messages of one queue and returns a result for each."""
Encode = Callable[[Message], Send]
"""Encodes a message, with the caller's options. Raises InvalidMessage."""
Item = tuple[int, Send | AckboneError]
"""The number of a line, and its encoded message or the error in it."""


class Lines(Protocol):
    """The part of a file's interface that `lines_of` needs."""

    def readline(self, size: int, /) -> bytes: ...


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for fields that a line does not have."""

    type: str | None = None
    tenant_id: str | None = None
    priority: int | None = None
    headers: Mapping[str, str] = {}


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file; `too_long` if it exceeded the limit and was cut."""

    number: int
    text: bytes
    too_long: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one line."""

    line: int
    id: str | None = None
    queue: str | None = None
    error: AckboneError | None = None

    @property
    def stops(self) -> bool:
        """True if sending failed although the line is valid, so the next lines would fail, too."""
        return self.error is not None and not isinstance(self.error, InvalidMessage | DecodeError)


def lines_of(file: Lines, *, limit: int) -> Iterator[Line]:
    """Yield the lines that are not blank. A line beyond the limit is cut, not read into memory."""
    number = 0
    while True:
        text = file.readline(limit + 1)
        if not text:
            return
        number += 1
        too_long = len(text) > limit and not text.endswith(b"\n")
        if too_long:
            while (more := file.readline(limit + 1)) and not more.endswith(b"\n"):
                pass
        text = (text.removeprefix(_BOM) if number == 1 else text).strip()
        if text:
            yield Line(number=number, text=text, too_long=too_long)


def message_of(line: Line, defaults: Defaults) -> Message:
    """Return the message of a line. Raises InvalidMessage or DecodeError with the reason."""
    if line.too_long:
        raise MessageTooLarge("the line is longer than the largest message")
    fields = loads(line.text)
    if not isinstance(fields, dict):
        raise InvalidMessage('a message is a JSON object, such as {"message_type": "chat"}')
    if not fields.get("message_type") and not defaults.type:
        raise InvalidMessage("message_type is missing (or give --type for lines without one)")
    _check_fields(fields)
    delivery = Delivery(body=line.text, headers={}, tag=None, identity=None)
    sub = Subscription(name="send", queue="send", default_type=defaults.type or "")
    message = CODECS["standard"].decode(delivery, sub)
    metadata = fields.get("metadata") or {}
    changes: dict[str, Any] = {"raw": None, "headers": dict(defaults.headers)}
    if "priority" not in fields and defaults.priority is not None:
        changes["priority"] = defaults.priority
    if defaults.tenant_id and not (metadata.get("tenant_id") or fields.get("tenant_id")):
        changes["tenant_id"] = defaults.tenant_id
    return msgspec.structs.replace(message, **changes)


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse values that decoding would silently change."""
    priority = fields.get("priority", 1)
    if type(priority) is not int or not 0 <= priority <= 3:
        raise InvalidMessage(f"priority is 0 (low) to 3 (critical), not {priority!r:.40}")
    message_id = fields.get("message_id")
    if message_id is not None and (not isinstance(message_id, str) or len(message_id) > 255):
        raise InvalidMessage("message_id is not a text of at most 255 characters")
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise InvalidMessage("metadata is not an object")
    for name in ("idempotency_key", "ordering_key"):
        value = (metadata or {}).get(name, fields.get(name))
        if value is not None and (not isinstance(value, str) or len(value) > 255):
            raise InvalidMessage(f"{name} is not a text of at most 255 characters")


def encoded(lines: Iterable[Line], defaults: Defaults, encode: Encode) -> Iterator[Item]:
    """Yield each line, encoded or with the error in it."""
    for line in lines:
        item: Send | AckboneError
        try:
            item = encode(message_of(line, defaults))
        except AckboneError as error:
            item = error
        yield line.number, item


async def send_each(
    items: Iterable[Item], publish: Publish, *, timeout_s: float
) -> AsyncIterator[Answer]:
    """Send items in batches; yield one answer per item, in order.

    Stops after the first item that the broker could not accept.
    """
    rest = iter(items)
    while batch := list(itertools.islice(rest, BATCH)):
        sends = [item for _, item in batch if isinstance(item, Send)]
        results = iter(await _published(sends, publish, timeout_s) if sends else ())
        for number, item in batch:
            if isinstance(item, Send):
                error = next(results).error
                answer = Answer(line=number, id=item.outgoing.id, queue=item.queue, error=error)
            else:
                answer = Answer(line=number, error=item)
            yield answer
            if answer.stops:
                return


async def _published(sends: Sequence[Send], publish: Publish, timeout_s: float) -> Sequence[Result]:
    try:
        async with asyncio.timeout(timeout_s):
            return await publish(sends[0].queue, sends)
    except TimeoutError:
        ids = [each.outgoing.id for each in sends]
        error = PublishUnknown(ids, f"no answer within {timeout_s:g} s")
        return [Result(id=each, error=error) for each in ids]
