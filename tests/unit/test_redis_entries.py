"""Stream entries as deliveries: whatever their fields hold."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.brokers.redis.entries import LEVELS, delivery_of, fields_of
from ackbone.core.broker import Delivery, Outgoing
from ackbone.core.clock import from_us
from ackbone.core.codecs.codec import CODECS, stored_form
from ackbone.core.codecs.values import iso, iso_us
from ackbone.core.store import Candidate
from ackbone.core.task_protocol import FLAT, FlatDelivery, FlatOutgoing
from ackbone.store.tasks import body_info

names = st.text(alphabet=st.characters(codec="utf-8"), max_size=8)
parts = names.map(str.encode) | st.binary(max_size=6)


def texts(fields: list[bytes]) -> dict[str, str] | None:
    try:
        return {n.decode(): v.decode() for n, v in zip(fields[::2], fields[1::2], strict=True)}
    except UnicodeDecodeError:
        return None


def fields_in(delivery: Delivery) -> Any:
    return delivery.fields if isinstance(delivery, FlatDelivery) else None


@given(st.lists(st.tuples(parts, parts), min_size=1, max_size=6))
def test_a_strangers_entry_is_a_set_of_fields_and_a_body_of_the_same(pairs: list[Any]):
    fields = [part for pair in pairs for part in pair]
    found = delivery_of("q", 1, b"5-1", fields, 1)
    if b"ab" in fields[::2]:
        return
    assert found.headers == {FLAT: "1"}
    assert fields_in(found) == texts(fields)
    body = msgspec.json.decode(found.body)
    if fields_in(found) is not None:
        assert body == fields_in(found)
    else:  # not all of it is text: kept in a form that no field of ours has
        assert len(body) <= len(pairs)


def test_a_value_that_looks_like_our_mark_makes_no_entry_ours():
    fields = [b"task_id", b"ab", b"ab", b"2", b"body", b"x"]
    found = delivery_of("q", 1, b"5-1", fields, 1)
    assert fields_in(found) == {"task_id": "ab", "ab": "2", "body": "x"}
    ours = delivery_of("q", 1, b"5-1", [b"id", b"m-1", b"body", b"x", b"ab", b"1"], 1)
    assert (ours.identity, ours.body, fields_in(ours)) == ("m-1", b"x", None)


@pytest.mark.parametrize("fields", [[b"page", b"/"], [b"ab", b"1", b"body", b"x"]])
def test_entries_of_two_priorities_are_two_messages_whatever_their_ids_are(fields: list[bytes]):
    found = {delivery_of("q", level, b"5-1", fields, 1).identity for level in LEVELS}
    assert len(found) == len(LEVELS)


def test_fields_that_hold_a_nul_stay_apart():
    fields = [b"a\0b", b"\0", b"c", b"\xff"]
    assert fields_in(delivery_of("q", 1, b"5-1", fields[:2], 1)) == {"a\0b": "\0"}
    assert fields_in(delivery_of("q", 1, b"5-1", fields, 1)) is None
    assert fields_in(delivery_of("q", 1, b"5-1", None, 1)) == {}


@given(st.dictionaries(names, names, min_size=1, max_size=4))
def test_fields_at_hand_are_written_as_the_body_would_be(found: dict[str, str]):
    body = msgspec.json.encode(found)
    known = FlatOutgoing(id="m-1", body=body, headers={FLAT: "1"}, fields=found)
    assert fields_of(known) == fields_of(Outgoing(id="m-1", body=body, headers={FLAT: "1"}))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_the_stored_form_of_an_entry_is_what_stored_form_writes(codec: str):
    delivery = delivery_of("q", 2, b"1712345678123-7", [b"a", b"1"], 1)
    copy = {"sent_at_us": 1712345678123000, "priority": 2, "key": None}
    candidate = Candidate(delivery=delivery, message=None, codec=codec)
    assert body_info(candidate) == stored_form(CODECS[codec], delivery.headers, copy)
    keyed = msgspec.structs.replace(delivery, key='a "key"')
    found = msgspec.json.decode(body_info(Candidate(delivery=keyed, message=None, codec=codec)))
    assert found["copy"]["key"] == 'a "key"'


@given(st.integers(0, 4_102_444_800_000_000))
def test_microseconds_are_written_as_their_moment_is(us: int):
    assert iso_us(us) == iso(from_us(us))
