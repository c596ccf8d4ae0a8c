"""`ackbone dlq replay` and `dlq_replay`, as people call them: many letters, paced, interrupted."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ackbone.cli.dead_letter_actions import program
from ackbone.cli.session import Exit
from tests.servers.redis import RedisServer

TARGET = f"{Path(__file__).with_name('cli_app.py')}:app"
LIMIT_S = 90
ACKBONE = [sys.executable, "-m", "ackbone"]
DLQ_REPLAY = [
    sys.executable,
    "-c",
    "from ackbone.cli.dead_letter_actions import program; program()",
]
REPLAY = [*ACKBONE, "dlq", "replay"]


@pytest.fixture(autouse=True)
def _own_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "cwd").mkdir()
    monkeypatch.chdir(home / "cwd")
    monkeypatch.delenv("ACKBONE_CONFIG", raising=False)


def call(*command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, (command, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def work() -> None:
    call(*ACKBONE, "run", TARGET, "--until-idle", "--log-level", "critical")


def bury(*messages: dict[str, Any]) -> None:
    """Messages that fail."""
    file = Path("messages.jsonl")
    file.write_text(
        "".join(f"{json.dumps({'message_type': 'bad', **each})}\n" for each in messages)
    )
    call(*ACKBONE, "send", "--file", str(file))
    work()


def asked(home: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(home / "ackbone.db")) as conn:
        return conn.execute(sql).fetchall()


def states(home: Path) -> dict[str, int]:
    return dict(asked(home, "SELECT state, count(*) FROM dead_letters GROUP BY 1"))


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


# ── stopping and going on ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.TERMINATED)]
)
def test_a_replay_that_is_interrupted_says_what_is_left_and_goes_on(
    home: Path, number: signal.Signals, code: Exit
):
    bury(*({"payload": {"n": n}} for n in range(6)))
    with started(*REPLAY, "--all", "--rate", "1/h") as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        assert "replayed as" in first
        child.send_signal(number)
        rest, told = child.communicate(timeout=LIMIT_S)
    assert child.returncode == code
    assert rest == ""
    assert "stopped: 1 replayed, 5 not changed" in told
    assert states(home) == {"open": 5, "replayed": 1}
    work()  # the first one fails again: a new letter
    assert states(home) == {"open": 6, "replayed": 1}
    again = re.search(r"--before (\S+):", told)
    assert again is not None, told
    done = call(*REPLAY, "--all", "--before", again[1])
    assert "5 replayed" in done.stderr
    assert states(home) == {"open": 1, "replayed": 6}
    replayed = asked(home, "SELECT task_id FROM event_log WHERE event_type = 'dlq.replayed'")
    assert len(replayed) == len(set(replayed)) == 6


def test_a_second_signal_insists(home: Path):
    bury({"payload": {}}, {"payload": {}})
    code = (
        "import asyncio, os, signal\nfrom ackbone.cli.session import Session\n"
        "session = Session(as_json=False, config_path=None, debug=False)\n"
        "async def work():\n"
        "    with session.signals.gently() as asked:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        await asked.wait()\n"
        "        print('asked', flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        await asyncio.sleep(60)\n"
        "try:\n    session.run(work())\nexcept KeyboardInterrupt:\n    print('insisted')\n"
    )
    assert call(sys.executable, "-c", code).stdout.split() == ["asked", "insisted"]


# ── many ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_dry_run_groups_by_cause_and_changes_nothing(home: Path):
    bury(*({"payload": {"n": n}} for n in range(3)), {"payload": [1]})
    people = call(*REPLAY, "--all", "--dry-run")
    assert re.search(r"^4 +default +bad +final_error ", people.stdout, re.MULTILINE)
    assert "4 would be replayed; nothing was changed" in people.stderr
    groups = lines(call(*REPLAY, "--all", "--dry-run", "--json", "--set", "payload.n=9"))
    assert [(g["count"], g["what"]) for g in groups] == [(3, "would be replayed"), (1, "cannot")]
    assert groups[0]["payload"] == {"n": 9}
    assert len(groups[0]["examples"]) == 3
    assert "only an object has fields" in groups[1]["problem"]
    (given_up,) = lines(call(*ACKBONE, "dlq", "discard", "--all", "--dry-run", "--json"))
    assert (given_up["count"], given_up["what"]) == (4, "would be discarded")
    assert states(home) == {"open": 4}
    assert asked(home, "SELECT count(*) FROM event_log WHERE event_type LIKE 'dlq.%'") == [(0,)]


def test_a_repair_is_tried_on_all_before_anything_is_sent(home: Path):
    bury(*({"payload": {"n": n}} for n in range(3)), {"payload": [1]})
    refused = call(*REPLAY, "--type", "bad", "--set", "payload.mended=true", code=Exit.CONFLICT)
    assert "does not fit 1 of 4 dead letters; nothing was sent" in refused.stderr
    assert states(home) == {"open": 4}
    repair = ("--set", "payload.mended=true", "--unset", "payload.n")
    partly = call(*REPLAY, "--type", "bad", *repair, "--skip-unfit", code=Exit.PARTIAL)
    assert "3 replayed, 1 failed" in partly.stderr
    work()
    assert asked(home, "SELECT count(*) FROM queue_executions WHERE status = 'succeeded'") == [(3,)]
    (changed,) = set(
        asked(home, "SELECT data ->> 'changed' FROM event_log WHERE event_type = 'dlq.edited'")
    )
    assert json.loads(changed[0]) == ["payload.mended", "payload.n"]


def test_a_repair_leaves_out_what_somebody_else_replayed_meanwhile(home: Path):
    bury({"payload": {"n": 1}}, {"payload": {"n": 2}})
    first, second = (each["id"] for each in lines(call(*ACKBONE, "dlq", "list", "--json")))
    repair = ("--set", "payload.n=3")
    call(*REPLAY, first, *repair)
    partly = call(*REPLAY, first, second, *repair, code=Exit.PARTIAL)
    assert f"dead letter {first} is not open: it was replayed" in partly.stderr
    assert states(home) == {"replayed": 2}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--all", "--rate", "0"], ["--all", "--rate", "fast"], ["--all", "--set", "payload.n"],
        ["--all", "--set", "id=7"], ["--all", "--unset", "type"], ["--all", "--before", "soon"],
        [], ["x", "--error", "y"],
    ],
)  # fmt: skip
def test_wrong_options_are_usage_errors(arguments: list[str]):
    assert call(*REPLAY, *arguments, code=Exit.USAGE).stdout == ""


def test_a_replay_shows_its_progress_on_a_terminal_only(home: Path):
    bury(*({"payload": {"n": n}} for n in range(3)))
    outer, inner = pty.openpty()
    with started(*REPLAY, "--limit", "2", "--all") as quiet:
        _, told = quiet.communicate(timeout=LIMIT_S)
    assert "\x1b[" not in told
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    done = subprocess.run(
        [*REPLAY, "--all"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=inner,
        text=True, timeout=LIMIT_S, check=True, env=environment,
    )  # fmt: skip
    os.close(inner)
    shown = os.read(outer, 65_536).decode()
    os.close(outer)
    assert "1/1" in shown
    assert done.stdout.count("replayed as") == 1


# ── the program of its own ───────────────────────────────────────────────────────────────────────


def test_dlq_replay_sends_again_mended_or_gives_up(home: Path):
    bury(*({"payload": {}, "message_id": f"m-{n}"} for n in range(3)))
    call(*DLQ_REPLAY, "m-0", "--abandon", "--rate", "1", code=Exit.USAGE)
    assert "1 would be discarded" in call(*DLQ_REPLAY, "m-0", "--abandon", "--dry-run").stderr
    call(*DLQ_REPLAY, "m-0", "--abandon", "--why", "test data")
    (mended,) = lines(call(*DLQ_REPLAY, "m-1", "--set", "payload.mended=true", "--json"))
    assert mended["error"] is None
    call(*DLQ_REPLAY, "--all", "--abandon", code=Exit.USAGE)  # nobody to ask
    call(*DLQ_REPLAY, "--all", "--abandon", "--yes")
    assert states(home) == {"discarded": 2, "replayed": 1}
    work()
    assert asked(home, "SELECT status FROM queue_executions WHERE status <> 'failed'") == [
        ("succeeded",)
    ]
    told = asked(
        home,
        "SELECT task_id, event_type, data ->> 'reason', data ->> 'by' LIKE '%@%' FROM event_log"
        " WHERE event_type LIKE 'dlq.%' ORDER BY 1",
    )
    assert told == [
        ("m-0", "dlq.discarded", "test data", 1),
        ("m-1", "dlq.edited", None, 1),
        ("m-2", "dlq.discarded", "", 1),
    ]
    shown = call(*DLQ_REPLAY, "--help").stdout
    assert shown.startswith("Usage: dlq_replay ")
    assert "--abandon" in shown


def test_dlq_replay_is_installed_as_a_program():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["dlq_replay"].partition(":")
    assert getattr(importlib.import_module(module), name) is program


# ── the queue on Redis ───────────────────────────────────────────────────────────────────────────


def test_on_redis_a_replay_goes_through_the_outbox(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACKBONE__BROKER", server.url)
    monkeypatch.setenv("ACKBONE__DEFAULT_QUEUE", "stream:task")
    bury(*({"payload": {"n": n}, "message_id": f"m-{n}"} for n in range(5)))
    done = lines(
        call(*DLQ_REPLAY, "--all", "--set", "payload.mended=true", "--unset", "payload.n", "--json")
    )
    assert {each["error"] for each in done} == {None}
    waiting = asked(home, "SELECT message_id FROM outbox")
    assert {message_id for (message_id,) in waiting} == {each["replay_id"] for each in done}
    assert client.xlen("stream:task") == 0
    assert client.xlen("stream:dlq") == 5
    work()
    assert asked(home, "SELECT count(*) FROM outbox") == [(0,)]
    ended = asked(home, "SELECT message_id FROM queue_executions WHERE status = 'succeeded'")
    assert {message_id for (message_id,) in ended} == {each["replay_id"] for each in done}
    results = [fields for _, fields in client.xrange("stream:result")]
    assert Counter(each[b"status"] for each in results) == {b"failed": 5, b"succeeded": 5}
    assert len({each[b"task_id"] for each in results}) == 10, "one result for each task"
    refused = call(*DLQ_REPLAY, "m-1", code=Exit.CONFLICT)
    assert "is not open: it was replayed" in refused.stderr


def test_what_workers_of_other_programs_gave_up_is_listed_replayed_and_abandoned(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write the six fields to `stream:dlq`, and know nothing of a store."""
    monkeypatch.setenv("ACKBONE__BROKER", server.url)
    monkeypatch.setenv("ACKBONE__DEFAULT_QUEUE", "stream:task")
    bury({"payload": {"n": 0}, "message_id": "ours"})
    for task_id, error in (("theirs", "boom"), ("theirs", "boom again"), ("given-up", "no")):
        client.xadd(
            "stream:dlq",
            {
                "task_id": task_id, "tool_name": "bad", "payload": '{"n": 1}', "error": error,
                "retry_count": "3", "failed_at": "2026-01-01T00:00:00Z",
            },
        )  # fmt: skip
    client.xadd("stream:dlq", {"what": b"\xff\xfe", "task_id": "x"})
    client.xadd("stream:dlq", {"task_id": "\0" + "x" * 1000, "tenant_id": "a/b", "error": "\0"})
    work()
    found = lines(call(*ACKBONE, "dlq", "list", "--json"))
    reasons = Counter(letter["reason"] for letter in found)
    assert (len(found), reasons["failed_elsewhere"]) == (6, 5)
    named = {letter["message_id"]: letter for letter in found}
    assert {named["ours"]["queue"], named["theirs"]["queue"]} == {"stream:task"}
    assert named["theirs"]["error"] == "boom"
    call(*DLQ_REPLAY, "theirs", "--set", "payload.mended=true", "--unset", "payload.n")
    call(*ACKBONE, "dlq", "discard", "given-up")
    work()
    results = [fields for _, fields in client.xrange("stream:result")]
    assert Counter(each[b"status"] for each in results) == {b"failed": 1, b"succeeded": 1}
    assert client.xlen("stream:dlq") == 6, "nothing is taken from it, and nothing told twice"
    assert states(home) == {"open": 4, "replayed": 1, "discarded": 1}


