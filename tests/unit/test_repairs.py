"""Repairs of dead letters touch the place that they name, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.admin.causes import by_cause, common
from ackbone.admin.dead_letters import Edits
from ackbone.admin.repairs import GONE, Change, repaired
from ackbone.core.errors import Conflict, InvalidMessage
from ackbone.core.message import Message

names = st.text("abc.\\ é", min_size=1, max_size=4)
values = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers())
objects = st.recursive(
    st.dictionaries(names, values, max_size=3),
    lambda inner: st.dictionaries(names, inner | values, max_size=3),
    max_leaves=8,
)


def written(path: list[str]) -> str:
    escaped = [part.replace("\\", "\\\\").replace(".", "\\.") for part in path]
    return ".".join(["payload", *escaped])


def at(value: Any, path: list[str]) -> Any:
    for part in path:
        value = value.get(part, GONE) if isinstance(value, dict) else GONE
    return value


def model(value: Any, path: list[str], put: Any) -> Any:
    """What a merge patch does to one place; None where the path leads through no object."""
    name, *rest = path
    if not isinstance(value, dict):
        return None
    if rest:
        if put is GONE and name not in value:
            return dict(value)
        inside = model(value.get(name, {}), rest, put)
        return None if inside is None else {**value, name: inside}
    if put is GONE:
        return {key: each for key, each in value.items() if key != name}
    return {**value, name: put}


@given(payload=objects, path=st.lists(names, min_size=1, max_size=3), put=values | st.just(GONE))
def test_a_change_is_a_merge_patch_of_one_place(payload: Any, path: list[str], put: Any) -> None:
    message = Message(type="t", payload=payload, headers={"x-a": "1"})
    change = Change(written(path), put)
    expected = model(payload, path, put)
    if expected is None:
        with pytest.raises(Conflict, match="only an object has fields"):
            repaired(message, [change])
        return
    mended = repaired(message, [change])
    assert mended.payload == expected
    assert at(mended.payload, path) == put or put is GONE
    assert repaired(mended, [change]) == mended, "twice is once"
    assert (mended.id, mended.type, mended.headers) == (message.id, "t", {"x-a": "1"})
    assert message.payload == payload, "the letter stays as it was"


def test_types_headers_and_keys() -> None:
    message = Message(type="t", payload=1, headers={"x.a": "1", "b": "2"})
    mended = repaired(
        message,
        [Change("type", "u"), Change("headers.x.a"), Change("headers.c", "3"),
         Change("idempotency_key", "k"), Change("payload", {"n": 1}), Change("payload.n", 2)],
    )  # fmt: skip
    assert mended.type == "u"
    assert mended.headers == {"b": "2", "c": "3"}
    assert mended.idempotency_key == "k"
    assert mended.payload == {"n": 2}
    assert repaired(message, [Change("payload")]).payload is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("", 1), ("id", "x"), ("payload.", 1), (".payload", 1), ("payload..a", 1), ("type", 3),
        ("type", ""), ("type.a", "x"), ("type", GONE), ("headers", {}), ("headers.", "x"),
        ("headers.a", 1), ("tenant_id", "x"), ("idempotency_key", GONE), ("payload.a\\", 1),
    ],
)  # fmt: skip
def test_what_names_no_place_is_refused_at_once(path: str, value: Any) -> None:
    with pytest.raises(InvalidMessage):
        Change(path, value)


def test_what_was_changed_is_told_by_its_paths() -> None:
    edits = Edits(
        payload={}, type="t", headers={"x-a": "1"},
        changes=(Change("payload.a", 1), Change("payload.b"), Change("payload.a", 2)),
    )  # fmt: skip
    assert edits.changed == ("payload", "type", "headers.x-a", "payload.a", "payload.b")
    assert edits.gives("payload")
    assert not edits.gives("payload.b")
    assert Edits(queue="elsewhere").changed == ()


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        (["ValueError: row 7 has no date", "ValueError: row 12 has no date"],
         "ValueError: row … has no date"),
        (["KeyError: 'a'", "KeyError: 'bb c'"], "KeyError: …"),
        (["no order 0199a1e1-ab12-7000-8000-0123456789ab", "no order 0199A1E1-ab12-7000-8000-0"
          "123456789ac"], "no order …"),
        (["at 0x7f01 after 1.25 s", "at 0x7f02 after 3 s"], "at … after … s"),
        (["bad digest 0123456789abcdef00", "bad digest a123456789abcdef0f"], "bad digest …"),
    ],
)  # fmt: skip
def test_errors_that_differ_in_a_value_have_one_cause(errors: list[str], cause: str) -> None:
    assert {common(error) for error in errors} == {cause}


def test_causes_of_nothing() -> None:
    assert by_cause([]) == []
    assert len(common("x" * 1000)) == 160
