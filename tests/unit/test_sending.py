"""What `send` refuses: clearly, before anything is accepted, and without harm to its neighbours."""

import asyncio
import fcntl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ackbone.app import App
from ackbone.config import Config
from ackbone.core.broker import (
    Broker,
    Capabilities,
    Delivery,
    Durability,
    Outgoing,
    Result,
    Subscription,
)
from ackbone.core.codecs.codec import CODECS
from ackbone.core.errors import (
    BrokerError,
    InvalidMessage,
    MessageTooLarge,
    PublishUnknown,
    StoreUnavailable,
)
from ackbone.core.message import Message
from ackbone.core.task_protocol import FlatOutgoing
from ackbone.engine.decoder import decoder
from ackbone.engine.sender import Sender, SendPolicy

BAD: list[dict[str, Any]] = [
    {"type": ""},
    {"type": 5},
    {"type": None},
    {"type": "a\nb"},
    {"type": "x" * 256},
    {"type": "\ud800"},
    {"queue": "no/such name"},
    {"queue": ""},
    {"queue": 7},
    {"queue": 7},
    {"queue": []},
    {"id": ""},
    {"id": 7},
    {"id": "x" * 256},
    {"id": "\ud800"},
    {"tenant_id": "../etc"},
    {"tenant_id": 7},
    {"tenant_id": "x" * 65},
    {"priority": 4},
    {"priority": -1},
    {"priority": True},
    {"priority": "high"},
    {"priority": []},
    {"priority": 1.5},
    {"idempotency_key": ""},
    {"idempotency_key": 5},
    {"ordering_key": b"bytes"},
    {"correlation_id": "a\0b"},
    {"source": "a\nb"},
    {"source": 5},
    {"channel": 5},
    {"channel": "\ud800"},
    {"trace": 5},
    {"trace": "a\nb"},
    {"created_at": "now"},
    {"created_at": 5},
    {"expires_at": "later"},
    {"expires_at": 5.0},
    {"headers": {"a\nb": "x"}},
    {"headers": {"": "x"}},
    {"headers": {"ä": "x"}},
    {"headers": {"a": "x\r\ny"}},
    {"headers": {"a": "\ud800"}},
    {"headers": {"a": 5}},
    {"headers": {5: "a"}},
    {"headers": "text"},
    {"headers": ["a"]},
    {"metadata": "text"},
    {"metadata": ["a"]},
    {"metadata": {"a": object()}},
    {"metadata": {"a": float("nan")}},
    {"metadata": {"ordering_key": "hidden"}},
    {"extra": 5},
    {"extra": {"payload": "shadowed"}},
    {"delay_s": -1},
    {"delay_s": "soon"},
    {"delay_s": float("nan")},
    {"delay_s": float("inf")},
    {"delay_s": 1e300},
    {"ttl_s": 0},
    {"ttl_s": -5},
    {"ttl_s": float("nan")},
    {"ttl_s": float("inf")},
    {"ttl_s": 1e300},
    {"ttl_s": "long"},
    {"payload": float("nan")},
    {"payload": "\ud800"},
    {"payload": object()},
    {"payload": b"bytes"},
    {"no_such_option": 1},
]


@pytest.fixture
def app(home: Path) -> App:
    return App(Config(home=home))


async def send(app: App, **options: Any) -> Any:
    options = {"type": "n", "payload": 1, **options}
    return await app.send(options.pop("type"), options.pop("payload"), **options)


@pytest.mark.parametrize("bad", BAD, ids="".join)
def test_it_is_refused_with_a_reason(app: App, bad: dict[str, Any]) -> None:
    options = {"type": "n", "payload": 1, **bad}
    with pytest.raises(InvalidMessage) as caught:
        app.outgoing(options.pop("type"), options.pop("payload"), **options)
    assert str(caught.value)


