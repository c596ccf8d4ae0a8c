"""The command line: real processes for the golden paths, in process for the breadth."""

import asyncio
import functools
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from ackbone.cli.output import dump, plain, safe, span
from ackbone.cli.root import ENTRIES, SECTIONS, cli
from ackbone.cli.session import Exit
from ackbone.store.sqlite.migrate import ensure_schema
from tests.servers.redis import RedisServer

TARGET = f"{Path(__file__).with_name('cli_app.py')}:app"
LIMIT_S = 90
HELP_LIMIT_S = 0.9
"""Three times what is promised: the machine is shared."""
ACKBONE = [sys.executable, "-m", "ackbone"]
CANARY = "c4nary-s3cret-9f1b"


@pytest.fixture(autouse=True)
def _own_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ackbone.yaml or .env of the developer's counts here."""
    (home / "cwd").mkdir()
    monkeypatch.chdir(home / "cwd")
    monkeypatch.delenv("ACKBONE_CONFIG", raising=False)


@pytest.fixture
def database(home: Path) -> Path:
    ensure_schema(home / "ackbone.db")
    return home / "ackbone.db"


def call(*arguments: str, stdin: str = "", code: int | None = 0) -> Result:
    """The command in this process."""
    result = CliRunner().invoke(cli, arguments, input=stdin, catch_exceptions=False)
    assert code is None or result.exit_code == code, (arguments, result.stdout, result.stderr)
    return result


