"""What people see when a handler fails, through the real commands."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ackbone.cli.root import cli
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer

APP = Path(__file__).with_name("failing_app.py")
TARGET = f"{APP}:app"
PRICE_LINE = APP.read_text().splitlines().index('    return order["price"]') + 1
LIMIT_S = 90
ACKBONE = [sys.executable, "-m", "ackbone"]
CANARY = "c4nary-s3cret-9f1b"


@pytest.fixture(autouse=True)
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No ackbone.yaml or .env of the developer's counts here."""
    (home / "cwd").mkdir()
    monkeypatch.chdir(home / "cwd")
    monkeypatch.delenv("ACKBONE_CONFIG", raising=False)
    return home / "cwd"


def command(*arguments: str) -> str:
    """What a command says, in this process."""
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """`run` as a process of its own."""
    arguments = ("run", TARGET, *arguments)
    done = subprocess.run(
        [*ACKBONE, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done


def send(type_: str, payload: Any = None) -> str:
    return command("send", "--type", type_, "--payload", json.dumps(payload)).strip()


def work(*options: str) -> list[dict[str, Any]]:
    """The log lines of a worker that ran until nothing was left."""
    done = run("--until-idle", *options)
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]


def about(lines: list[dict[str, Any]], message_id: str) -> list[dict[str, Any]]:
    return [line for line in lines if message_id in line["message"]]


class Running:
    """A command that goes on; its standard error is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=(stream, into), daemon=True)
            for stream, into in ((process.stderr, self.errors), (process.stdout, []))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, into: list[str]) -> None:
        for line in stream:
            into.append(line)

    @property
    def said(self) -> str:
        return "".join(self.errors)

    def until(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, (what, self.said)
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)
        self.close()

    def close(self) -> None:
        for thread in self._threads:  # at the end of its stream; a worker may outlive its parent
            thread.join(LIMIT_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def running(*arguments: str) -> Iterator[Running]:
    process = subprocess.Popen(
        [*ACKBONE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    found = Running(process)
    try:
        yield found
    finally:
        process.kill()
        process.wait()
        found.close()


# ── tracebacks ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("type_", ["order", "isolated"])
def test_a_failure_shows_the_users_lines_everywhere(type_: str) -> None:
    message_id = send(type_, {"id": 1})
    (failed,) = [line for line in about(work(), message_id) if "exception" in line]
    assert failed["level"] == "warning"
    assert f"attempt 1 of 1 of {type_} failed: KeyError: 'price'" in failed["message"]
    assert f"ackbone dlq show {message_id}" in failed["message"]
    place = f'File "{APP}", line {PRICE_LINE}, in price_of'
    shown = command("dlq", "show", message_id)
    traced = command("trace", message_id)
    for text in (failed["exception"], shown, traced):
        assert place in text
        assert 'return order["price"]' in text
        assert f"in {type_}" in text
        assert "ackbone/engine" not in text
    letter = json.loads(command("dlq", "show", message_id, "--json"))
    assert place in letter["history"][-1]["traceback"]


def test_a_plain_handler_shows_where_the_library_raised() -> None:
    message_id = send("threaded", {"text": "{"})
    (failed,) = [line for line in about(work(), message_id) if "exception" in line]
    assert "in threaded" in failed["exception"]
    assert "in raw_decode" in failed["exception"]
    assert "concurrent/futures" not in failed["exception"]


def test_a_password_in_an_error_is_masked() -> None:
    message_id = send("leaks")
    (failed,) = [line for line in about(work(), message_id) if "exception" in line]
    letter = json.loads(command("dlq", "show", message_id, "--json"))
    kept = letter["history"][-1]["traceback"]
    traced = command("trace", message_id, "--json")
    events = command("tail", "--no-follow", "-n", "100", "--json")
    for text in (json.dumps(failed), json.dumps(letter), traced, events):
        assert CANARY not in text
    assert "postgresql://***@db/shop is away" in kept


def test_a_retry_is_not_called_finished_and_leaves_no_error_on_success() -> None:
    message_id = send("second-time")
    lines = work("--log-level", "info")
    assert [line["message"] for line in lines if "finished" in line["message"]] == [
        "finished 1 message",
        "worker 1 stopped: 1 finished, 0 handed back",
        "finished 1, handed back 0",
    ]
    assert any("retry in 0.1 s" in line["message"] for line in about(lines, message_id))
    traced = command("trace", message_id)
    assert "status    succeeded" in traced
    assert 'result    {"attempts": 2}' in traced
    assert not re.search(r"^  error", traced, re.MULTILINE)
    found = json.loads(command("trace", message_id, "--json"))
    assert found["tasks"][0]["error"] is None
    assert found["tasks"][0]["result"] == {"attempts": 2}
    assert "TimeoutError" in found["tasks"][0]["history"][0]["traceback"]


def test_parking_is_a_warning_with_the_next_command() -> None:
    message_id = send("parks", {"n": 1})
    lines = work()
    (parked,) = about(lines, message_id)
    assert parked["level"] == "warning"
    assert parked["message"] == (
        f"message {message_id}: parked (workflow_pending): the shop is closed; "
        f"see: ackbone parked show {message_id}"
    )
    assert not any(line["message"].startswith("finished 1 message") for line in lines)
    assert 'payload   {"n": 1}' in command("trace", message_id)


def test_a_message_that_waits_for_an_approval_names_the_command_for_it(folder: Path) -> None:
    (folder / "ackbone.yaml").write_text("rules: rules.yaml\n")
    (folder / "rules.yaml").write_text(
        "rules:\n  - name: large\n    match: {type: struct}\n    then: approve\n"
    )
    message_id = send("struct")
    (parked,) = about(work(), message_id)
    assert parked["message"].endswith(f"see: ackbone approvals show {message_id}")
    assert message_id in command("approvals", "show", message_id)


def test_dev_shows_tracebacks_and_the_users_own_lines() -> None:
    with running("dev", TARGET) as dev:
        message_id = send("order", {"id": 7})
        dev.until(lambda: "KeyError: 'price'" in dev.said, "the failure is shown")
        dev.stop()
    lines = [json.loads(line) for line in dev.errors if line.startswith("{")]
    (own, failed) = lines  # and none of our own below warning
    assert (own["logger"], own["message"]) == ("shop.orders", "looking at {'id': 7}")
    assert message_id in failed["message"]
    assert f'File "{APP}", line {PRICE_LINE}, in price_of' in failed["exception"]


# ── a handler that blocks the loop ───────────────────────────────────────────────────────────────


def test_a_handler_that_blocks_the_loop_is_named_once() -> None:
    message_id = send("blocks", 2.5)
    short = send("blocks", 0.2)
    lines = work()
    (blocked,) = [line for line in lines if "blocked the event loop" in line["message"]]
    assert blocked["level"] == "warning"
    assert f"handler blocks (message {message_id})" in blocked["message"]
    assert re.search(r"for \d+\.\d s", blocked["message"])
    assert f'"{APP}"' in blocked["message"]
    assert short not in blocked["message"]


# ── outages ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.remove()


def test_an_outage_of_the_broker_is_told_when_it_begins_and_when_it_ends(
    folder: Path, redis: RedisServer
) -> None:
    (folder / "ackbone.yaml").write_text(
        f"broker: {redis.url}\nqueues:\n  default: {{codec: standard}}\n"
    )
    first = send("struct")
    with running("run", TARGET) as worker:
        worker.until(lambda: "finished 1 message" in worker.said, "it works")
        redis.kill()
        worker.until(lambda: "the broker is unavailable" in worker.said, "it begins")
        since = len(worker.errors)
        time.sleep(3)  # so that every loop has tried several times
        assert worker.errors[since:] == []
        redis.start()
        worker.until(lambda: "the broker is back" in worker.said, "it ends")
        send("struct")
        worker.until(lambda: worker.said.count("finished 1 message") == 2, "it works again")
        worker.stop()
    assert worker.said.count("the broker is unavailable") == 1
    assert worker.said.count("the broker is back") == 1
    assert first


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    yield server
    server.remove()


def test_an_outage_of_the_store_is_told_when_it_begins_and_when_it_ends(
    folder: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    (folder / "ackbone.yaml").write_text(
        f"broker: {redis.url}\nstore: {postgres.url(postgres.new_database())}\n"
        "queues:\n  default: {codec: standard}\n"
    )
    with running("run", TARGET) as worker:
        send("struct")
        worker.until(lambda: "finished 1 message" in worker.said, "it works")
        postgres.stop()
        worker.until(lambda: "the store is unavailable" in worker.said, "it begins")
        since = len(worker.errors)
        time.sleep(3)  # so that every loop has tried several times
        assert worker.errors[since:] == []
        postgres.start()
        worker.until(lambda: "the store is back" in worker.said, "it ends")
        send("struct")
        worker.until(lambda: worker.said.count("finished 1 message") == 2, "it works again")
        worker.stop()
    assert worker.said.count("the store is unavailable") == 1
    assert worker.said.count("the store is back") == 1


# ── a login that is refused ──────────────────────────────────────────────────────────────────────


def refused(settings: str, folder: Path) -> str:
    """What `run` says before it gives up, which it does by itself."""
    (folder / "ackbone.yaml").write_text(settings)
    done = run(code=1)
    assert "another one starts" not in done.stderr
    assert "giving up" in done.stderr
    assert "is away" not in done.stderr
    return done.stderr


def test_a_database_or_a_role_that_is_missing_ends_run(
    folder: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    broker = f"broker: {redis.url}\n"
    said = refused(f"{broker}store: {postgres.url('no_such_place')}\n", folder)
    assert 'has no database "no_such_place": create it, or correct `store`' in said
    said = refused(f"{broker}store: {postgres.url(role='nobody_here')}\n", folder)
    assert 'has no role "nobody_here"' in said


def test_a_wrong_password_ends_run(folder: Path, postgres: PostgresServer) -> None:
    postgres.execute("CREATE ROLE shop LOGIN PASSWORD 'right'")
    postgres.demand_passwords("shop")
    url = postgres.url(role="shop:wrong")
    said = refused(f"store: {url}\n", folder)
    assert 'refuses the login: password authentication failed for user "shop"' in said
    guarded = RedisServer()
    try:
        guarded.start()
        guarded.cli("CONFIG", "SET", "requirepass", "right")
        said = refused(f"broker: {guarded.url}?password=wrong\n", folder)
        assert "refuses the login: invalid username-password pair" in said
        said = refused(f"broker: {guarded.url}\n", folder)
        assert "refuses the login: Authentication required" in said
    finally:
        guarded.remove()


def test_a_password_that_is_refused_later_is_tried_again(folder: Path, redis: RedisServer) -> None:
    """It may be about to change: a worker that runs goes on, and so does its replacement."""
    (folder / "ackbone.yaml").write_text(
        f"broker: {redis.url}\nqueues:\n  default: {{codec: standard}}\n"
    )
    send("struct")
    with running("run", TARGET) as worker:
        worker.until(lambda: "finished 1 message" in worker.said, "it works")
        redis.cli("CONFIG", "SET", "requirepass", "right")
        redis.cli("-a", "right", "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        worker.until(lambda: "refuses the login" in worker.said, "it is refused")
        redis.cli("-a", "right", "CONFIG", "SET", "requirepass", "")
        worker.until(lambda: "the broker is back" in worker.said, "it goes on")
        worker.stop()
