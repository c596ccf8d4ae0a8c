"""Calls that every message makes: none with so many keywords that Python makes a dict of them."""

import dis
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from ackbone.brokers import sqlite as broker
from ackbone.core.codecs.standard import StandardCodec
from ackbone.engine.decoder import decoder
from ackbone.engine.executor import Executor
from ackbone.store import tasks


def slow_calls(code: CodeType) -> list[int | None]:
    """Lines of calls that hand over a dict (CALL_FUNCTION_EX), as more than 15 keywords do."""
    found = [
        each.positions.lineno
        for each in dis.get_instructions(code)
        if each.opname == "CALL_FUNCTION_EX" and each.positions is not None
    ]
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return found + [line for part in inner for line in slow_calls(part)]


@pytest.mark.parametrize(
    "hot",
    [
        broker._delivery,
        decoder,
        StandardCodec._typed,
        StandardCodec._read,
        tasks.new_run,
        Executor._run,
        Executor._finished,
    ],
)
def test_a_struct_is_made_without_a_dict(hot: Callable[..., Any]) -> None:
    assert slow_calls(hot.__code__) == [], "see 'Keywords' in docs/performance.md"


def test_the_check_finds_one() -> None:
    names = [f"a{n}" for n in range(16)]
    source = f"lambda made: made({', '.join(f'{name}=1' for name in names)})"
    assert slow_calls(eval(source).__code__) == [1]
    assert slow_calls(eval(source.replace(", a15=1", "")).__code__) == []
