"""Properties 1 to 4, 8 and 9: adapters, envelopes, parsers, contexts and routing."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from ackbone import (
    BinaryParser,
    JSONParser,
    MessageEnvelope,
    MockQueueAdapter,
    ParseError,
    RawMessage,
    TextParser,
)
from ackbone.brokers.memory import MemoryBroker
from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.broker import Inspectable, Outgoing
from ackbone.triggers.adapters import BrokerQueueAdapter
from tests.property.trigger_lab import (
    PATIENCE_S,
    World,
    any_text,
    fresh_folder,
    ids,
    json_values,
    message,
    moments,
    plain_headers,
    printable,
    queue_property,
    words,
)

METHODS = ("connect", "consume", "ack", "nack", "send_to_dlq", "close", "health_check")


@queue_property(
    1,
    "for any queue adapter, switching to another one changes no calling code, and all core methods"
    " (connect, consume, ack, nack, close) are available",
    batch=st.lists(st.tuples(words, json_values, words), max_size=6, unique_by=lambda m: m[0]),
    kind=st.sampled_from(["mock", "memory", "sqlite"]),
)
async def test_property_01_one_interface_for_all_adapters(
    batch: list[tuple[str, Any, str]], kind: str
) -> None:
    folder = fresh_folder()
    raws = [
        message(i, json.dumps(v).encode(), {"x-event-name": e, "x-message-id": i})
        for i, v, e in batch
    ]
    adapter: Any
    if kind == "mock":
        adapter = MockQueueAdapter()
        for raw in raws:
            adapter.enqueue(raw)
        broker = None
    else:
        broker = MemoryBroker() if kind == "memory" else SqliteBroker(folder / "t.db")
        await broker.open()
        outgoing = [Outgoing(id=r.message_id, body=r.body, headers=r.headers) for r in raws]
        if outgoing:
            await broker.publish("orders", outgoing)
        adapter = BrokerQueueAdapter(broker, "orders")
    assert all(callable(getattr(adapter, name)) for name in METHODS)

    world = World(adapter=adapter, folder=folder)
    async with world:
        assert await adapter.health_check()
        if batch:
            await world.ledger.records.wait(len(batch), timeout=PATIENCE_S)
        calls = {
            e.message_id: (e.event_name, e.context["message"])
            for e in world.runtime.get_triggered_events()
        }
        assert calls == {i: (e, v) for i, v, e in batch}
        assert len(world.runs()) == len(batch)
        await world.trigger.stop()
        assert not await adapter.health_check()
        if isinstance(broker, Inspectable):  # nothing came back to the queue
            await broker.open()
            assert all(queue.ready == 0 for queue in await broker.stats())
            await broker.close()


@queue_property(
    2,
    "for any raw queue message, its envelope has all required fields (message_id, payload, headers,"
    " received_at, source), mapped from the raw message",
    batch=st.lists(
        st.tuples(ids, st.binary(max_size=40), plain_headers, moments),
        max_size=6,
        unique_by=lambda m: m[0],
    ),
    dedup=st.none() | words,
    event=st.none() | words,
    tenant=st.none() | words,
)
async def test_property_02_complete_envelopes(
    batch: list[tuple[str, bytes, dict[str, str], Any]],
    dedup: str | None,
    event: str | None,
    tenant: str | None,
) -> None:
    world = World(parser_type="binary")
    raws = [message(i, body, headers, at=at) for i, body, headers, at in batch]
    world.put(*raws)
    async with world:
        await world.settled(len(raws))
    seen = {e.message_id: e.context for e in world.runtime.get_triggered_events()}
    assert len(world.runs()) == len(seen) == len(raws)
    for raw in raws:
        context = seen[raw.message_id]
        assert context["message"] == raw.body
        assert context["headers"] == raw.headers
        assert context["received_at"] == raw.timestamp.isoformat()
        assert context["source"] == "orders"
    named = {"X-Dedup-Key": dedup, "x-event-name": event, "x-tenant-id": tenant}
    said = {name: value for name, value in named.items() if value is not None}
    for raw in raws:
        headed = replace(raw, headers={**raw.headers, **said})
        assert MessageEnvelope.from_raw_message(headed, "orders") == MessageEnvelope(
            message_id=raw.message_id,
            payload=raw.body,
            headers=headed.headers,
            received_at=raw.timestamp,
            source="orders",
            dedup_key=dedup,
            event_name=event,
            tenant_id=tenant,
        )


values_of = {"json": json_values, "text": any_text, "binary": st.binary(max_size=40)}
PARSERS = {"json": JSONParser(), "text": TextParser(), "binary": BinaryParser()}


def encoded(kind: str, value: Any) -> bytes:
    if kind == "json":
        return json.dumps(value).encode()
    return value.encode() if kind == "text" else bytes(value)


@queue_property(
    3,
    "any valid JSON, text or binary message is parsed by the configured parser, and what it said is"
    " kept",
    typed=st.sampled_from(sorted(values_of)).flatmap(
        lambda kind: st.tuples(st.just(kind), st.lists(values_of[kind], max_size=6))
    ),
)
async def test_property_03_parsing(typed: tuple[str, list[Any]]) -> None:
    kind, values = typed
    world = World(parser_type=kind)
    world.put(*(message(f"m{n}", encoded(kind, v)) for n, v in enumerate(values)))
    async with world:
        await world.settled(len(values))
    parsed = {e.message_id: e.context["message"] for e in world.runtime.get_triggered_events()}
    assert parsed == {f"m{n}": value for n, value in enumerate(values)}
    assert world.adapter.get_dlq() == []
    for value in values:  # the parsers of the public interface read the same
        raw = message("m", encoded(kind, value))
        assert PARSERS[kind].parse(raw.body) == value
        assert MessageEnvelope.from_raw_message(raw, "orders", PARSERS[kind]).payload == value


def is_broken_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return True
    return False


broken_json = st.one_of(
    st.binary(max_size=20).filter(is_broken_json),
    st.sampled_from([b"", b"{", b"[1,", b"{'a': 1}", b"nul", b"\xff\xfe", b'{"a": NaN}']),
    st.integers(65, 300).map(lambda depth: b"[" * depth + b"]" * depth),
)


@queue_property(
    4,
    "any message that cannot be parsed is marked failed and goes to the dead-letter queue, with the"
    " reason",
    bodies=st.lists(st.tuples(st.booleans(), broken_json, json_values), max_size=8),
)
async def test_property_04_unparsable_messages(bodies: list[tuple[bool, bytes, Any]]) -> None:
    world = World()
    raws = [
        message(f"m{n}", broken if is_broken else json.dumps(value).encode())
        for n, (is_broken, broken, value) in enumerate(bodies)
    ]
    broken_ids = {f"m{n}" for n, (is_broken, *_) in enumerate(bodies) if is_broken}
    world.put(*raws)
    async with world:
        await world.settled(len(raws))
        letters = world.rows("SELECT message_id, reason, body FROM dead_letters")
        failed = world.rows("SELECT message_id FROM queue_executions WHERE status = 'failed'")
    dlq = world.adapter.get_dlq()
    assert {raw.message_id for raw, _ in dlq} == broken_ids
    assert len(dlq) == len(broken_ids)
    assert all(reason.startswith("Failed to parse JSON: ") for _, reason in dlq)
    assert {i: (reason, body) for i, reason, body in letters} == {
        raw.message_id: ("undecodable", raw.body) for raw in raws if raw.message_id in broken_ids
    }
    assert {i for (i,) in failed} == broken_ids
    good = {raw.message_id for raw in raws} - broken_ids
    assert sorted(world.runs()) == sorted(good) == sorted(world.adapter.get_acked())
    for raw, reason in dlq:  # the parser of the public interface refuses the same
        with pytest.raises(ParseError) as refused:
            MessageEnvelope.from_raw_message(raw, "orders", PARSERS["json"])
        assert str(refused.value) == reason


@queue_property(
    8,
    "for any valid envelope, agent_runtime.trigger_event() starts an agent run whose context has"
    " the whole message (message, headers, source, message_id, received_at)",
    queue=words,
    batch=st.lists(
        st.tuples(ids, json_values, plain_headers, moments), max_size=6, unique_by=lambda m: m[0]
    ),
    failures=st.integers(0, 1),
)
async def test_property_08_context(
    queue: str, batch: list[tuple[str, Any, dict[str, str], Any]], failures: int
) -> None:
    world = World(queue_name=queue, retry_backoff_base=0.001)
    for i, value, headers, at in batch:
        world.put(message(i, json.dumps(value).encode(), headers, at=at))
        world.runtime.fail(RuntimeError("again"), times=failures, message_id=i)
    async with world:
        await world.settled(len(batch))
    expected = {
        i: {
            "message": value,
            "headers": headers,
            "source": queue,
            "message_id": i,
            "received_at": at.isoformat(),
        }
        for i, value, headers, at in batch
    }
    events = world.runtime.get_triggered_events()
    assert len(events) == len(batch) * (failures + 1)
    for event in events:  # the same on each attempt, the ones from the store included
        assert event.context == expected[event.message_id]


@queue_property(
    9,
    "any message with an event name is routed to it by its header or the configuration, and focus"
    " is handed to the agent runtime",
    header=st.sampled_from(["x-event-name", "X-Event-Name", "x-kind", "Event"]),
    focus=st.none() | any_text,
    batch=st.lists(st.none() | printable, max_size=6),
)
async def test_property_09_routing(header: str, focus: str | None, batch: list[str | None]) -> None:
    world = World(event_name_header=header.lower(), focus=focus)
    raws: list[RawMessage] = [
        message(f"m{n}", headers={} if name is None else {header: name})
        for n, name in enumerate(batch)
    ]
    world.put(*raws)
    async with world:
        await world.settled(len(raws))
    events = world.runtime.get_triggered_events()
    assert {e.message_id: e.event_name for e in events} == {
        f"m{n}": name or "queue_message" for n, name in enumerate(batch)
    }
    assert all(e.focus == focus for e in events)