@pytest.mark.parametrize("bad", BAD, ids="".join)
def test_it_is_refused_on_a_queue_that_is_known(app: App, bad: dict[str, Any]) -> None:
    """There a message of type and payload takes a shorter way."""
    app.outgoing("n", 1)
    options = {"type": "n", "payload": 1, **bad}
    type, payload = options.pop("type"), options.pop("payload")
    with pytest.raises(InvalidMessage) as later:
        app.outgoing(type, payload, **options)
    with pytest.raises(InvalidMessage) as first:
        App(app.config).outgoing(type, payload, **options)
    assert str(later.value) == str(first.value)


async def test_nothing_of_it_was_accepted_and_neighbours_were(app: App) -> None:
    """All at once, in the same flush: each bad one fails alone."""
    async with app:
        sends = [send(app, **bad) for bad in BAD]
        good = [send(app, id=f"good-{n}") for n in range(20)]
        results = await asyncio.gather(*sends, *good, return_exceptions=True)
        wrong = [
            (bad, result)
            for bad, result in zip(BAD, results, strict=False)
            if not isinstance(result, InvalidMessage)
        ]
        assert wrong == []
        accepted = [getattr(result, "id", result) for result in results[len(BAD) :]]
        assert accepted == [f"good-{n}" for n in range(20)]
        stats = await app.broker.stats()  # type: ignore[attr-defined]
        assert [(s.queue, s.ready) for s in stats] == [("default", 20)]


async def test_over_long_bodies(home: Path) -> None:
    app = App(Config(home=home, max_message_bytes=2000))
    async with app:
        await app.send("n", "x" * 1000)
        with pytest.raises(MessageTooLarge, match="2000"):
            await app.send("n", "x" * 2000)
        with pytest.raises(MessageTooLarge, match="2000"):
            await app.send("n", "x" * 2000, priority=2)


async def test_no_answer_in_time_means_unknown_not_failed(home: Path) -> None:
    """Another process holds the file's write lock: the message waits, its sender does not."""
    async with App(Config(home=home, send_timeout_s=0.05)) as hasty:
        hasty.broker.publish_within_s = None  # type: ignore[attr-defined] # a broker that waits
        with (home / "ackbone.db.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sends = [hasty.send("n", n) for n in range(3)]
            answers = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(answer) for answer in answers] == [PublishUnknown] * 3
    async with App(Config(home=home)) as app:
        stats = await app.broker.stats()  # type: ignore[attr-defined]
        assert [s.ready for s in stats] == [3], "what was asked for was done all the same"


