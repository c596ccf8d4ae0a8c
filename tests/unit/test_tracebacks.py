"""What is kept of a failed attempt's traceback: the user's frames, bounded."""

import asyncio
import json
import logging
import sys

import pytest

from ackbone.core.codecs.values import dumps
from ackbone.core.origin import is_ours, is_users
from ackbone.core.retry import describe
from ackbone.core.secret import Secret
from ackbone.engine.child_protocol import error_of, fault_of
from ackbone.engine.tracebacks import LONGEST, bounded, user_line, user_trace, warn
from ackbone.observe.redact import redact


def caught(call) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def in_users_code() -> None:
    raise KeyError("b")


def below_a_library() -> None:
    json.loads("{")


def below_ackbone() -> None:
    dumps(object())


def from_another() -> None:
    try:
        in_users_code()
    except KeyError as error:
        raise ValueError("outer") from error


def test_whose_file_it_is() -> None:
    assert is_users(__file__)
    for file in (json.__file__, pytest.__file__, asyncio.__file__, "<frozen importlib._bootstrap>"):
        assert not is_users(file), file
        assert not is_ours(file), file
    ours = sys.modules["ackbone.engine.tracebacks"].__file__
    assert ours is not None
    assert is_ours(ours)
    assert not is_users(ours)


def test_the_users_frames_are_shown_and_ours_are_not() -> None:
    trace = user_trace(caught(below_ackbone))
    assert "in below_ackbone" in trace
    assert "values.py" not in trace
    assert trace.splitlines()[-1].startswith("ackbone.core.errors.InvalidMessage: the value")


def test_of_a_library_only_the_frame_that_raised_is_shown() -> None:
    trace = user_trace(caught(below_a_library))
    assert "in below_a_library" in trace
    assert trace.count("json") > 0
    assert "in raw_decode" in trace
    assert "in loads" not in trace


def test_causes_are_shown_too() -> None:
    trace = user_trace(caught(from_another))
    assert trace.index("KeyError: 'b'") < trace.index("direct cause") < trace.index("ValueError")


def test_without_a_frame_of_the_user_the_others_are_shown() -> None:
    trace = user_trace(_from_stdlib())
    assert "in loads" in trace


def _from_stdlib() -> BaseException:
    error = caught(below_a_library)
    while error.__traceback__ is not None and is_users(
        error.__traceback__.tb_frame.f_code.co_filename
    ):
        error.__traceback__ = error.__traceback__.tb_next
    return error


def test_it_is_bounded_and_keeps_both_ends() -> None:
    trace = bounded(user_trace(caught(lambda: dumps({"x" * 100: ValueError}))))
    assert len(trace) <= LONGEST

    def endless() -> None:
        raise ValueError("x" * 100_000 + " the end")

    trace = bounded(user_trace(caught(endless)))
    assert len(trace) == LONGEST
    assert trace.startswith("Traceback")
    assert trace.endswith("the end")


def test_no_cut_goes_through_a_secret() -> None:
    secret = "c4nary-" + "s3cret" * 20
    Secret(secret)

    def leaks(before: int) -> None:
        raise ValueError("x" * before + secret + "y" * (LONGEST - LONGEST // 4 - 10))

    for before in range(0, 1100, 40):
        error = caught(lambda before=before: leaks(before))
        for each in (error, error_of(fault_of(error))):
            assert "s3cret" not in bounded(redact(user_trace(each)))


def test_an_error_is_masked_before_it_is_cut() -> None:
    secret = "c4nary-" + "s3cret" * 20
    Secret(secret)
    assert "s3cret" not in describe(ValueError("x" * 1950 + secret), redact)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_be_shown_is_still_named() -> None:
    def mute() -> None:
        raise Mute

    assert "Mute" in user_trace(caught(mute))


def test_the_traceback_of_a_child_process_is_the_childs() -> None:
    there = caught(in_users_code)
    here = error_of(fault_of(there))
    assert user_trace(here) == user_trace(there)


def test_where_the_users_code_is() -> None:
    def line() -> str:
        return dumps_frame(sys._getframe())

    def dumps_frame(frame) -> str:
        return user_line(frame)

    assert line().endswith("in line")
    assert user_line(None) == ""


def test_a_warning_carries_the_text_whatever_formats_it(caplog: pytest.LogCaptureFixture) -> None:
    warn(logging.getLogger("ackbone.engine"), "failed %s", "x", trace="Trace\n  line", trace_id="t")
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["trace_id"]) == ("failed x", "t")
    assert record.filename == "test_tracebacks.py"
    assert logging.Formatter().format(record) == "failed x\nTrace\n  line"
