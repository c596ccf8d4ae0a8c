"""Words between a worker and an isolated handler: everything comes out as it went in."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.core.errors import (
    AckboneError,
    EffectUnknown,
    FinalError,
    HandlerFailed,
    InvalidResult,
    LeaseLost,
    ParkMessage,
    RetryableError,
    StoreFull,
    StoreUnavailable,
    TemporaryError,
)
from ackbone.core.message import Message
from ackbone.core.outcome import Dead, Done, Park, Rejected, Retry
from ackbone.core.retry import RetryPolicy, decide, retry_after
from ackbone.core.store import Run, Token
from ackbone.engine.child_protocol import (
    error_of,
    fault_of,
    packed,
    read_from_child,
    read_to_child,
    result_of,
    returned,
    run_of,
    start,
)
from ackbone.engine.tracebacks import user_trace

text = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


async def over_the_wire(frame: Any, read: Any) -> Any:
    reader = asyncio.StreamReader()
    reader.feed_data(packed(frame))
    reader.feed_eof()
    return await read(reader)


@given(json_values | st.binary(), st.dictionaries(text, json_values, max_size=3))
def test_a_run(payload: Any, metadata: dict[str, Any]) -> None:
    run = Run(
        subscription="s",
        queue="q",
        message=Message(type="t", payload=payload, metadata=metadata, headers={"a": "b"}),
        token=Token(3, 4),
        attempt=2,
        crashes=1,
        claimed_at_us=5,
        created_at_us=4,
        history=({"attempt": 1, "error": "x"},),
        body=b"stays",
    )
    frame = asyncio.run(over_the_wire(start(run), read_to_child))
    got = run_of(frame)
    assert got.message == run.message
    assert (got.token, got.attempt, got.crashes) == (run.token, 2, 1)
    assert got.failures == run.failures


@given(json_values)
def test_a_result(value: Any) -> None:
    frame = asyncio.run(over_the_wire(returned(value), read_from_child))
    assert result_of(frame) == value


@pytest.mark.parametrize(
    "outcome",
    [
        Done({"a": [1]}),
        Retry(after_s=1.5, reason="r"),
        Dead(reason="d", error="e"),
        Park(kind="k", reason="r"),
        Rejected(reason="no", policies=("a", "b")),
    ],
)
def test_an_outcome(outcome: Any) -> None:
    assert result_of(returned(outcome)) == outcome


def test_a_result_that_json_cannot_carry() -> None:
    with pytest.raises(InvalidResult, match="returned a object"):
        returned(object())


def carried(error: BaseException) -> Exception:
    return error_of(fault_of(error))


class Mine(TemporaryError):
    """Known on both sides."""


class Demanding(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}/{self.detail}"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("v"),
        KeyError("k"),
        KeyError(),
        OSError(2, "No such file"),
        FileNotFoundError(2, "No such file", "/x"),
        ConnectionResetError("gone"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
        StopAsyncIteration(),
        FinalError("f"),
        StoreUnavailable("s"),
        StoreFull("full"),
        LeaseLost("l"),
        Mine("m"),
        Demanding(7, detail="d"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_known_error_keeps_its_class_and_its_words(error: Exception) -> None:
    got = carried(error)
    assert isinstance(got, type(error))
    assert type(got).__name__ == type(error).__name__
    assert str(got) == str(error)


def test_what_errors_of_ours_carry() -> None:
    assert retry_after(carried(RetryableError("x", retry_after_s=12.5))) == 12.5
    parked = carried(ParkMessage("ask", kind="waiting_approval"))
    assert isinstance(parked, ParkMessage)
    assert parked.kind == "waiting_approval"
    unknown = carried(EffectUnknown("charge"))
    assert isinstance(unknown, EffectUnknown)
    assert unknown.name == "charge"


def _local(*bases: type[Exception]) -> Exception:
    kind: type[Exception] = type("Elsewhere", bases, {"__module__": "not.imported.here"})
    return kind("said")


@pytest.mark.parametrize("base", [FinalError, TemporaryError, ValueError, OSError, HandlerFailed])
def test_an_unknown_error_is_one_of_its_nearest_known_base(base: type[Exception]) -> None:
    error = _local(base)
    got = carried(error)
    assert isinstance(got, base)
    assert type(got).__name__ == "Elsewhere"
    policy = RetryPolicy(retry_on=(OSError,), jitter=0.0)
    assert decide(policy, failures=1, error=got) == decide(policy, failures=1, error=error)


@pytest.mark.parametrize("base", [Exception, AckboneError])
def test_an_error_below_nothing_special_is_a_failure_by_its_name(base: type[Exception]) -> None:
    got = carried(_local(base))
    assert isinstance(got, HandlerFailed)
    assert (type(got).__name__, str(got)) == ("Elsewhere", "said")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error",
    [
        Silent(),
        ValueError(object()),
        ValueError("\ud800"),
        ValueError(2**200),
        ExceptionGroup("g", [ValueError("a"), OSError("b")]),
        TimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_it_is_it_arrives(error: Exception) -> None:
    got = carried(error)
    assert isinstance(got, Exception)
    assert type(got).__name__ == type(error).__name__
    assert type(error).__name__ in user_trace(got)
    repr(got)
