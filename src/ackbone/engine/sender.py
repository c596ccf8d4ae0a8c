"""The sender: checks and encodes messages, and publishes those sent meanwhile as one batch."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from ackbone.core.broker import Broker, Durability, Outgoing, Result
from ackbone.core.codecs.codec import CODECS
from ackbone.core.codecs.standard import FIELDS
from ackbone.core.errors import AckboneError, InvalidMessage, MessageTooLarge, PublishUnknown
from ackbone.core.ids import new_id
from ackbone.core.message import DEFAULT_TENANT, MAX_ID, MAX_TENANT, Message, check_name
from ackbone.core.store import Send
from ackbone.core.text import unknown_option

from .batcher import Batcher

MESSAGE_OPTIONS = frozenset(
    {
        "id",
        "tenant_id",
        "source",
        "channel",
        "priority",
        "correlation_id",
        "trace",
        "idempotency_key",
        "ordering_key",
        "created_at",
        "expires_at",
        "headers",
        "metadata",
        "extra",
    }
)
TRANSPORT_OPTIONS = frozenset({"delay_s", "ttl_s"})
BATCH = 1000
"""Messages of one call of the broker, at most."""
LONGEST_S = 315_360_000.0
_OPTIONAL = ("idempotency_key", "ordering_key", "correlation_id", "source", "channel", "trace")
_MAPPINGS = ("headers", "metadata", "extra")
_rest_of = operator.attrgetter("tenant_id", "priority", "expires_at", *_OPTIONAL, *_MAPPINGS)
_NOTHING_SAID = _rest_of(Message(type=""))
"""The defaults. A message that leaves all of them needs no check field by field."""
_BREAKS = frozenset(b"\0\n\r")


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that `send` accepted the message, which is durable in this class (P1)."""

    id: str
    queue: str
    durability: Durability


class SendPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How messages of one queue are written."""

    codec: str = "standard"
    ttl_s: float | None = None
    """For messages without an expiry of their own."""


class Sender:
    """Sends messages, with one batcher per queue."""

    def __init__(
        self,
        policy_of: Callable[[str], SendPolicy],
        broker_of: Callable[[str], Broker],
        *,
        max_bytes: int,
        timeout_s: float,
        hold_back: Callable[[Send], Awaitable[None]] | None = None,
    ) -> None:
        """`hold_back` keeps a message that is not due yet, if the broker cannot."""
        self._policy_of = policy_of
        self._broker_of = broker_of
        self._policies: dict[str, SendPolicy] = {}
        self._usual: dict[str, Callable[[str, str, Any], Outgoing]] = {}
        """`Codec.new` of the checked queues that have no further policy."""
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._hold_back = hold_back
        self._batchers: dict[str, Batcher[Outgoing, Result]] = {}

    def outgoing(self, type: str, payload: Any, queue: str, options: Mapping[str, Any]) -> Send:
        """Return the message as it would be sent, checked. Raises InvalidMessage."""
        if not options:
            if queue.__class__ is str and queue in self._usual:
                return self._new(type, payload, queue)
            return self.encoded(Message(type=type, payload=payload), queue)
        fields: dict[str, Any] = {}
        transport: dict[str, Any] = {}
        for name, value in options.items():
            if name in TRANSPORT_OPTIONS:
                transport[name] = value
            elif name not in MESSAGE_OPTIONS:
                known = MESSAGE_OPTIONS | TRANSPORT_OPTIONS | {"queue"}
                raise InvalidMessage(unknown_option(name, known))
            elif value is not None:
                fields[name] = value
        return self.encoded(Message(type=type, payload=payload, **fields), queue, **transport)

    def encoded(
        self,
        message: Message,
        queue: str,
        *,
        delay_s: float | None = None,
        ttl_s: float | None = None,
    ) -> Send:
        """Encode a message. Raises InvalidMessage, before anything is accepted, if it could not be
        read back unchanged."""
        policy = self._policies.get(queue) if type(queue) is str else None
        if policy is None:
            check_name("queue", queue)
            policy = self._policies[queue] = self._policy_of(queue)
            if policy.ttl_s is None:
                self._usual[queue] = CODECS[policy.codec].new
        check_message(message)
        delay = _seconds("delay_s", delay_s, above=False)
        if ttl_s is None and message.expires_at is None:
            ttl_s = policy.ttl_s
        ttl = None if ttl_s is None else _seconds("ttl_s", ttl_s, above=True)
        if ttl is not None:
            expires = datetime.now(UTC) + timedelta(seconds=delay + ttl)
            message = msgspec.structs.replace(message, expires_at=expires)
        outgoing = CODECS[policy.codec].outgoing(message, delay_s=delay, ttl_s=ttl)
        self._check_size(message.id, outgoing.body)
        return Send(queue=queue, outgoing=outgoing, tenant_id=message.tenant_id)

    def _new(self, type: str, payload: Any, queue: str) -> Send:
        """As `encoded`, for a message with a type and a payload alone: faster, fewer checks."""
        _printable("type", type)
        message_id = new_id()
        outgoing = self._usual[queue](message_id, type, payload)
        self._check_size(message_id, outgoing.body)
        return Send(queue=queue, outgoing=outgoing, tenant_id=DEFAULT_TENANT)

    def _check_size(self, message_id: str, body: bytes) -> None:
        if len(body) > self._max_bytes:
            raise MessageTooLarge(
                f"message {message_id} has {len(body)} bytes, the limit is {self._max_bytes} "
                "(max_message_bytes). Send a reference to the data instead"
            )

    async def publish(self, send: Send) -> Receipt:
        """Return when the message is durable. After the deadline the result is unknown, not
        failed: PublishUnknown."""
        outgoing, broker = send.outgoing, self._broker_of(send.queue)
        if outgoing.delay_s > 0 and self._hold_back and not broker.capabilities.delay:
            await self._hold_back(send)
            return Receipt(id=outgoing.id, queue=send.queue, durability=Durability.FSYNC)
        batcher = self._batcher_of(send.queue)
        try:
            result = await batcher.add(outgoing)
        except TimeoutError:
            raise PublishUnknown([outgoing.id], self._no_answer) from None
        if result.error is not None:
            raise result.error
        durability = broker.capabilities.durability
        return Receipt(id=outgoing.id, queue=send.queue, durability=durability)

    async def publish_many(self, sends: Sequence[Send]) -> list[Receipt]:
        """As `publish`, for many messages, without a task for each.

        All of them are tried, even if one fails. Then the first failure is raised.
        """
        if any(send.outgoing.delay_s > 0 for send in sends):
            return list(await asyncio.gather(*(self.publish(send) for send in sends)))
        queues: dict[str, list[int]] = {}
        for n, send in enumerate(sends):
            queues.setdefault(send.queue, []).append(n)
        asked: list[tuple[list[int], asyncio.Future[Sequence[Result | BaseException]]]] = []
        for queue, places in queues.items():
            batcher = self._batcher_of(queue)
            for at in range(0, len(places), BATCH):
                part = places[at : at + BATCH]
                asked.append((part, batcher.add_all([sends[n].outgoing for n in part])))
        failures: dict[int, BaseException] = {}
        for part, answer in asked:
            failures.update(await self._failures(part, sends, answer))
        if failures:
            raise failures[min(failures)]
        durable = {queue: self._broker_of(queue).capabilities.durability for queue in queues}
        return [
            Receipt(id=send.outgoing.id, queue=send.queue, durability=durable[send.queue])
            for send in sends
        ]

    async def _failures(
        self,
        part: Sequence[int],
        sends: Sequence[Send],
        answer: asyncio.Future[Sequence[Result | BaseException]],
    ) -> dict[int, BaseException]:
        """Return the errors of a batch, by place in `sends`: refused or unknown messages."""
        try:
            results = await answer
        except TimeoutError:
            unknown = PublishUnknown([sends[n].outgoing.id for n in part], self._no_answer)
            return dict.fromkeys(part, unknown)
        except AckboneError as error:
            return dict.fromkeys(part, error)
        failures: dict[int, BaseException] = {}
        for n, result in zip(part, results, strict=True):
            refused = result if isinstance(result, BaseException) else result.error
            if refused is not None:
                failures[n] = refused
        return failures

    @property
    def _no_answer(self) -> str:
        return f"no answer within {self._timeout_s} s"

    def _batcher_of(self, queue: str) -> Batcher[Outgoing, Result]:
        batcher = self._batchers.get(queue)
        if batcher is None:
            batcher = self._batchers[queue] = self._batcher(queue)
        return batcher

    async def drain(self) -> None:
        """Wait until everything that was sent is answered."""
        for batcher in self._batchers.values():
            await batcher.drain()
        self._batchers.clear()

    def _batcher(self, queue: str) -> Batcher[Outgoing, Result]:
        async def flush(batch: Sequence[Outgoing]) -> Sequence[Result]:
            return await self._broker_of(queue).publish(queue, batch)

        return Batcher(flush, limit=BATCH, timeout_s=self._timeout_s)


def check_message(message: Message) -> None:
    """Raise InvalidMessage if a field has a wrong type or form."""
    _printable("type", message.type)
    _printable("id", message.id)
    _moment("created_at", message.created_at)
    if type(message.priority) is bool or _rest_of(message) != _NOTHING_SAID:
        _check_rest(message)


def _check_rest(message: Message) -> None:
    if message.tenant_id != DEFAULT_TENANT:
        check_name("tenant_id", message.tenant_id, longest=MAX_TENANT)
    if type(message.priority) is bool or message.priority not in (0, 1, 2, 3):
        raise InvalidMessage(f"priority is 0 (low) to 3 (critical), not {message.priority!r}")
    _check_optional(message)
    if message.expires_at is not None:
        _moment("expires_at", message.expires_at)
    _check_mappings(message)


def _moment(name: str, value: Any) -> None:
    if not isinstance(value, datetime):
        raise InvalidMessage(f"{name} is a datetime, not {value!r:.80}")


def _check_optional(message: Message) -> None:
    for name in _OPTIONAL:
        value = getattr(message, name)
        if value is not None and value != "":
            _printable(name, value)
    if message.idempotency_key == "" or message.ordering_key == "":
        raise InvalidMessage("an idempotency or ordering key is not empty: leave it out")


def _check_mappings(message: Message) -> None:
    for name in _MAPPINGS:
        value: Any = getattr(message, name)
        if type(value) is not dict and not isinstance(value, Mapping):
            raise InvalidMessage(f"{name} is a mapping, not {value!r:.80}")
    if message.headers:
        _check_headers(message.headers)
    for name in ("metadata", "extra"):
        clash = FIELDS.intersection(getattr(message, name)) if getattr(message, name) else ()
        for key in sorted(clash):
            if name == "extra" or key in MESSAGE_OPTIONS:
                raise InvalidMessage(f"{name}: {key!r} is a field of the message itself")


def _printable(name: str, value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID or not value.isprintable():
        raise InvalidMessage(f"{name} {value!r:.80} is not 1 to {MAX_ID} printable characters")


def _check_headers(headers: Mapping[Any, Any]) -> None:
    for key, value in headers.items():
        if not isinstance(key, str) or not key or not key.isascii() or not key.isprintable():
            raise InvalidMessage(f"header name {key!r:.80} is not printable ASCII")
        if not isinstance(value, str) or not _is_line(value):
            raise InvalidMessage(f"header {key}: the value must be text without line breaks")


def _is_line(value: str) -> bool:
    try:
        return not _BREAKS.intersection(value.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _seconds(name: str, value: Any, *, above: bool) -> float:
    if value is None or (value == 0 and not above):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_S:
        raise InvalidMessage(
            f"{name} is {value!r:.40}: it must be a number of seconds above 0, at most ten years"
        )
    return float(value)