def test_while_redis_is_away_people_can_still_act(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACKBONE__BROKER", "redis://127.0.0.1:1")
    letters = [
        (f"m-{n}", n.to_bytes(16, "big"), json.dumps({"message_type": "bad", "payload": {"n": n}}))
        for n in range(2)
    ]
    call(*ACKBONE, "migrate")
    with closing(sqlite3.connect(home / "ackbone.db")) as conn, conn:
        conn.executemany(
            "INSERT INTO dead_letters (message_id, id, body, body_info, body_crc, subscription,"
            " queue_name, event_name, reason, failed_at) VALUES (?1, ?2, CAST(?3 AS BLOB), ?4, ?5,"
            " 'work', 'work', 'bad', 'retries_exhausted', 1)",
            [
                (name, row, text, '{"codec":"standard","headers":{}}', zlib.crc32(text.encode()))
                for name, row, text in letters
            ],
        )
    call(*ACKBONE, "dlq", "discard", "m-0")
    call(*REPLAY, "m-1", "--set", "payload.mended=true", "--unset", "payload.n")
    assert states(home) == {"discarded": 1, "replayed": 1}
    stats = call(*ACKBONE, "stats", "--json")
    assert "messages at the broker are not counted" in stats.stderr
    (seen,) = [q for q in json.loads(stats.stdout)["queues"] if q["queue"] == "work"]
    assert (seen["ready"], seen["delayed"]) == (1, 0), "it waits in the outbox"
    monkeypatch.setenv("ACKBONE__BROKER", server.url)
    monkeypatch.setenv("ACKBONE__DEFAULT_QUEUE", "stream:task")
    monkeypatch.setenv("ACKBONE__QUEUES__WORK__CODEC", "standard")
    work()
    assert asked(home, "SELECT count(*) FROM outbox") == [(0,)]
