"""Wire forms: what is sent is read back, unknown fields survive, bad input is refused clearly."""

import dataclasses
import json
import math
import string
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs import values
from ackbone.core.codecs.codec import CODECS, STANDARD
from ackbone.core.codecs.values import MAX_DEPTH, dumps, hash_payload, loads
from ackbone.core.errors import DecodeError, InvalidMessage
from ackbone.core.message import Message
from ackbone.engine.decoder import decoder

SUB = Subscription(name="s", queue="q")

text = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
printable = st.text(
    alphabet=string.ascii_letters + string.digits + "._:- äß漢", min_size=1, max_size=30
)
name = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,30}", fullmatch=True)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
moments = st.timedeltas(timedelta(days=-40_000), timedelta(days=60_000)).map(
    lambda passed: datetime(2026, 1, 1, tzinfo=UTC) + passed
)
OWN = {"tenant_id", "source", "channel", "idempotency_key", "ordering_key", "expires_at", "trace"}
FIELDS = {
    "message_id",
    "correlation_id",
    "message_type",
    "timestamp",
    "version",
    "priority",
    "payload",
    "metadata",
}


def messages(payload: st.SearchStrategy[Any]) -> st.SearchStrategy[Message]:
    return st.builds(
        Message,
        type=printable,
        payload=payload,
        id=printable,
        tenant_id=name,
        source=printable,
        channel=printable,
        priority=st.integers(0, 3),
        correlation_id=st.none() | printable,
        trace=st.none() | printable,
        idempotency_key=st.none() | printable,
        ordering_key=st.none() | printable,
        created_at=moments,
        expires_at=st.none() | moments,
        metadata=st.dictionaries(
            text.filter(lambda key: key not in OWN | {"retry_count"}), json_values, max_size=3
        ),
        extra=st.dictionaries(
            text.filter(lambda key: key not in OWN | FIELDS), json_values, max_size=3
        ),
    )


def delivered(body: bytes, headers: dict[str, str] | None = None, **more: Any) -> Delivery:
    return Delivery(body=body, headers=headers or {}, tag=1, identity="broker-1", **more)


def read_back(codec: str, message: Message) -> Message:
    body, headers = CODECS[codec].encode(message)
    return CODECS[codec].decode(delivered(body, headers), SUB)


# -- round trips ----------------------------------------------------------------------------------


@given(messages(json_values))
def test_standard_round_trip(message: Message) -> None:
    got = read_back("standard", message)
    kept = {k: v for k, v in got.metadata.items() if k != "retry_count"}
    assert kept == message.metadata
    for field in (
        "type", "payload", "id", "tenant_id", "source", "channel", "priority", "correlation_id",
        "trace", "idempotency_key", "ordering_key", "created_at", "expires_at", "extra",
    ):  # fmt: skip
        assert getattr(got, field) == getattr(message, field), field


@pytest.mark.parametrize(
    ("codec", "payloads"), [("json", json_values), ("text", text), ("binary", st.binary())]
)
def test_body_round_trips(codec: str, payloads: st.SearchStrategy[Any]) -> None:
    @given(messages(payloads))
    def check(message: Message) -> None:
        got = read_back(codec, message)
        assert got.payload == message.payload
        for field in (
            "type", "id", "tenant_id", "channel", "priority", "correlation_id", "trace",
            "idempotency_key", "ordering_key", "expires_at",
        ):  # fmt: skip
            assert getattr(got, field) == getattr(message, field), field

    check()


@given(messages(json_values), st.dictionaries(text, json_values, max_size=4))
def test_unknown_fields_survive(message: Message, unknown: dict[str, Any]) -> None:
    """Of a newer producer: read, kept, and written again as they were."""
    unknown = {k: v for k, v in unknown.items() if k not in OWN | FIELDS}
    body, _ = CODECS["standard"].encode(message)
    fields = {**msgspec.json.decode(body), **unknown, "version": "1.9"}
    got = CODECS["standard"].decode(delivered(msgspec.json.encode(fields)), SUB)
    again, _ = CODECS["standard"].encode(got)
    written = msgspec.json.decode(again)
    for key, value in {**message.extra, **unknown}.items():
        assert written[key] == value


@given(json_values)
def test_a_payloads_hash_does_not_depend_on_the_order_of_fields(value: Any) -> None:
    turned = dict(reversed(list(value.items()))) if isinstance(value, dict) else value
    assert hash_payload(value) == hash_payload(turned)


# -- bad input ------------------------------------------------------------------------------------


