"""Conditions on payloads: what they mean, what they refuse, and that nothing is ever evaluated."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.governance.expression import DEEPEST, ExpressionError, parse

PAYLOAD = {
    "amount": 1500,
    "rate": 0.5,
    "currency": "EUR",
    "urgent": True,
    "note": None,
    "tags": ["a", "b", 3],
    "order": {"items": [{"price": 7}, {"price": 9}], "odd key": 1, "it's": 2},
    "order-id": "x",
    "payload": {"inner": 1},
    "und": "täglich",
}


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("amount > 1000", True),
        ("amount >= 1500 and amount <= 1500", True),
        ("amount < 1500", False),
        ("rate == 0.5", True),
        ("amount == 1500.0", True),
        ("amount == 1.5e3", True),
        ('currency == "EUR"', True),
        ("currency != 'EUR'", False),
        ("urgent == true", True),
        ("urgent == 1", False),
        ("amount == '1500'", False),
        ("note == null", True),
        ("currency in ['EUR', 'USD']", True),
        ("currency not in ['EUR', 'USD']", False),
        ("'b' in tags", True),
        ("4 in tags", False),
        ("amount in []", False),
        ("exists(note)", True),
        ("exists(nothing)", False),
        ("not exists(nothing)", True),
        ("order.items[1].price == 9", True),
        ("order.items[-1].price == 9", True),
        ('order["odd key"] == 1', True),
        ('order["it\'s"] == 2', True),
        ("order-id == 'x'", True),
        ("$.payload.inner == 1", True),
        ("und == 'täglich'", True),
        ("amount > rate", True),
        ("NOT (urgent == true OR amount > 1) AND true == true", False),
        ("not not urgent == true", True),
        # and binds before or
        ("1 == 1 or 1 == 2 and 1 == 3", True),
        # unknown: what is not there, and what has no order
        ("nothing > 1", None),
        ("nothing == null", None),
        ("nothing != 5", None),
        ("amount > 'a'", None),
        ("currency > 5", None),
        ("urgent > 0", None),
        ("amount in currency", None),
        ("order.items[7].price == 1", None),
        ("amount.inner == 1", None),
        ("not nothing == 1", None),
        ("nothing == 1 and urgent == true", None),
        ("nothing == 1 and urgent == false", False),
        ("nothing == 1 or urgent == true", True),
        ("nothing == 1 or urgent == false", None),
        ("exists(nothing) and nothing > 5", False),
    ],
)
def test_what_a_condition_means(text: str, truth: bool | None) -> None:
    assert parse(text).holds(PAYLOAD) is truth


@pytest.mark.parametrize("payload", ["hello", 5, None, ["hello"], b"bytes", 1.5])
def test_a_payload_that_is_no_object(payload: Any) -> None:
    assert parse("text == 'hello'").holds(payload) is None
    assert parse("$ == 'hello'").holds(payload) is (payload == "hello")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("amount = 5", "column 8: '=' means nothing here; to compare, write '=='"),
        ("a == 1 && b == 2", "write 'and'"),
        ("a == 1 || b == 2", "write 'or'"),
        ("!a", "write 'not'"),
        ("urgent", "for example urgent == true"),
        ("5", "expected a comparison"),
        ("", "expected a field or a value, found the end"),
        ("a ==", "found the end"),
        ("a == 1 b", "expected 'and', 'or' or the end"),
        ("(a == 1", "expected ')'"),
        ("a == 1)", "expected 'and', 'or' or the end"),
        ("a in [b]", "a list contains numbers"),
        ("a in [1, [2]]", "a list contains numbers"),
        ("a == 'x", "no closing quote"),
        ("a[x] == 1", "a number or a text in quotes"),
        ("exists a", "expected '('"),
        ("exists(1)", "expected a field"),
        ("payload.amount > 1", "paths begin inside the payload"),
        ("a == 5x", "means nothing here"),
        ("__import__('os').system('true') == 0", "expected a comparison"),
        ("(" * (DEEPEST + 1) + "a == 1" + ")" * (DEEPEST + 1), "nested deeper"),
        ("a == 1 or " * 500 + "a == 1", "longer than"),
        ("a == " + "9" * 500, "very many digits"),
        ("a == \0", "means nothing here"),
    ],
)
def test_what_is_no_condition(text: str, says: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert says in str(caught.value)


@given(st.text(alphabet="ab1 .'\"()[]<>=!$,\\-notrinexs\n\t€", max_size=60))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except ExpressionError:
        return
    assert found.holds({"a": 1, "b": ["x"]}) in (True, False, None)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)
_ATOMS = st.sampled_from(
    ["a == 1", "b > 0", "c in [1, 'x', null]", "exists(a)", "a.b != true", "a[0] <= 'm'"]
)
_CONDITIONS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        inner.map(lambda x: f"not ({x})"),
        st.tuples(inner, inner).map(lambda xy: f"({xy[0]}) and ({xy[1]})"),
        st.tuples(inner, inner).map(lambda xy: f"({xy[0]}) or ({xy[1]})"),
    ),
    max_leaves=5,
)


@given(_CONDITIONS, _JSON)
def test_every_condition_has_an_answer_for_every_payload(text: str, payload: Any) -> None:
    assert parse(text).holds(payload) in (True, False, None)


@given(_CONDITIONS, _CONDITIONS, _JSON)
def test_the_logic_is_kleenes(left: str, right: str, payload: Any) -> None:
    order = {False: 0, None: 1, True: 2}

    def truth(text: str) -> int:
        return order[parse(text).holds(payload)]

    a, b = truth(left), truth(right)
    assert truth(f"({left}) and ({right})") == min(a, b)
    assert truth(f"({left}) or ({right})") == max(a, b)
    assert truth(f"not ({left})") == 2 - a


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False), st.integers())
def test_numbers_compare_as_numbers(left: float, right: int) -> None:
    payload = {"l": left, "r": right}
    assert parse("l < r").holds(payload) is (left < right)
    assert parse("l == r").holds(payload) is (left == right)
    assert math.isfinite(left)
