"""Log lines: what they carry, and what they never carry."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ackbone.core import secret as secret_module
from ackbone.core.message import Message, current_message
from ackbone.core.secret import Secret, is_secret_name, mask_line
from ackbone.observe import logs
from ackbone.observe.logs import make_handler
from ackbone.observe.redact import redact_value

FORMS: list[logs.Form] = ["json", "text"]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secrets of one test are not those of the next."""
    monkeypatch.setattr(secret_module, "_known", set())


class Lines:
    """A logger of its own that writes to memory."""

    def __init__(self, form: logs.Form) -> None:
        self.stream = io.StringIO()
        self.log = logging.Logger("ackbone.test", logging.DEBUG)  # noqa: LOG001 - of its own
        self.log.addHandler(make_handler(self.stream, form))

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def last(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text.splitlines()[-1])
        return found


@contextmanager
def working_for(message: Message) -> Iterator[None]:
    token = current_message.set(message)
    try:
        yield
    finally:
        current_message.reset(token)


# ── what a line carries ──────────────────────────────────────────────────────────────────────────


def test_a_json_line_is_one_object_with_time_level_logger_and_process():
    lines = Lines("json")
    lines.log.info("finished %d messages", 3, extra={"queue": "orders"})
    line = lines.last()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "ackbone.test",
        "message": "finished 3 messages",
        "pid": os.getpid(),
        "queue": "orders",
    }


def test_a_text_line_is_short():
    lines = Lines("text")
    lines.log.warning("slow", extra={"queue": "orders"})
    assert re.fullmatch(
        rf"\d\d:\d\d:\d\d\.\d{{3}} warn  test: slow pid={os.getpid()} queue=orders\n", lines.text
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_line_of_a_run_has_its_trace_and_its_worker(form, monkeypatch):
    monkeypatch.setattr(logs, "_worker", lambda: 7)
    lines = Lines(form)
    message = Message(type="t", trace="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01")
    with working_for(message):
        lines.log.info("a handler says something")
    assert "ab" * 16 in lines.text
    assert ('"worker_id":7' if form == "json" else "worker=7") in lines.text
    lines.log.info("nobody's", extra={"trace_id": "given"})
    assert "given" in lines.text.splitlines()[-1]


def test_extras_of_any_kind_are_shown():
    lines = Lines("json")
    lines.log.info("x", extra={"error": ValueError("bad"), "raw": b"\xff", "nan": float("nan")})
    assert lines.last()["error"] == "bad"
    assert lines.last()["raw"] == "\\xff"
    assert lines.last()["nan"] is None


def test_an_exception_is_in_the_line():
    for form in FORMS:
        lines = Lines(form)
        try:
            raise RuntimeError("it broke")
        except RuntimeError:
            lines.log.exception("oh")
        assert "RuntimeError: it broke" in lines.text
        assert "Traceback" in lines.text
    assert all(line.startswith("    ") for line in lines.text.splitlines()[1:])


# ── what it cannot do ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", FORMS)
@given(text=st.text(max_size=60))
@example(text="\x7f\x85\x9b2J\u202e\u2066")
def test_no_text_makes_a_second_line_or_moves_the_cursor(form, text):
    lines = Lines(form)
    lines.log.info("%s", text, extra={"more": text})
    assert lines.text.endswith("\n")
    shown = lines.text[:-1]
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", shown)
    shown.encode()


def test_a_forged_line_in_an_exception_is_indented():
    lines = Lines("text")
    try:
        raise RuntimeError("x\n12:00:00.000 info  test: all is well\x1b[2J")
    except RuntimeError:
        lines.log.exception("oh")
    assert "\x1b" not in lines.text
    assert [line for line in lines.text.splitlines() if not line.startswith("    ")] == [
        lines.text.splitlines()[0]
    ]


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────

canaries = st.text(
    st.sampled_from("abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ0123456789_-.~+"),
    min_size=12,
    max_size=40,
).map(lambda text: f"cn{text}")
secret_names = st.sampled_from(
    [
        "password", "PASSWORD", "db_password", "token", "accessToken", "api_key", "X-Api-Key",
        "apikey", "secret", "client_secret", "Authorization", "cookie", "sasl_password", "pwd",
        "private_key", "credentials", "passphrase",
    ]
)  # fmt: skip
harmless = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8))