def lines(result: Result | subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Standard output as JSON lines; anything else there is a mistake."""
    return [json.loads(line) for line in result.stdout.splitlines()]


def process(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run(
        [*ACKBONE, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def work() -> None:
    """A worker process, until nothing is left."""
    done = process("run", TARGET, "--until-idle", "--log-level", "critical")
    assert done.returncode == 0, done.stderr


def send(*arguments: str, type_: str = "good", stdin: str = "") -> str:
    return call("send", "--type", type_, *arguments, stdin=stdin).stdout.strip()


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that goes on until it is told to stop."""
    child = subprocess.Popen(
        [*ACKBONE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()


# ── golden paths, as processes ───────────────────────────────────────────────────────────────────


def test_from_send_to_trace_through_real_processes():
    sent = process("send", "--type", "good", "--payload", '{"n": 1}', "--json")
    assert sent.returncode == 0, sent.stderr
    (receipt,) = lines(sent)
    assert receipt["durability"] == "fsync"
    work()
    traced = process("trace", receipt["id"], "--json")
    (found,) = lines(traced)
    assert found["status"] == "succeeded"
    assert [moment["what"] for moment in found["timeline"]][:3] == [
        "message.sent", "task.claimed", "task.succeeded",
    ]  # fmt: skip
    assert found["replies"][0]["content"] == "seen {'n': 1}"
    people = process("trace", receipt["id"][:20])
    assert "task.succeeded" in people.stdout
    assert process("ledger", "verify", "--json").returncode == 0
    assert process("trace", "no-such-message").returncode == Exit.NOT_FOUND


def test_a_dead_letter_is_replayed_edited_and_refused_the_second_time():
    process("send", "--type", "bad", "--id", "m-1", "--payload", "{}")
    work()
    (listed,) = lines(process("dlq", "list", "--json"))
    assert (listed["message_id"], listed["reason"]) == ("m-1", "final_error")
    edited = process("dlq", "edit", "m-1", "--payload", '{"mended": true}', "--json")
    assert edited.returncode == 0, edited.stderr
    (answer,) = lines(edited)
    again = process("dlq", "replay", "m-1")
    assert again.returncode == Exit.CONFLICT
    assert answer["replay_id"] in again.stderr
    assert "Traceback" not in again.stderr
    assert again.stdout == ""
    work()
    (found,) = lines(process("trace", answer["replay_id"], "--json"))
    assert found["status"] == "succeeded"
    assert found["links"][0]["relation"] == "replay of"


def test_tail_follows_and_ends_with_the_right_code():
    process("migrate")
    for number, code in ((signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.TERMINATED)):
        with running("tail", "--json", "-n", "0", "--type", "queue.*") as tail:
            assert tail.stdout is not None
            process("send", "--type", "good", "--queue", f"q{number}")
            wait_for(functools.partial(is_listening, tail.pid))
            assert process("queues", "pause", f"q{number}").returncode == 0
            event = json.loads(tail.stdout.readline())
            assert (event["type"], event["subscription"]) == ("queue.paused", f"q{number}")
            tail.send_signal(number)
            assert tail.wait(LIMIT_S) == code
            assert "Traceback" not in (tail.stderr.read() if tail.stderr else "")


TERMINATED_AT_A_START = '''
import asyncio, os, signal, threading
from ackbone.cli.session import Session

class Interrupted(threading.Condition):
    """SIGTERM comes when its lock is taken and `with` does not know it yet."""

    def __enter__(self):
        taken = super().__enter__()
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)
        return taken

usual = threading.Thread.start

def start(thread):
    threading.Thread.start = usual
    thread._started._cond = Interrupted(threading.Lock())
    usual(thread)

threading.Thread.start = start

async def work():
    while True:
        await asyncio.to_thread(int)

Session(as_json=False, config_path=None, debug=False).run(work())
'''


def test_a_sigterm_in_the_middle_of_a_threads_start_ends_the_command():
    command = [sys.executable, "-c", TERMINATED_AT_A_START]
    ended = subprocess.run(command, check=False, timeout=LIMIT_S)
    assert ended.returncode == Exit.TERMINATED


def is_listening(pid: int) -> bool:
    """Has the process bound its socket for wake-ups beside the database?"""
    folder = Path(os.environ["ACKBONE_HOME"]) / "ackbone.db.wake"
    return folder.is_dir() and any(folder.glob(f"{pid}-*"))


def test_dev_greets_shows_and_drains():
    with running("dev", TARGET) as dev:
        assert dev.stdout is not None
        greeting = [dev.stdout.readline()]
        while "Ctrl+C" not in greeting[-1]:
            greeting.append(dev.stdout.readline())
        text = "".join(greeting)
        assert text.count("ackbone send") == 1
        assert "ackbone tail" in text
        assert "ackbone stats" in text
        receipt = process("send", "--type", "good", "--payload", '"\\u001b[31mhi"')
        seen = ""
        while not ("succeeded" in seen and "[reply]" in seen):
            seen += dev.stdout.readline()
        assert receipt.stdout.strip() in seen
        assert "\x1b" not in seen
        dev.send_signal(signal.SIGINT)
        assert dev.wait(LIMIT_S) == 0


def test_a_wrong_target_is_said_in_a_sentence():
    for command in ("run", "dev"):
        done = process(command, "no_such_module:app")
        assert done.returncode == Exit.USAGE, done.stderr
        assert "no_such_module" in done.stderr
        assert "Traceback" not in done.stderr


def test_python_m_ackbone_is_the_same_program():
    assert process("--version").stdout.startswith("ackbone, version ")


def test_help_is_quick_and_loads_nothing(unmeasured):
    took = []
    for _ in range(5):
        begun = time.perf_counter()
        assert process("--help").returncode == 0
        took.append(time.perf_counter() - begun)
    print(f"\nackbone --help: best {min(took):.3f} s of {[round(each, 3) for each in took]}")
    assert min(took) < HELP_LIMIT_S
    code = (
        "import sys\nfrom ackbone.cli.root import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "print(*(set(m.partition('.')[0] for m in sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=unmeasured,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert "click" in loaded
    assert loaded.isdisjoint({"msgspec", "asyncio", "sqlite3", "yaml", "rich", "sqlalchemy"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats"], ["queues", "list"], ["dlq", "list"], ["parked", "list"], ["deliveries", "list"],
        ["doctor"],
        ["tail", "--no-follow"], ["config", "show"],
    ],
)  # fmt: skip
def test_looking_needs_no_schema_tools(
    database: Path, arguments: list[str], unmeasured: dict[str, str]
):
    code = (
        "import sys\nfrom ackbone.cli.root import cli\n"
        f"cli.main({arguments!r}, standalone_mode=False)\n"
        "print(*sorted(set(m.partition('.')[0] for m in sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=unmeasured,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert "sqlite3" in loaded or arguments[0] == "config"
    assert loaded.isdisjoint({"sqlalchemy", "alembic", "rich", "prometheus_client"})


def test_a_terminal_gets_colour_and_progress_and_a_pipe_does_not(database: Path):
    plain_text = process("send", "--type", "good", "--count", "600")
    assert plain_text.stdout == "sent 600\n"
    assert plain_text.stderr == ""
    assert "sending" in on_terminal("send", "--type", "good", "--count", "600")
    assert "\x1b[" in on_terminal("queues", "list")
    assert "\x1b[" not in on_terminal("queues", "list", NO_COLOR="1")
    assert "\x1b[" not in on_terminal("queues", "list", "--json")


def on_terminal(*arguments: str, **variables: str) -> str:
    """What the command writes when it has a terminal."""
    pid, fd = pty.fork()
    if pid == 0:
        environment = {**os.environ, "TERM": "xterm", **variables}
        environment.pop("NO_COLOR", None) if "NO_COLOR" not in variables else None
        os.execve(sys.executable, [*ACKBONE, *arguments], environment)
    shown = b""
    while True:
        try:
            part = os.read(fd, 65_536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    return shown.decode()


# ── send ─────────────────────────────────────────────────────────────────────────────────────────


def test_send_prints_the_id_alone():
    assert send("--id", "m-1") == "m-1"
    assert call("queues", "list", "--json").stdout.count('"ready": 1') == 1


def test_every_option_of_send_arrives():
    send(
        "--queue", "q", "--id", "m-1", "--payload", '{"a": [1]}', "--idempotency-key", "k",
        "--ordering-key", "o", "--correlation-id", "c", "--priority", "high", "--ttl", "2h",
        "--tenant", "acme", "--header", "x-a=1=2", "--delay", "90s",
    )  # fmt: skip
    (found,) = lines(call("trace", "m-1", "--json"))
    (waiting,) = found["waiting"]
    assert (found["tenant_id"], found["status"]) == ("acme", "delayed")
    assert (waiting["queue"], waiting["priority"], waiting["ordering_key"]) == ("q", 2, "o")
    assert waiting["headers"] == {"x-a": "1=2"}
    assert waiting["due_at"] > waiting["sent_at"]
    assert waiting["expires_at"] > waiting["due_at"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--payload", "1"],
        ["--type", "x", "--payload", "{"],
        ["--type", "x", "--priority", "9"],
        ["--type", "x", "--delay", "soon"],
        ["--type", "x", "--header", "novalue"],
        ["--type", "x", "--count", "2", "--id", "a"],
        ["--type", "x", "--strict"],
        ["--file", "f", "--payload", "1"],
        ["--file", "/no/such/file"],
        ["--type", "x", "--nonsense"],
    ],
)
def test_wrong_options_are_usage_errors(arguments: list[str], home: Path):
    result = call("send", *arguments, code=Exit.USAGE)
    assert result.stdout == ""
    assert "Error" in result.stderr
    assert not (home / "ackbone.db").exists(), "nothing was made for a mistake"


def test_a_refused_message_is_a_failure_with_its_reason():
    result = call("send", "--type", "x", "--queue", "../etc", code=Exit.FAILURE)
    assert "not a valid name" in result.stderr
    large = call("send", "--type", "x", "--payload", json.dumps("x" * 300_000), code=Exit.FAILURE)
    assert "max_message_bytes" in large.stderr


def test_a_file_with_wrong_lines_sends_the_others_and_says_which():
    text = '{"message_type": "good", "message_id": "a"}\nnonsense\n{"message_type": "good"}\n'
    result = call("send", "--file", "-", "--json", stdin=text, code=Exit.PARTIAL)
    assert [line["line"] for line in lines(result)] == [1, 3]
    assert result.stderr.startswith("line 2: ")
    none = call("send", "--file", "-", stdin="nonsense\n", code=Exit.FAILURE)
    assert "line 1" in none.stderr


def test_strict_sends_nothing_if_one_line_is_wrong(home: Path):
    file = home / "messages.jsonl"
    file.write_text('{"message_type": "good"}\n' * 3 + "{}\n")
    for arguments, text in ((["--file", str(file)], ""), (["--file", "-"], file.read_text())):
        result = call("send", *arguments, "--strict", stdin=text, code=Exit.FAILURE)
        assert "line 4: message_type is missing" in result.stderr
    assert not (home / "ackbone.db").exists()
    file.write_text('{"message_type": "good"}\n' * 3)
    assert call("send", "--file", str(file), "--strict").stdout == "sent 3\n"


@pytest.mark.parametrize("password", ["SECRET/y", "x@SECRET"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor"],
        ["stats"],
        ["send", "--type", "good"],
        ["run", TARGET],
        ["config", "show"],
        ["dlq", "list"],
    ],
)
def test_a_password_that_is_not_escaped_is_never_printed(
    arguments: list[str], password: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACKBONE__STORE", f"postgresql://u:{password}@127.0.0.1:1/db")
    result = process(*arguments)
    assert "SECRET" not in result.stdout + result.stderr
    if arguments != ["config", "show"]:
        assert "as %2F and @ as %40" in result.stdout + result.stderr
    assert "internal error" not in result.stderr


def test_sending_to_a_memory_broker_is_refused(home: Path):
    Path("ackbone.yaml").write_text("broker: memory://\n")
    result = call("send", "--type", "x", code=Exit.UNAVAILABLE)
    assert "memory://" in result.stderr
    assert result.stdout == ""


# ── looking and acting ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats"], ["queues", "list"], ["dlq", "list"], ["dlq", "show", "x"], ["parked", "list"],
        ["deliveries", "list"], ["deliveries", "retry", "--all"], ["deliveries", "pause", "x"],
        ["trace", "x"], ["tail"], ["dlq", "replay", "--all"], ["queues", "pause", "x"],
        ["ledger", "verify"], ["recover"],
    ],
)  # fmt: skip
def test_without_a_database_nothing_is_made(arguments: list[str], home: Path):
    result = call(*arguments, code=Exit.NOT_FOUND)
    assert "no database" in result.stderr
    assert result.stdout == ""
    assert not (home / "ackbone.db").exists()


def test_what_waits_for_a_person(database: Path):
    send("--id", "dead-1", type_="bad")
    send("--id", "dead-2", type_="bad")
    send("--id", "park-1", type_="nobody")
    send("--id", "park-2", type_="nobody")
    work()
    assert "dead-1" in call("dlq", "show", "dead-1").stdout
    assert "final_error" in call("dlq", "list").stdout
    shown = call("dlq", "show", "dead-1").stdout
    assert "\x1b" not in shown
    assert "\\e[31mred" in shown
    call("dlq", "replay", code=Exit.USAGE)
    call("dlq", "replay", "dead-1", "--all", code=Exit.USAGE)
    call("dlq", "discard", "--all", code=Exit.USAGE)  # nobody to ask
    mixed = call("dlq", "discard", "dead-1", "--why", "a test", "--json")
    assert lines(mixed)[0]["error"] is None
    partly = call("dlq", "discard", "dead-1", "dead-2", "--json", code=Exit.PARTIAL)
    assert [line["error"] is None for line in lines(partly)] == [False, True]
    assert call("dlq", "list", "--json").stdout == ""
    assert len(lines(call("dlq", "list", "--state", "all", "--limit", "1", "--json"))) == 1
    assert "--cursor" in call("dlq", "list", "--state", "all", "--limit", "1").stderr
    assert "no dead letter matches" in call("dlq", "replay", "--all").stderr

    assert "workflow_pending" in call("parked", "list").stdout
    assert "nobody" in call("parked", "show", "park-1").stdout
    assert lines(call("parked", "resume", "park-1", "--json"))[0]["status"] == "resumed"
    again = call("parked", "resume", "park-1", code=Exit.CONFLICT)
    assert "it is ready" in again.stderr
    call("parked", "resume", "x", "--effect", "a=maybe", code=Exit.USAGE)
    both = call("parked", "discard", "park-1", "park-2", "--yes", code=Exit.PARTIAL)
    assert "park-2 discarded" in both.stdout
    call("parked", "show", "nothing", code=Exit.NOT_FOUND)


def test_one_word_on_the_effects_of_many_messages(database: Path):
    names = ("pay-1", "pay-2", "pay-3")
    for name in names:
        send("--id", name, type_="pays")
    work()
    shown = call("parked", "show", "pay-1").stdout
    assert "effect 'charge' raised TimeoutError: no answer" in shown
    assert "charge: begun, outcome unknown: it raised TimeoutError: no answer" in shown
    told = call("parked", "resume", *names, "--effect", "charge=done", "--json")
    assert [line["status"] for line in lines(told)] == ["resumed"] * 3
    work()
    assert call("parked", "list", "--json").stdout == ""


def test_queues_are_paused_and_resumed(database: Path):
    send("--queue", "orders")
    call("queues", "pause", "ordres", code=Exit.NOT_FOUND)
    assert call("queues", "pause", "orders").stdout == "orders is paused\n"
    (state,) = lines(call("queues", "list", "--json"))
    assert state["paused_at"] is not None
    found = {check["name"]: check for check in lines(call("doctor", "--json"))}
    assert found["queues"]["finding"] == "warning"
    assert lines(call("queues", "resume", "orders", "--json"))[0]["changed"] is True
    assert "it already was" in call("queues", "resume", "orders").stdout


def test_an_ambiguous_name_lists_what_it_fits(database: Path):
    for tenant in ("acme", "zeta"):
        send("--id", "twice-1", "--tenant", tenant)
    result = call("trace", "twice-1", code=Exit.CONFLICT)
    assert "acme" in result.stderr
    assert "zeta" in result.stderr
    assert call("trace", "twice-1", "--tenant", "acme", "--json").exit_code == 0


def test_stats_and_tail(database: Path):
    send("--id", "m-1")
    work()
    (found,) = lines(call("stats", "--json"))
    assert found["statuses"] == {"default": {"succeeded": 1}}
    assert "1 succeeded" not in call("stats").stderr
    kinds = [line["type"] for line in lines(call("tail", "--no-follow", "--json"))]
    assert "task.succeeded" in kinds
    only = call("tail", "--no-follow", "--type", "task.s*", "--since", "1h", "--json")
    assert {line["type"] for line in lines(only)} == {"task.succeeded"}
    assert "task.succeeded" in call("tail", "--no-follow").stdout


# ── health ───────────────────────────────────────────────────────────────────────────────────────


def test_doctor_is_content_with_a_sound_home_and_not_with_an_open_one(database: Path, home: Path):
    send()
    findings = lines(call("doctor", "--deep", "--json"))
    assert {check["finding"] for check in findings} == {"ok"}, findings
    names = {check["name"] for check in findings}
    assert {"sqlite", "schema", "witness", "integrity", "bodies", "disk space", "clock"} <= names
    home.chmod(0o755)
    database.chmod(0o644)
    result = call("doctor", code=Exit.CHECK_FAILED)
    assert "chmod 600" in result.stdout


def test_doctor_names_subscribers_without_a_channel(database: Path):
    Path("ackbone.yaml").write_text(
        "subscribers: {people: {channel: slack, to: C1, events: [task.failed]}}"
    )
    found = {check["name"]: check for check in lines(call("doctor", "--json"))}
    assert found["subscribers"]["finding"] == "warning"
    assert "people is notified by slack" in found["subscribers"]["detail"]


def test_doctor_tells_a_broken_configuration_and_a_broken_database(database: Path):
    Path("ackbone.yaml").write_text("wroker: {}\n")
    result = call("doctor", "--json", code=Exit.CHECK_FAILED)
    assert any(c["name"] == "config" and c["finding"] == "refused" for c in lines(result))
    Path("ackbone.yaml").unlink()
    database.write_bytes(b"not a database, but long enough to look like one" * 100)
    result = call("doctor", "--json", code=Exit.CHECK_FAILED)
    assert any(check["finding"] == "refused" for check in lines(result))


def test_a_delayed_message_waits_in_the_store_where_the_broker_cannot_hold_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    server = RedisServer()
    server.start()
    try:
        monkeypatch.setenv("ACKBONE__BROKER", server.url)
        monkeypatch.setenv("ACKBONE__DEFAULT_QUEUE", "stream:task")
        (receipt,) = lines(call("send", "--type", "good", "--delay", "50ms", "--json"))
        assert receipt["durability"] == "fsync"
        (at_once,) = lines(call("send", "--type", "good", "--json"))
        assert at_once["durability"] == "process"
        work()
        for each in (receipt, at_once):
            assert "succeeded" in call("trace", each["id"]).stdout
    finally:
        server.remove()


def test_what_waits_on_a_server_is_counted(home: Path, monkeypatch: pytest.MonkeyPatch):
    server = RedisServer()
    server.start()
    try:
        monkeypatch.setenv("ACKBONE__BROKER", server.url)
        monkeypatch.setenv("ACKBONE__DEFAULT_QUEUE", "stream:task")
        call("send", "--type", "good", "--count", "3")
        (found,) = lines(call("stats", "--json"))
        (state,) = [each for each in found["queues"] if each["queue"] == "stream:task"]
        assert state["ready"] == 3
        assert state["oldest_age_s"] is not None
        listed = call("queues", "list").stdout
        assert "stream:task" in listed
    finally:
        server.remove()
    away = call("stats", "--json")
    assert "messages at the broker are not counted" in away.stderr


def test_several_brokers_are_named_and_so_is_one_that_was_not_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    server = RedisServer()
    server.start()
    try:
        Path("ackbone.yaml").write_text(
            f"brokers: {{events: '{server.url}', files: 'sqlite:///{home}/files.db'}}\n"
            "queues: {near: {}, far: {broker: events}, beside: {broker: files}}\n"
        )
        call("send", "--type", "good", "--queue", "near")
        call("send", "--type", "good", "--queue", "far", "--count", "2")
        assert {each["ready"] for each in lines(call("queues", "list", "--json"))} == {0, 1, 2}
        call("send", "--type", "good", "--queue", "beside", "--count", "3")
        found = lines(call("queues", "list", "--json"))
        assert {each["queue"]: each["broker"] for each in found} == {
            "beside": "files", "default": "default", "far": "events", "near": "default",
        }  # fmt: skip
        (stats,) = lines(call("stats", "--json"))
        ready = {each["queue"]: each["ready"] for each in stats["queues"]}
        assert ready == {"beside": 3, "default": 0, "far": 2, "near": 1}
        assert stats["uncounted"] == {}
        for command in (("stats",), ("queues", "list")):
            head, *rows = call(*command).stdout.splitlines()
            assert head.split()[:3] == ["QUEUE", "BROKER", "READY"]
            assert ["far", "events", "2"] in [row.split()[:3] for row in rows]
    finally:
        server.remove()
    (stats,) = lines(call("stats", "--json"))
    assert list(stats["uncounted"]) == ["events"]
    assert server.url.split("/")[2] in stats["uncounted"]["events"]
    assert {each["queue"]: each["ready"] for each in stats["queues"]}["near"] == 1
    Path("ackbone.yaml").unlink()
    assert call("stats").stdout.split()[:2] == ["QUEUE", "READY"]


@pytest.mark.parametrize("broker", ["sqlite", "postgresql"])
def test_a_trace_of_a_waiting_message_shows_its_queue_and_type(
    broker: str, home: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    if broker == "postgresql":
        monkeypatch.setenv("ACKBONE__STORE", request.getfixturevalue("postgres_url"))
        monkeypatch.setenv("ACKBONE__BROKER", broker)
    (receipt,) = lines(call("send", "--type", "good", "--queue", "orders", "--json"))
    assert "queue     orders, type good" in call("trace", receipt["id"]).stdout


def test_a_trace_of_an_unknown_message_says_where_it_may_be(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    call("send", "--type", "good")
    alone = call("trace", "nowhere", code=Exit.NOT_FOUND).stderr
    assert "only on its broker" not in alone
    for url, how in (
        ("redis://127.0.0.1:1/0", "redis-cli XLEN QUEUE"),
        ("amqp://127.0.0.1:1/", "rabbitmqctl list_queues"),
    ):
        monkeypatch.setenv("ACKBONE__BROKER", url)
        said = call("trace", "nowhere", code=Exit.NOT_FOUND).stderr
        assert "a message that no worker has received yet is only on its broker" in said
        assert how in said


def test_a_plain_client_s_task_has_a_time_line(home: Path, monkeypatch: pytest.MonkeyPatch):
    """As redis-cli XADD writes it; the command shows its way from the stream to its result."""
    server = RedisServer()
    server.start()
    try:
        monkeypatch.setenv("ACKBONE__BROKER", server.url)
        monkeypatch.setenv("ACKBONE__DEFAULT_QUEUE", "stream:task")
        task = ["task_id", "t-1", "tool_name", "good", "payload", "{}", "idempotency_key", "k-1"]
        server.cli("XADD", "stream:task", "*", *task, "retry_count", "0")
        work()
        result = server.cli("XRANGE", "stream:result", "-", "+")
        assert "t-1" in result
        assert "succeeded" in result
        shown = call("trace", "t-1").stdout
    finally:
        server.remove()
    for step in ("task.created", "task.claimed", "task.succeeded"):
        assert step in shown


def test_doctor_refuses_a_redis_that_loses_messages_unless_it_is_allowed_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    server = RedisServer("--appendonly", "no")
    server.start()
    try:
        monkeypatch.setenv("ACKBONE__BROKER", f"{server.url}?password={CANARY}")
        wrong = call("doctor", "--json", code=Exit.CHECK_FAILED)
        monkeypatch.setenv("ACKBONE__BROKER", server.url)
        monkeypatch.setenv("ACKBONE__DEFAULT_QUEUE", "stream:task")
        refused = call("doctor", "--json", code=Exit.CHECK_FAILED)
        monkeypatch.setenv("ACKBONE__BROKER", f"{server.url}?allow_unsafe=1")
        allowed = call("doctor", "--json")
    finally:
        server.remove()
    away = call("doctor", "--json", code=Exit.CHECK_FAILED)
    assert [c["name"] for c in lines(refused) if c["finding"] == "refused"] == ["redis log"]
    assert "allow_unsafe is set" in allowed.stdout
    for result in (wrong, away):
        (found,) = [check for check in lines(result) if check["finding"] == "refused"]
        assert found["name"] == "redis"
        assert server.url in found["detail"]
    assert CANARY not in wrong.stdout + wrong.stderr
    hints = [
        [check["hint"] for check in lines(result) if check["finding"] == "refused"]
        for result in (wrong, away)
    ]
    assert hints == [[None], ["start it, or correct `broker` in ackbone.yaml"]]
    monkeypatch.setenv("ACKBONE__BROKER", "redis://h/0?visibility=1")
    mistaken = call("doctor", code=Exit.CHECK_FAILED)
    assert "did you mean visibility_timeout_s?" in mistaken.stdout


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "amqp://127.0.0.1:1/"])
def test_send_to_the_only_broker_while_it_is_away(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACKBONE__BROKER", url)
    said = call("send", "--type", "good", "--queue", "orders", code=Exit.UNAVAILABLE).stderr
    assert "queue orders is on the broker of the setting `broker`" in said
    assert "the message was not sent" in said
    assert "Start it, or correct `broker`" in said


def test_a_database_that_is_away_gets_advice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACKBONE__STORE", "postgresql://me@127.0.0.1:1/x")
    monkeypatch.setenv("ACKBONE__BROKER", "postgresql")
    checks = lines(call("doctor", "--json", code=Exit.CHECK_FAILED))
    (hint,) = [check["hint"] for check in checks if check["finding"] == "refused"]
    assert hint == "start it, or correct `store` in ackbone.yaml"
    said = call("send", "--type", "good", "--queue", "orders", code=Exit.UNAVAILABLE).stderr
    assert "nothing was sent to queue orders" in said
    assert "Start it, or correct `store`" in said


def test_lost_commits_are_told_and_recovered_only_when_accepted(database: Path):
    from contextlib import closing

    from ackbone.sqlitefile.wal import Witness

    send("--id", "m-1")
    with closing(Witness(database)) as witness:
        witness.write((witness.read() or 0) + 2)
    refused = call("stats", code=Exit.FAILURE)
    assert "ackbone recover" in refused.stderr
    assert call("recover", "--json", code=Exit.CHECK_FAILED).stdout.count('"sound": false') == 1
    (after,) = lines(call("recover", "--accept-loss", "--json"))
    assert after["sound"] is True
    assert after["copy"]
    assert call("trace", "m-1", "--json").exit_code == 0


def test_migrate_says_from_where_to_where(home: Path):
    assert lines(call("migrate", "--check", "--json", code=Exit.CHECK_FAILED))[0]["from"] is None
    assert not (home / "ackbone.db").exists()
    assert "went from nothing to" in call("migrate").stdout
    assert "the newest" in call("migrate", "--check").stdout


def test_config_is_shown_and_checked():
    assert call("config", "check").stdout.startswith("ok")
    Path("ackbone.yaml").write_text("worker:\n  slots: 7\n  leas_s: 1\n")
    result = call("config", "check", "--json", code=Exit.CHECK_FAILED)
    assert "lease_s" in lines(result)[0]["problems"][0]
    assert "leas_s" in call("stats", code=Exit.USAGE).stderr
    Path("ackbone.yaml").write_text("worker:\n  slots: 7\n")
    shown = call("config", "show", "worker.slots", "--origin").stdout
    assert shown == "worker.slots: 7  # file\n"
    call("config", "show", "nothing", code=Exit.NOT_FOUND)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str):
    assert "_ACKBONE_COMPLETE" in call("completion", shell).stdout


# ── what holds for all commands ──────────────────────────────────────────────────────────────────


def commands() -> Iterator[tuple[list[str], click.Command]]:
    context = click.Context(cli)
    for name in ENTRIES:
        command = cli.get_command(context, name)
        assert command is not None
        yield [name], command
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                assert found is not None
                yield [name, inner], found


ALL = {" ".join(path): command for path, command in commands()}


def test_the_commands_are_these():
    assert set(ALL) == {
        "run", "dev", "chat", "send", "tail", "trace", "stats",
        "approvals", "approvals list", "approvals show", "approvals approve", "approvals reject",
        "rules", "rules check", "rules test", "rules usage",
        "deliveries", "deliveries list", "deliveries show", "deliveries retry", "deliveries edit",
        "deliveries discard", "deliveries pause", "deliveries resume",
        "dlq", "dlq list", "dlq show", "dlq replay", "dlq edit", "dlq discard",
        "parked", "parked list", "parked show", "parked resume", "parked discard",
        "queues", "queues list", "queues pause", "queues resume",
        "ledger", "ledger verify", "migrate", "recover", "doctor", "bench",
        "config", "config show", "config check", "completion",
    }  # fmt: skip
    assert set().union(*SECTIONS.values()) == set(ENTRIES)


@pytest.mark.parametrize("name", ALL)
def test_every_command_explains_itself(name: str):
    command = ALL[name]
    shown = call(*name.split(), "--help").stdout
    first = (command.help or "").strip().splitlines()[0]
    assert first.endswith("."), "one sentence"
    assert shown.count(f"ackbone {name.split(maxsplit=1)[0]}") >= 2, "usage and examples"
    assert "Examples:" in shown
    assert len(shown.split("Examples:")[1].strip().splitlines()) >= 2
    if name in ENTRIES:
        assert ENTRIES[name].help == first
    if not isinstance(command, click.Group):
        options = {option for param in command.params for option in param.opts}
        assert {"--json", "--debug", "--config"} <= options


@pytest.mark.parametrize(
    ("typed", "meant"), [(["snd"], "send"), (["dlq", "lsit"], "list"), (["qeues"], "queues")]
)
def test_a_mistyped_command_gets_a_hint(typed: list[str], meant: str):
    result = call(*typed, code=Exit.USAGE)
    assert f"Did you mean '{meant}'" in result.stderr


def test_a_secret_is_never_shown(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROKER_PASSWORD", CANARY)
    monkeypatch.setenv("ACKBONE_LEDGER_KEY", f"{CANARY}-and-long-enough-to-sign")
    Path("ackbone.yaml").write_text(
        "triggers:\n"
        "  - queue_name: orders\n"
        "    consumer_group: g\n"
        "    adapter:\n"
        "      type: rabbitmq\n"
        "      connection:\n"
        "        url: amqp://user:${BROKER_PASSWORD}@host/\n"
        "        password: ${BROKER_PASSWORD}\n"
    )
    shown = ""
    for arguments in (
        ["config", "show"], ["config", "show", "--json"], ["config", "check"], ["doctor"],
        ["send", "--type", "x"], ["stats"], ["queues", "list"], ["trace", "nothing", "--debug"],
        ["dlq", "list"], ["ledger", "verify"], ["tail", "--no-follow"], ["migrate"], ["recover"],
    ):  # fmt: skip
        result = call(*arguments, code=None)
        shown += result.stdout + result.stderr
    Path("ackbone.yaml").write_text(
        f"broker: amqp://user:{CANARY}@host/\nworker:\n  password: {CANARY}\n"
    )
    for arguments in (["config", "check"], ["stats", "--debug"], ["doctor", "--json"]):
        result = call(*arguments, code=None)
        assert result.exit_code in (Exit.CHECK_FAILED, Exit.USAGE)
        shown += result.stdout + result.stderr
    assert "***" in shown
    assert CANARY not in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats"],
        ["dlq", "list"],
        ["queues", "pause", "default"],
        ["ledger", "verify"],
        ["send", "--type", "good"],
        ["migrate"],
        ["migrate", "--check"],
    ],
)
def test_a_newer_database_asks_for_a_newer_program(database: Path, arguments: list[str]):
    """Not for a migration, which could not help."""
    with closing(sqlite3.connect(database)) as conn, conn:
        conn.execute("UPDATE alembic_version SET version_num = '0907'")
    told = call(*arguments, code=Exit.FAILURE).stderr
    assert "has schema revision 0907" in told
    assert "Install that version" in told
    assert "Run 'ackbone migrate'" not in told


def test_a_database_without_tables_asks_for_a_migration(home: Path):
    (home / "ackbone.db").touch()
    assert "Run 'ackbone migrate'" in call("stats", code=Exit.FAILURE).stderr


def test_an_unforeseen_error_is_one_sentence_unless_debugging(
    database: Path, monkeypatch: pytest.MonkeyPatch
):
    from ackbone.store.sqlite.records import SqliteRecords

    async def broken(self):
        raise ZeroDivisionError("oh, redis://u:hunter2@host")

    monkeypatch.setattr(SqliteRecords, "queues", broken)
    result = call("queues", "list", code=Exit.FAILURE)
    assert "internal error: ZeroDivisionError" in result.stderr
    assert "Traceback" not in result.stderr
    debugged = call("queues", "list", "--debug", code=Exit.FAILURE)
    assert "Traceback" in debugged.stderr
    for said in (result.stderr, debugged.stderr):
        assert "redis://***@host" in said
        assert "hunter2" not in said


def test_many_cannot_act_at_once_on_one_letter(database: Path):
    """Four processes replay one dead letter: one message is sent."""
    send("--id", "m-1", type_="bad")
    work()

    async def storm() -> list[int]:
        async def one() -> int:
            child = await asyncio.create_subprocess_exec(
                *ACKBONE, "dlq", "replay", "m-1",
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            return await asyncio.wait_for(child.wait(), LIMIT_S)

        return await asyncio.gather(*(one() for _ in range(4)))

    assert sorted(asyncio.run(storm())) == [0, *[int(Exit.CONFLICT)] * 3]
    (state,) = lines(call("queues", "list", "--json"))
    assert state["ready"] == 1


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "hostile",
    ["\x1b[31m", "\x9b31m", "\r", "a\nb", "\x00", "\x7f", "\u202e", "\u2066", "\ud800", "\u2028"],
)
def test_nothing_a_terminal_obeys_is_written(hostile: str):
    for shown in (safe(hostile), dump({"text": hostile, hostile: 1})):
        assert shown.isprintable()
        shown.encode("utf-8")


def test_values_become_plain():
    assert plain({"at_us": 0, "b": b"\xff", "none_us": None}) == {
        "at": "1970-01-01T00:00:00.000000Z",
        "b": {"base64": "/w=="},
        "none": None,
    }
    assert dump({"big_us": 10**20}).endswith('"100000000000000000000"}')
    assert [span(x) for x in (None, 0.5, 12, 300, 7300, 400_000)] == [
        "-", "500 ms", "12 s", "5 min", "2 h", "5 d",
    ]  # fmt: skip


# ── rules ────────────────────────────────────────────────────────────────────────────────────────

RULES = """
rules:
  - {name: freeze, match: {tenant: acme}, then: deny, reason: not for acme}
  - {name: big, match: {type: pay*, payload: amount > 1000}, then: approve, four_eyes: true}
  - {name: budget, match: {queue: default}, then: quota, window: hour, limits: {runs: 5}}
"""


def message(**fields: Any) -> str:
    Path("message.json").write_text(json.dumps({"message_type": "payout", **fields}, indent=2))
    return "message.json"


def test_rules_test_says_which_rule_decides() -> None:
    Path("rules.yaml").write_text(RULES)
    big = message(payload={"amount": 5000})
    shown = call("rules", "test", "rules.yaml", big).stdout
    assert shown.splitlines() == [
        "approve: rule big (rule big)",
        "  freeze (deny): does not match",
        "  big (approve): matches, and decides",
        "  budget (quota): matches, and counts it",
    ]
    (found,) = lines(call("rules", "test", "rules.yaml", big, "--json"))
    assert (found["decision"], found["rule"], found["unsure"]) == ("approve", "big", False)
    assert [quota["name"] for quota in found["quotas"]] == ["budget"]
    (found,) = lines(call("rules", "test", "rules.yaml", big, "--json", "--approved", "big"))
    assert (found["decision"], found["approved"]) == ("allow", ["big"])
    (found,) = lines(call("rules", "test", "rules.yaml", big, "--json", "--tenant", "acme"))
    assert (found["decision"], found["reason"]) == ("deny", "not for acme")
    unsure = '{"message_type": "payout", "payload": {"amount": "5000"}}'
    (found,) = lines(call("rules", "test", "rules.yaml", "-", "--json", stdin=unsure))
    assert (found["decision"], found["unsure"]) == ("approve", True)
    (found,) = lines(call("rules", "test", "rules.yaml", message(payload=1), "--queue", "x",
                          "--type", "chat", "--json"))  # fmt: skip
    assert found["quotas"] == []


def test_rules_test_refuses_what_it_cannot_read() -> None:
    Path("rules.yaml").write_text(RULES)
    assert "cannot be read" in call("rules", "test", "rules.yaml", "none.json", code=1).stderr
    assert "not valid JSON" in call("rules", "test", "rules.yaml", "-", stdin="{", code=1).stderr
    assert "no such rules file" in call("rules", "test", "none.yaml", "-", code=2).stderr


def test_rules_check_names_every_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rules.yaml").write_text(RULES)
    assert call("rules", "check", "rules.yaml").stdout == "ok: 3 rules (rules.yaml)\n"
    assert "Give a FILE" in call("rules", "check", code=2).stderr
    Path("rules.yaml").write_text(RULES.replace("deny", "dney").replace("hour", "hours"))
    monkeypatch.setenv("ACKBONE__RULES", "rules.yaml")
    for command in (("rules", "check"), ("config", "check")):
        (found,) = lines(call(*command, "--json", code=int(Exit.CHECK_FAILED)))
        assert [problem.split(": ")[1] for problem in found["problems"]] == [
            "rules[0].then",
            "rules[2].window",
        ]
    refused = lines(call("doctor", "--json", code=int(Exit.CHECK_FAILED)))
    assert [each["finding"] for each in refused if each["name"] == "rules"] == ["refused"] * 2
    Path("rules.yaml").write_text(RULES)
    (said,) = [each for each in lines(call("doctor", "--json")) if each["name"] == "rules"]
    assert (said["finding"], said["detail"].split()[:2]) == ("ok", ["3", "rules"])


# ── approvals ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def asked(database: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three messages that wait for a yes; the last one for two of them."""
    rules = Path("rules.yaml").absolute()
    rules.write_text(
        "rules:\n"
        "  - {name: both, match: {tenant: acme}, then: approve, four_eyes: true}\n"
        "  - {name: one, match: {tenant: default}, then: approve, reason: look first}\n"
    )
    monkeypatch.setenv("ACKBONE__RULES", str(rules))
    ids = [send("--payload", f'{{"n": {n}}}', "--id", f"order-{n}") for n in range(2)]
    ids.append(send("--id", "order-2", "--tenant", "acme"))
    work()
    return ids


def test_approvals_are_listed_shown_and_answered(asked: list[str]) -> None:
    found = lines(call("approvals", "list", "--json"))
    assert [each["message_id"] for each in found] == asked
    assert [each["rule"] for each in found] == ["one", "one", "both"]
    assert {each["state"] for each in found} == {"pending"}
    text = call("approvals", "list", "--tenant", "acme").stdout
    assert "order-2" in text
    assert "left" in text
    assert "order-0" not in text
    more = call("approvals", "list", "--limit", "1")
    assert f"--cursor {found[0]['id']}" in more.stderr
    shown = call("approvals", "show", "order-0").stdout
    assert "look first" in shown
    assert '"n": 0' in shown
    (record,) = lines(call("approvals", "show", found[0]["id"], "--json"))
    assert (record["message"]["payload"], record["status"]) == ({"n": 0}, "parked")
    assert "waiting_approval" in call("parked", "list").stdout

    call("approvals", "approve", "order-0", "--by", "anna", "--note", "fine")
    again = call("approvals", "reject", "order-0", "--by", "bob", code=int(Exit.CONFLICT))
    assert "was approved by anna at" in again.stderr
    call("approvals", "reject", "order-1")
    half = call("approvals", "approve", "order-2", "--by", "anna").stdout
    assert half == "order-2 approved once; a second person must approve, too\n"
    assert "1 of 2" in call("approvals", "list").stdout
    same = call("approvals", "approve", "order-2", "--by", "anna", code=int(Exit.CONFLICT))
    assert "other person" in same.stderr
    (done,) = lines(call("approvals", "approve", "order-2", "--by", "bob", "--json"))
    assert (done["state"], done["first_by"], done["answered_by"]) == ("approved", "anna", "bob")
    assert "no pending approvals" in call("approvals", "list").stderr
    work()
    states = {each["message_id"]: each["state"] for each in lines(
        call("approvals", "list", "--state", "all", "--json"))}  # fmt: skip
    assert states == {"order-0": "approved", "order-1": "rejected", "order-2": "approved"}
    assert "approval.approved" in call("trace", "order-0").stdout
    (letter,) = lines(call("dlq", "list", "--json"))
    assert (letter["message_id"], letter["reason"]) == ("order-1", "rejected")


def test_several_approvals_at_once(asked: list[str]) -> None:
    assert call("approvals", "reject", *asked, stdin="n\n", code=None).exit_code != 0
    some = call("approvals", "approve", *asked[:2], "nobody-knows", "--yes", code=int(Exit.PARTIAL))
    assert some.stdout.count("approved") == 2
    assert "there is no approval 'nobody-knows'" in some.stderr
    none = call("approvals", "reject", *asked[:2], "--yes", code=int(Exit.CONFLICT))
    assert none.stderr.count("was approved by") == 2


def test_rules_usage_shows_what_is_used_and_what_waits(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no quota has been used" in call("rules", "usage").stderr
    rules = Path("rules.yaml").absolute()
    quota = "{name: daily, match: {tenant: acme}, then: quota, window: day, limits: {runs: 2}}"
    rules.write_text(f"rules:\n  - {quota}\n")
    monkeypatch.setenv("ACKBONE__RULES", str(rules))
    for n in range(2):
        send("--tenant", "acme", "--id", f"m-{n}")
    work()
    call("send", "--type", "good", "--tenant", "acme", "--id", "m-2")
    with running("run", TARGET, "--log-level", "critical"):
        wait_for(lambda: "task.released" in call("trace", "m-2", code=None).stdout)
    (found,) = lines(call("rules", "usage", "--json"))
    assert (found["tenant_id"], found["name"], found["runs"]) == ("acme", "daily", 2)
    assert (found["limits"]["runs"], found["waiting"]) == (2, 1)
    assert "2 of 2" in call("rules", "usage", "--tenant", "acme").stdout
    assert "no quota has been used" in call("rules", "usage", "--tenant", "zeta").stderr