async def test_a_file_that_another_process_holds_refuses_in_time(home: Path) -> None:
    """The messages are withdrawn, so their sender knows that nothing was written."""
    async with App(Config(home=home, send_timeout_s=3.0)) as app:
        with (home / "ackbone.db.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sends = [app.send("n", n) for n in range(3)]
            answers = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 3
        assert "Nothing was written" in str(answers[0])
        await app.send("n", "later")
        stats = await app.broker.stats()  # type: ignore[attr-defined]
        assert [s.ready for s in stats] == [1]


async def test_many_are_refused_before_any_is_accepted(app: App) -> None:
    async with app:
        with pytest.raises(InvalidMessage):
            await app.send_many([Message(type="n"), Message(type="n", payload=object())])
        assert list(await app.broker.stats()) == []  # type: ignore[attr-defined]


def no_broker(queue: str) -> Broker:
    raise AssertionError("nothing is published here")


class Picky:
    """A broker that refuses what is named `bad`, and knows what it was asked to publish."""

    capabilities = Capabilities(durability=Durability.PROCESS)

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> list[Result]:
        self.asked += [out.id for out in batch]
        return [
            Result(id=o.id, error=BrokerError(f"no {o.id}") if o.id.startswith("bad") else None)
            for o in batch
        ]


async def test_of_many_all_are_tried_and_the_first_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ackbone.engine.sender.BATCH", 2)
    broker = Picky()
    sender = Sender(
        lambda queue: SendPolicy(),
        lambda queue: broker,  # type: ignore[arg-type, return-value]
        max_bytes=1000,
        timeout_s=30,
    )
    names = ["a", "bad-1", "b", "bad-2", "c"]
    sends = [sender.encoded(Message(type="n", id=name), "q") for name in names]
    with pytest.raises(BrokerError, match="no bad-1"):
        await sender.publish_many(sends)
    assert broker.asked == names
    good = [sender.encoded(Message(type="n", id=name), "q") for name in ("d", "e", "f")]
    receipts = await sender.publish_many(good)
    assert [(r.id, r.durability) for r in receipts] == [(n, "process") for n in ("d", "e", "f")]
    await sender.drain()


@pytest.mark.parametrize("payload", [None, {}, {"a": [1, {"b": None}]}, {"ä": "漢"}])
def test_a_new_task_is_written_as_a_message_of_the_same_would_be(payload: Any) -> None:
    sender = Sender(lambda _: SendPolicy(codec="task"), no_broker, max_bytes=10_000, timeout_s=30)
    sender.outgoing("n", payload, "q", {})  # the first look at a queue's policy
    out = sender.outgoing("n", payload, "q", {}).outgoing
    assert isinstance(out, FlatOutgoing)
    written = dict(out.fields)
    assert msgspec.json.decode(out.body) == written
    made = datetime.fromisoformat(written["created_at"])
    message = Message(type="n", payload=payload, id=out.id, created_at=made)
    assert sender.encoded(message, "q").outgoing == out
    for wrong in ([1], "text", 5, {"a": float("nan")}, {"a": object()}):
        with pytest.raises(InvalidMessage):
            sender.outgoing("n", wrong, "q", {})


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    st.datetimes(timezones=st.just(UTC) | st.none()),
    st.just(datetime.max.replace(tzinfo=UTC)),
    st.just(datetime.min.replace(tzinfo=UTC)),
)
OPTIONS = (
    "id", "tenant_id", "source", "channel", "priority", "correlation_id", "trace",
    "idempotency_key", "ordering_key", "created_at", "expires_at", "headers", "metadata", "extra",
    "delay_s", "ttl_s", "queue",
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(anything)
def test_a_known_queue_changes_nothing_but_the_way(app: App, payload: Any) -> None:
    """The first message of a queue and the ones after it are written alike."""
    made: list[Any] = []
    for known in (False, True):
        here = app if known else App(app.config)
        if known:
            here.outgoing("n", 1)
        try:
            sent = here.outgoing("n", payload)
        except InvalidMessage as error:
            made.append(str(error))
            continue
        fields = msgspec.json.decode(sent.outgoing.body)
        assert fields["message_id"] == sent.outgoing.id
        assert datetime.fromisoformat(fields["timestamp"]).tzinfo is not None
        fields["message_id"] = fields["timestamp"] = "left out"
        rest = msgspec.structs.replace(sent.outgoing, id="left out", body=b"")
        made.append((sent.queue, sent.tenant_id, rest, list(fields.items())))
    assert made[0] == made[1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(OPTIONS), anything, max_size=4), anything)
def test_what_is_accepted_can_be_read_back(app: App, options: dict[str, Any], payload: Any) -> None:
    """Whatever is given: an InvalidMessage, or a message that decodes to what was meant."""
    try:
        sent = app.outgoing("n", payload, **options)
    except InvalidMessage:
        return
    sub = Subscription(name=sent.queue, queue=sent.queue, codec="standard")
    delivery = Delivery(
        body=sent.outgoing.body, headers=sent.outgoing.headers, tag=None, identity="x"
    )
    candidate = decoder(sub)(delivery)
    assert candidate.error is None, candidate.error
    message = candidate.message
    assert message is not None
    assert message.id == sent.outgoing.id
    assert message.payload == msgspec.json.decode(msgspec.json.encode(payload))
    assert message.tenant_id == sent.tenant_id
    for name in ("source", "channel", "trace", "idempotency_key", "ordering_key"):
        if options.get(name) not in (None, ""):
            assert getattr(message, name) == options[name], name
    assert 0 <= sent.outgoing.delay_s < 1e10
    CODECS["standard"].encode(message)