def values_with(canary: str) -> st.SearchStrategy[Any]:
    """Nested values in which the canary stands under names that say secret, or in known forms."""
    leaf = st.one_of(
        harmless,
        secret_names.map(lambda name: {name: canary}),
        secret_names.map(lambda name: {name: [canary, canary]}),
        secret_names.map(lambda name: {name: {"inner": canary}}),
        st.just(f"https://user:{canary}@example.com/path"),
        st.just(f"postgres://{canary}@db"),
        st.just(f"Bearer {canary}"),
        secret_names.map(lambda name: f"{name}={canary} and more"),
        secret_names.map(lambda name: json.dumps({name: canary})),
        secret_names.map(lambda name: json.dumps(json.dumps({name: canary}))),
        secret_names.map(lambda name: repr({name: canary})),
        st.just(f"see https://api.example.com/?api_key={canary}&x=1"),
        st.just(RuntimeError(f"refused: password={canary}")),
        st.just(f"password={canary}".encode()),
        st.just(Secret(canary)),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.text(max_size=6), inner, max_size=3),
        ),
        max_leaves=6,
    )


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data(), canary=canaries)
def test_a_planted_secret_never_appears(form, data, canary):
    lines = Lines(form)
    value = data.draw(values_with(canary))
    name = data.draw(st.one_of(secret_names, st.sampled_from(["detail", "args_seen"])))
    extra = {name.replace("-", "_"): value}
    level = data.draw(st.sampled_from([logging.DEBUG, logging.INFO, logging.ERROR]))
    lines.log.log(level, "one %s", value, extra=extra)
    lines.log.log(level, value)
    lines.log.log(level, "%(detail)s", {"detail": value, "password": canary})
    lines.log.log(level, "%d is not a number", value)
    try:
        try:
            raise KeyError(value)
        except KeyError as error:
            raise RuntimeError(f"token: {canary}") from error
    except RuntimeError:
        lines.log.exception("failed")
    if isinstance(value, bytes | str | dict | list):
        try:
            raise ValueError(value)
        except ValueError as error:
            lines.log.error("again: %s", error, exc_info=error, stack_info=True)
    # A KeyError shows its argument in Python's own spelling.
    assert canary not in lines.text


@pytest.mark.parametrize("form", FORMS)
@given(secret=st.text(min_size=6, max_size=30), where=st.integers(0, 4))
def test_a_secret_that_the_process_knows_never_appears_in_any_spelling(form, secret, where):
    Secret(secret)
    lines = Lines(form)
    text = f"<{secret}>"
    thing = [text, [text], {"a": text}, RuntimeError(text), text.encode("utf-8", "replace")][where]
    lines.log.info("%s", thing, extra={"seen": thing})
    lines.log.info("%r", thing)
    try:
        raise RuntimeError(thing)
    except RuntimeError:
        lines.log.exception("x")
    for spelling in {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]}:
        assert f"<{spelling}>" not in lines.text


def test_what_is_no_secret_stays():
    assert redact_value({"tokens": 120, "idempotency_key": "k-1", "key_file": "/x"}) == {
        "tokens": 120,
        "idempotency_key": "k-1",
        "key_file": "/x",
    }
    line = "message 01a: attempt 2 of 4 failed: KeyError: 'name'; again in 1.0 s, tokens=12"
    assert mask_line(line) == line
    assert not is_secret_name("routing_key")
    assert is_secret_name("secret_key")


def test_a_value_that_cannot_be_shown_is_no_reason_to_fail():
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("password=hunter2hunter2")

    for form in FORMS:
        lines = Lines(form)
        lines.log.info("%s", Broken())
        lines.log.info("fine", extra={"thing": Broken()})
        assert "hunter2" not in lines.text
        assert len(lines.text.splitlines()) == 2


def test_handlers_that_come_later_see_the_masked_record():
    lines = Lines("json")
    other = io.StringIO()
    lines.log.addHandler(logging.StreamHandler(other))
    try:
        raise RuntimeError("password=hunter2hunter2")
    except RuntimeError:
        lines.log.exception("token=%s", "abcdefabcdef")
    assert "hunter2" not in other.getvalue()
    assert "abcdef" not in other.getvalue()
    assert "RuntimeError" in other.getvalue()


# ── the process ──────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import logging, sys, threading, warnings
from ackbone.observe.logs import configure_logs
configure_logs(level="warning")
configure_logs(level={level!r}, format={form!r})
logging.getLogger("ackbone.x").info("hello")
logging.getLogger("ackbone.x").debug("detail")
warnings.warn("careful: password=hunter2hunter2")
def fail(): raise RuntimeError("in a thread: password=hunter2hunter2")
t = threading.Thread(target=fail, name="t1"); t.start(); t.join()
raise RuntimeError("at the end: password=hunter2hunter2")
"""


@pytest.mark.parametrize(("level", "form"), [("debug", "auto"), ("info", "text"), (None, "json")])
def test_a_process_logs_each_line_once_and_masks_what_nobody_caught(level, form):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(level=level, form=form)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    text = done.stderr
    assert "hunter2" not in text
    assert text.count("hello") == 1
    assert text.count("detail") == (1 if level == "debug" else 0)
    for part in ("careful", "in a thread", "at the end", "uncaught exception in thread t1"):
        assert part in text
    if form != "text":  # a pipe is no terminal
        assert all(json.loads(line) for line in text.splitlines())


def test_uncaught_errors_in_threads_leave_the_hook_of_this_process_alone():
    assert threading.excepthook is not logs._uncaught_in_thread