def refuses(codec: str, body: bytes, headers: dict[str, str] | None = None) -> str:
    with pytest.raises(DecodeError) as caught:
        CODECS[codec].decode(delivered(body, headers), SUB)
    return str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"nul",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": 1} trailing',
        b"[" * 200_000 + b"]" * 200_000,
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        b'{"a": 1e999999}',
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("codec", ["standard", "json"])
def test_what_is_no_json_is_refused(codec: str, body: bytes) -> None:
    assert refuses(codec, body)


def test_how_deep_json_may_be() -> None:
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert loads(deep) == msgspec.json.decode(deep)
    with pytest.raises(DecodeError, match="nested deeper"):
        loads(b"[" + deep + b"]")
    assert loads(b'"' + b"[" * 500 + b'"') == "[" * 500, "brackets in a text are no depth"


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(0, 9), st.text('[]{}"\\\\a\n', max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text('[]{}"\\a', max_size=3), inner)
        ),
        max_leaves=40,
    ),
    st.booleans(),
)
def test_depth_is_what_nesting_there_is(value: Any, ascii_only: bool) -> None:
    def depth(item: Any) -> int:
        if isinstance(item, dict):
            return 1 + max((depth(each) for each in item.values()), default=0)
        if isinstance(item, list):
            return 1 + max((depth(each) for each in item), default=0)
        return 0

    written = json.dumps(value, ensure_ascii=ascii_only, indent=1).encode()
    assert values._depth(written) == depth(value)


@pytest.mark.parametrize("digits", [20, 40, 400, 5000, 100_000])
def test_huge_integers(digits: int) -> None:
    """Refused, or read as what can be stored and hashed again: never a surprise later."""
    decode = decoder(SUB)
    for body in (
        b'{"payload": ' + b"9" * digits + b"}",
        b'{"payload": {"deep": [-' + b"9" * digits + b"]}}",
        b'{"version": ' + b"1" * digits + b"}",
        b'{"priority": ' + b"9" * digits + b"}",
        b'{"message_id": ' + b"9" * digits + b"}",
    ):
        candidate = decode(delivered(body))
        if candidate.message is not None:
            assert candidate.sha256
            msgspec.json.encode(candidate.message.payload)
        else:
            assert candidate.error is not None


@pytest.mark.parametrize(
    "fields",
    [
        [1],
        "text",
        None,
        {"version": "2.0"},
        {"version": {}},
        {"metadata": [1]},
        {"message_id": 5},
        {"message_id": ["x"]},
        {"message_type": 7},
        {"message_type": "a\nb"},
        {"message_type": "x" * 300},
        {"priority": "high"},
        {"priority": "²"},
        {"priority": "9" * 5000},
        {"priority": 1.5},
        {"priority": True},
        {"priority": None},
        {"timestamp": 12},
        {"timestamp": "yesterday"},
        {"expires_at": "later"},
        {"correlation_id": {}},
        {"metadata": {"tenant_id": "../etc"}},
        {"metadata": {"tenant_id": "x" * 65}},
        {"metadata": {"tenant_id": 4}},
        {"metadata": {"idempotency_key": 4}},
        {"metadata": {"ordering_key": []}},
        {"tenant_id": "a b"},
    ],
    ids=repr,
)
def test_wrong_types_are_refused(fields: Any) -> None:
    assert refuses("standard", msgspec.json.encode(fields))


