"""A file of messages: each line is checked, sent or refused by its number; nothing is bent."""

import io
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from ackbone.admin import sending
from ackbone.admin.sending import (
    Answer,
    Defaults,
    Line,
    encoded,
    lines_of,
    message_of,
    send_each,
)
from ackbone.cli.session import encoder
from ackbone.core.broker import Result
from ackbone.core.errors import (
    AckboneError,
    DecodeError,
    InvalidMessage,
    MessageTooLarge,
    PublishUnknown,
    StoreFull,
)
from ackbone.core.store import Send
from tests.unit.desk import Desk, open_desk

GOOD = b'{"message_type": "good", "payload": {"n": 1}}'


@pytest.fixture
async def desk(home: Path) -> AsyncIterator[Desk]:
    async with open_desk(home) as desk:
        yield desk


async def send(desk: Desk, text: bytes, **options) -> list[Answer]:
    encode = encoder(desk.app)

    async def publish(queue: str, batch: Sequence[Send]) -> Sequence[Result]:
        return await desk.app.broker.publish(queue, [each.outgoing for each in batch])

    items = encoded(
        lines_of(io.BytesIO(text), limit=options.pop("limit", 1_000_000)),
        options.pop("defaults", Defaults()),
        lambda message: encode(message, "default"),
    )
    found = send_each(
        items, options.pop("publish", publish), timeout_s=options.pop("timeout_s", 30)
    )
    return [answer async for answer in found]


async def test_good_lines_are_sent_and_bad_ones_named_by_number(desk: Desk):
    text = b"\n".join([b"\xef\xbb\xbf" + GOOD, b"", b"{broken", GOOD.replace(b"1", b"2"), b"[]"])
    answers = await send(desk, text)
    assert [(answer.line, answer.error is None) for answer in answers] == [
        (1, True), (3, False), (4, True), (5, False),
    ]  # fmt: skip
    await desk.work()
    assert sorted(each["n"] for each in desk.seen) == [1, 2]


async def test_every_field_of_the_standard_form_arrives(desk: Desk):
    line = {
        "message_id": "m-1",
        "correlation_id": "c-1",
        "message_type": "bad",
        "timestamp": "2025-11-20T10:00:00Z",
        "version": "1.0",
        "priority": 3,
        "payload": {"text": "ünïcode"},
        "metadata": {"user_id": "u", "tenant_id": "acme", "source": "api", "retry_count": 0,
                     "idempotency_key": "k", "ordering_key": "o"},
        "new_field": {"kept": True},
    }  # fmt: skip
    (answer,) = await send(desk, json.dumps(line).encode())
    assert (answer.id, answer.error) == ("m-1", None)
    await desk.work()
    message = desk.letters.read(await desk.letters.find("m-1")).message
    assert message is not None
    assert message.payload == {"text": "ünïcode"}
    assert (message.tenant_id, message.source, message.priority) == ("acme", "api", 3)
    assert (message.idempotency_key, message.ordering_key) == ("k", "o")
    assert message.metadata["user_id"] == "u"
    assert message.extra == {"new_field": {"kept": True}}
    assert message.created_at.year == 2025


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "not valid JSON"),
        (b'"text"', "JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"payload": 1}', "message_type is missing"),
        (b'{"message_type": 7}', "message_type"),
        (b'{"message_type": "a\\u0007b"}', "message_type"),
        (b'{"message_type": "a", "priority": 4}', "priority"),
        (b'{"message_type": "a", "priority": true}', "priority"),
        (b'{"message_type": "a", "priority": "1"}', "priority"),
        (b'{"message_type": "a", "message_id": 5}', "message_id"),
        (b'{"message_type": "a", "message_id": "' + b"x" * 256 + b'"}', "message_id"),
        (b'{"message_type": "a", "metadata": []}', "metadata"),
        (b'{"message_type": "a", "metadata": {"ordering_key": 1}}', "ordering_key"),
        (b'{"message_type": "a", "metadata": {"tenant_id": "../x"}}', "tenant_id"),
        (b'{"message_type": "a", "timestamp": "yesterday"}', "timestamp"),
        (b'{"message_type": "a", "version": "2.0"}', "version"),
        (b'{"message_type": "a", "payload": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "deep"),
        (b'{"message_type": "a", "payload": NaN}', "JSON"),
    ],
)
async def test_what_is_wrong_is_said(desk: Desk, text: bytes, reason: str):
    (answer,) = await send(desk, text)
    assert isinstance(answer.error, InvalidMessage | DecodeError)
    assert reason in str(answer.error)
    assert not answer.stops
    assert await desk.records.queues() == []


async def test_a_line_without_an_end_is_refused_and_the_next_one_is_read(desk: Desk):
    endless = b'{"message_type": "good", "payload": "' + b"x" * 5000 + b'"}'
    first, second = await send(desk, endless + b"\n" + GOOD, limit=1000)
    assert isinstance(first.error, MessageTooLarge)
    assert (second.line, second.error) == (2, None)


async def test_a_message_above_the_limit_is_refused_alone(desk: Desk):
    large = b'{"message_type": "good", "payload": "' + b"x" * 300_000 + b'"}'
    first, second = await send(desk, large + b"\n" + GOOD)
    assert isinstance(first.error, MessageTooLarge)
    assert second.error is None


async def test_defaults_fill_what_a_line_leaves_out():
    defaults = Defaults(type="chat", tenant_id="acme", priority=0, headers={"x-from": "file"})
    empty = message_of(Line(number=1, text=b"{}"), defaults)
    assert (empty.type, empty.tenant_id, empty.priority) == ("chat", "acme", 0)
    assert empty.headers == {"x-from": "file"}
    own = b'{"message_type": "x", "priority": 2, "metadata": {"tenant_id": "zeta"}}'
    said = message_of(Line(number=2, text=own), defaults)
    assert (said.type, said.tenant_id, said.priority) == ("x", "zeta", 2)


async def test_sending_stops_where_the_broker_stops_and_says_at_which_line(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sending, "BATCH", 2)
    taken: list[str] = []

    async def full_after_two(queue, batch):
        error: AckboneError | None = StoreFull("no room") if taken else None
        taken.extend(each.outgoing.id for each in batch)
        return [Result(id=each.outgoing.id, error=error) for each in batch]

    answers = await send(desk, b"\n".join([GOOD] * 6), publish=full_after_two)
    assert [(answer.line, answer.stops) for answer in answers] == [
        (1, False), (2, False), (3, True),
    ]  # fmt: skip
    assert len(taken) == 4, "nothing behind the failed batch was tried"


async def test_no_answer_in_time_is_unknown_not_failed(desk: Desk):
    import asyncio

    async def never(queue, batch):
        await asyncio.Event().wait()

    (answer,) = await send(desk, GOOD, publish=never, timeout_s=0.01)
    assert isinstance(answer.error, PublishUnknown)
    assert answer.stops
