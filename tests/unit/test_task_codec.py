"""The task protocol's form: flat fields in and out, and what a worker cannot do with."""

from __future__ import annotations

import string
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs.codec import CODECS
from ackbone.core.errors import DecodeError, InvalidMessage
from ackbone.core.message import Message
from ackbone.core.task_protocol import FLAT, FlatDelivery

SUB = Subscription(name="tasks", queue="stream:task", codec="task")
TASK = CODECS["task"]
GOOD = {
    "task_id": "t-1",
    "tool_name": "search",
    "payload": '{"q": "weather"}',
    "idempotency_key": "k-1",
    "retry_count": "0",
}

printable = st.text(alphabet=string.ascii_letters + string.digits + "._:- äß漢", min_size=1)
text = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
moments = st.timedeltas(timedelta(days=-4000), timedelta(days=4000)).map(
    lambda passed: datetime(2026, 1, 1, tzinfo=UTC) + passed
)


def delivery(body: Any, **options: Any) -> Delivery:
    written = body if isinstance(body, bytes) else msgspec.json.encode(body)
    made = FlatDelivery if "fields" in options else Delivery
    return made(body=written, headers={FLAT: "1"}, tag=1, identity="q/1-1", **options)


def read(body: Any, **options: Any) -> Message:
    return TASK.decode(delivery(body, **options), SUB)


def test_the_fields_of_the_protocol():
    message = read({**GOOD, "retry_count": "2", "queue": "fast"}, sent_at_us=5_000_000)
    assert (message.id, message.type) == ("t-1", "search")
    assert message.payload == {"q": "weather"}
    assert message.idempotency_key == "k-1"
    assert message.metadata == {"retry_count": 2}
    assert message.extra == {"queue": "fast"}
    assert message.created_at == datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("without", "words"),
    [
        (("task_id",), "missing required fields: task_id"),
        (("payload", "idempotency_key"), "missing required fields: payload, idempotency_key"),
        (tuple(GOOD), "missing required fields: task_id, tool_name, payload, idempotency_key"),
    ],
)
def test_a_missing_field_is_named(without: tuple[str, ...], words: str):
    found = {name: value for name, value in GOOD.items() if name not in without}
    with pytest.raises(DecodeError, match=words):
        read(found)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"payload": "[1]"}, "payload is not a JSON object"),
        ({"payload": "{"}, "payload is not valid JSON"),
        ({"payload": "[" * 200_000}, "payload is not valid JSON"),
        ({"payload": {"base64": "/wA="}}, "field 'payload' is not text"),
        ({"retry_count": "-1"}, "retry_count is not a number"),
        ({"retry_count": "many"}, "retry_count is not a number"),
        ({"retry_count": "9" * 400}, "retry_count is not a number"),
        ({"retry_count": "٣"}, "retry_count is not a number"),
        ({"priority": "urgent"}, "priority"),
        ({"tenant_id": "a b"}, "tenant_id"),
        ({"created_at": "yesterday"}, "created_at"),
        ({"metadata": "1"}, "metadata is not a JSON object"),
        ({"headers": '{"a": 1}'}, "headers contain a value that is not text"),
    ],
)
def test_a_field_that_is_wrong_is_named(wrong: dict[str, Any], words: str):
    with pytest.raises(DecodeError, match=words):
        read({**GOOD, **wrong})


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"\xff", b'{"task_id": 1}'])
def test_what_is_no_set_of_fields_is_refused(body: bytes):
    with pytest.raises(DecodeError):
        read(body)


@pytest.mark.parametrize(
    "message",
    [
        Message(type="t", payload=[1], idempotency_key="k"),
        Message(type="t", payload=b"x", idempotency_key="k"),
    ],
)
def test_what_the_protocol_cannot_carry_is_refused(message: Message):
    with pytest.raises(InvalidMessage):
        TASK.encode(message)


def test_a_task_without_a_key_is_its_own_key():
    body, _ = TASK.encode(Message(id="t-1", type="t"))
    message = read(body)
    assert (message.idempotency_key, message.payload) == ("t-1", {})


@given(
    st.builds(
        Message,
        type=printable,
        id=printable,
        payload=st.dictionaries(text, values, max_size=4),
        idempotency_key=printable,
        ordering_key=st.none() | printable,
        correlation_id=st.none() | printable,
        tenant_id=st.sampled_from(["default", "acme"]),
        channel=st.sampled_from(["", "telegram"]),
        priority=st.integers(0, 3),
        created_at=moments,
        expires_at=st.none() | moments,
        headers=st.dictionaries(st.sampled_from(["x-a", "x-b"]), text, max_size=2),
        metadata=st.fixed_dictionaries({"retry_count": st.integers(0, 9)}),
        extra=st.dictionaries(st.sampled_from(["more", "still"]), text, max_size=2),
    )
)
def test_what_is_written_is_read_back(message: Message):
    body, headers = TASK.encode(message)
    fields = msgspec.json.decode(body)
    assert all(type(value) is str for value in fields.values())
    came = TASK.decode(Delivery(body=body, headers=headers, tag=1, identity="x"), SUB)
    assert msgspec.structs.replace(came, raw=None) == message


@given(
    st.fixed_dictionaries(
        {
            **{name: st.just(value) | text for name, value in GOOD.items()},
        },
        optional={
            "tenant_id": printable,
            "priority": st.sampled_from(["0", "3", "9", "x"]),
            "ordering_key": text,
            "source": text,
            "trace": text,
            "created_at": moments.map(datetime.isoformat) | text,
            "expires_at": moments.map(datetime.isoformat) | text,
            "metadata": st.sampled_from(["{}", '{"retry_count": 7, "a": 1}', "[]"]),
            "headers": st.sampled_from(['{"x-a": "1"}', '{"x-a": 1}']),
            "more": text,
        },
    )
)
def test_fields_that_a_broker_has_apart_say_the_same_as_the_body(fields: dict[str, str]):
    def outcome(**options: Any) -> Message | str:
        try:
            return read(fields, sent_at_us=1_760_000_000_000_000, **options)
        except DecodeError as error:
            return str(error)

    assert outcome(fields=fields) == outcome()