@pytest.mark.parametrize(
    "headers",
    [
        {"x-priority": "²"},
        {"x-priority": "9" * 5000},
        {"x-priority": "high"},
        {"x-tenant-id": "../../etc"},
        {"X-Tenant-Id": "a b"},
        {"x-event-name": "a\x00b"},
        {"x-expires-at": "soon"},
        {"x-event-name": "\udc80"},
        {"x-dedup-key": "\udc80"},
        {"x-ordering-key": "\udc80"},
        {"x-message-id": "\udc80"},
        {"x-correlation-id": "\udc80"},
        {"x-channel": "\udc80"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("codec", ["json", "text", "binary"])
def test_hostile_headers_are_refused(codec: str, headers: dict[str, str]) -> None:
    assert refuses(codec, b'"x"', headers)


anything = st.one_of(json_values, st.text(max_size=30), st.integers(), st.floats())


@given(
    st.sampled_from(sorted(CODECS)),
    st.binary(max_size=200)
    | st.dictionaries(
        st.sampled_from(sorted(OWN | FIELDS)), st.one_of(json_values, text), max_size=8
    ).map(msgspec.json.encode),
    st.dictionaries(
        st.sampled_from(
            [
                "x-priority",
                "x-tenant-id",
                "X-Event-Name",
                "x-expires-at",
                "x-dedup-key",
                "traceparent",
            ]
        )
        | st.text(max_size=10),
        st.text(max_size=30),
        max_size=5,
    ),
)
@example("standard", b'{"priority":"\xc2\xb2"}', {})
def test_no_bytes_raise_anything_but_decode_error(
    codec: str, body: bytes, headers: dict[str, str]
) -> None:
    try:
        message = CODECS[codec].decode(delivered(body, headers), SUB)
    except DecodeError:
        return
    assert message.id
    assert message.type
    assert message.tenant_id
    assert 0 <= message.priority <= 3
    for field in ("id", "type", "tenant_id", "idempotency_key", "ordering_key", "channel"):
        (getattr(message, field) or "").encode()  # a database takes it


@given(st.binary(max_size=300), st.booleans(), st.integers(1, 100))
def test_the_decode_step_never_raises(body: bytes, intact: bool, limit: int) -> None:
    for codec in CODECS:
        sub = msgspec.structs.replace(SUB, codec=codec)
        delivery = delivered(body, intact=intact)
        candidate = decoder(sub, max_bytes=limit)(delivery)
        assert candidate.delivery is delivery
        assert (candidate.message is None) is (candidate.error is not None)
        if not intact or len(body) > limit:
            assert candidate.message is None


def test_a_message_without_an_id_has_the_same_one_on_each_redelivery() -> None:
    for codec, body in (("standard", b"{}"), ("json", b"1"), ("text", b"x"), ("binary", b"")):
        first = CODECS[codec].decode(delivered(body), SUB)
        second = CODECS[codec].decode(delivered(body, count=2), SUB)
        assert first.id == second.id


def test_header_names_do_not_care_about_case() -> None:
    sub = msgspec.structs.replace(SUB, type_header="Event-Name", tenant_header="Tenant")
    got = CODECS["json"].decode(delivered(b"1", {"event-name": "e", "TENANT": "t"}), sub)
    assert (got.type, got.tenant_id) == ("e", "t")


# -- what send refuses ----------------------------------------------------------------------------


def _endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


UNWRITABLE: list[Any] = [
    float("nan"),
    {"a": [1, float("inf")]},
    [{"x": -math.inf}],
    10**5000,
    "\ud800",
    {"\udfff": 1},
    object(),
    {1, object()},
    {"f": lambda: None},
    {(1, 2): 3},
    _deep(MAX_DEPTH + 1),
    _deep(200_000),
    _endless(),
    1 + 2j,
]


@pytest.mark.parametrize("value", UNWRITABLE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("codec", ["standard", "json"])
def test_what_json_would_change_is_refused_at_send(codec: str, value: Any) -> None:
    with pytest.raises(InvalidMessage):
        CODECS[codec].encode(Message(type="t", payload=value))


class Named(str):
    """Text of a type of its own: msgspec does not write it."""


near_the_limit = st.integers(MAX_DEPTH - 4, MAX_DEPTH + 2).map(_deep)
hard = st.sampled_from([*UNWRITABLE, b"bytes", bytearray(b"bytes"), memoryview(b"bytes")])


@given(
    printable, printable | printable.map(Named), json_values | st.floats() | near_the_limit | hard
)
@example("id", "t", {"brackets": "[" * 100})
@example("id", "t", "null")
def test_a_new_message_is_written_as_any_other(id: str, type: str, payload: Any) -> None:
    refused = ""
    try:
        body = STANDARD.encode_new(id, type, payload)
    except InvalidMessage as error:
        refused = str(error)
    if refused:
        with pytest.raises(InvalidMessage) as other:
            STANDARD.encode(Message(id=id, type=type, payload=payload))
        assert str(other.value) == refused
        return
    read = STANDARD.decode(delivered(body), SUB)
    again = Message(id=id, type=type, payload=payload, created_at=read.created_at)
    assert (body, {}) == STANDARD.encode(again)


class OwnMoment(datetime):
    """As libraries that play with time have it."""


@given(
    moments | moments.map(lambda moment: moment.replace(microsecond=0)),
    st.sampled_from([UTC, timezone(timedelta(), "own"), timezone(timedelta(hours=-5))]),
    st.sampled_from([datetime, OwnMoment]),
)
def test_times_are_written_in_utc(moment: datetime, zone: tzinfo, kind: type[datetime]) -> None:
    """Partly by msgspec, partly by us: the text is the same."""
    there = moment.astimezone(zone)
    own = kind.combine(there.date(), there.time(), zone)
    body, _ = STANDARD.encode(Message(type="t", created_at=own, expires_at=own))
    fields = msgspec.json.decode(body)
    text = moment.replace(tzinfo=None).isoformat() + "Z"
    assert (fields["timestamp"], fields["metadata"]["expires_at"]) == (text, text)


class Parcel(msgspec.Struct):
    weight: float
    inner: Any = None


@dataclasses.dataclass
class Box:
    weight: float
    inner: Any = None


@pytest.mark.parametrize("kind", [Parcel, Box])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_inside_of_objects_are_looked_at(kind: Any, number: float) -> None:
    """They would become null without a word."""
    for value in (kind(number), kind(1.0, [kind(number)]), {"a": kind(1.0, {"b": number})}):
        with pytest.raises(InvalidMessage, match="NaN"):
            dumps(value)
        with pytest.raises(InvalidMessage, match="NaN"):
            STANDARD.encode_new("id", "t", value)
    assert dumps(kind(1.5)) == b'{"weight":1.5,"inner":null}'


@given(json_values)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert loads(dumps(value)) == value


def test_payloads_of_the_wrong_kind() -> None:
    for codec, payload in (("text", 5), ("text", b"x"), ("binary", "x"), ("standard", b"x")):
        with pytest.raises(InvalidMessage):
            CODECS[codec].encode(Message(type="t", payload=payload))
    with pytest.raises(InvalidMessage):
        CODECS["text"].encode(Message(type="t", payload="\ud800"))


def test_times_are_read_with_and_without_a_zone() -> None:
    body = msgspec.json.encode({"timestamp": "2026-05-01T12:00:00+02:00"})
    assert CODECS["standard"].decode(delivered(body), SUB).created_at == datetime(
        2026, 5, 1, 10, tzinfo=UTC
    )
    body = msgspec.json.encode({"timestamp": "2026-05-01T12:00:00"})
    moment = CODECS["standard"].decode(delivered(body), SUB).created_at
    assert moment.utcoffset() == timedelta(0)


odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, "", "x", "ä", "a\nb", "\0", "x" * 300, 0, 1, 3, 4, -1, 1.0, 2.5, True, [], {}, "2"]
)
times = st.sampled_from(
    ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00.1234567+02:00", "2026-01-01", "soon", "", None, 5]
)
headers = st.sampled_from([{}, {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}])
usual = st.fixed_dictionaries(
    {
        "message_id": st.just("m-1") | odd,
        "message_type": st.just("t") | odd,
        "timestamp": st.just("2026-01-01T00:00:00Z") | times,
        "version": st.just("1.0") | st.sampled_from(["1.1", "2.0", 1, None]),
        "priority": st.just(1) | odd,
        "metadata": st.dictionaries(
            st.sampled_from([*sorted(OWN), "retry_count", "chat_id"]),
            st.sampled_from(["", "x"]) | times | odd,
            max_size=4,
        ),
    },
    optional={"payload": json_values, "correlation_id": st.just("c") | odd, "more": json_values},
)


@given(usual, headers)
@example(
    {
        "message_id": "m",
        "message_type": "t",
        "timestamp": "2026-01-01T00:00:00Z",
        "version": "1.0",
        "priority": 1,
        "metadata": {"tenant_id": "default", "retry_count": 0},
    },
    {},
)
@example(
    {
        "message_id": "m",
        "message_type": "t",
        "timestamp": "2026-01-01T00:00:00Z",
        "version": "1.0",
        "priority": 1,
        "metadata": {"retry_count": None},
    },
    {},
)
def test_a_message_read_at_once_is_the_one_read_field_by_field(
    fields: dict[str, Any], headers: dict[str, str]
):
    delivery = Delivery(
        body=msgspec.json.encode(fields), headers=headers, tag=1, identity="i", sent_at_us=1
    )
    codec = CODECS["standard"]

    def outcome(read: Any) -> Message | str:
        try:
            found: Message = read(delivery, SUB)
        except DecodeError as error:
            return str(error)
        return found

    assert outcome(codec.decode) == outcome(codec._read)  # type: ignore[attr-defined]


@pytest.mark.parametrize("codec", ["standard", "json", "text", "binary"])
@pytest.mark.parametrize("broken", ["\x1f", "\udc80", "a" * 300, ""])
def test_a_broken_tracing_header_is_ignored(codec: str, broken: str):
    """Its standard says so, and the message is as good without it."""
    payload: Any = b"x" if codec == "binary" else "x"
    body, headers = CODECS[codec].encode(Message(type="t", payload=payload, id="m"))
    headers["traceparent"] = broken
    came = CODECS[codec].decode(Delivery(body=body, headers=headers, tag=1, identity="m"), SUB)
    assert came.trace is None
    assert came.payload == payload
