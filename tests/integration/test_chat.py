"""`ackbone chat`, as a process: in a terminal, and through pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ackbone.cli.session import Exit

LIMIT_S = 90
CHAT = [sys.executable, "-m", "ackbone", "chat"]
APP = """
from ackbone import App, Context, FinalError

app = App(name="mine")

@app.on("ask", queue="questions")
async def ask(ctx: Context) -> None:
    if ctx.payload["text"] == "bad":
        raise FinalError("I cannot")
    await ctx.reply(ctx.payload["text"].upper())
    print("not ours")
"""


@pytest.fixture(autouse=True)
def _own_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "cwd").mkdir()
    monkeypatch.chdir(home / "cwd")
    monkeypatch.delenv("ACKBONE_CONFIG", raising=False)


class Terminal:
    """A chat in a terminal, and the person before it."""

    def __init__(self, *options: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [*CHAT, *options], {**os.environ, "TERM": "xterm"})
        self.seen = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for it, after what was waited for before."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < deadline, (pattern, self.seen)
            if select.select([self._fd], [], [], 0.2)[0]:
                self.seen += self._read()
        self.seen = self.seen[found.end() :]
        return found

    def _read(self) -> str:
        try:
            return os.read(self._fd, 65_536).decode("utf-8", "replace")
        except OSError:
            raise AssertionError(f"it ended: {self.seen}") from None

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it said at last."""
        rest = self.seen
        try:
            while part := os.read(self._fd, 65_536):
                rest += part.decode()
        except OSError:  # the other end is closed
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status), rest

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


@contextmanager
def terminal(*options: str) -> Iterator[Terminal]:
    found = Terminal(*options)
    try:
        yield found
    finally:
        found.close()


def piped(*options: str, lines: str, code: int = 0) -> list[str]:
    """What it says to these lines, until their end."""
    done = subprocess.run(
        [*CHAT, *options], input=lines, capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return (done.stdout or done.stderr).splitlines()


# ── the dialogue ─────────────────────────────────────────────────────────────────────────────────


def test_a_message_is_queued_first_and_delivered_then():
    with terminal() as chat:
        chat.until("You > ")
        chat.type("Hello, how is the weather?\n")
        short = chat.until(r"\[delivery\] enqueued: (\w{8}) -> terminal\r\n")[1]
        chat.until(r"Agent > You said: Hello, how is the weather\?\r\n")
        chat.until(rf"\[delivery\] sent: {short} \(ack\)\r\n")
        chat.until("You > ")
        chat.type("/queue\n")
        chat.until("no waiting replies: all were sent\r\n")
        chat.type("/failed\n")
        chat.until("no failed replies\r\n")
        chat.type("/quit\n")
        assert chat.end()[0] == 0


def test_failures_are_waited_out_and_shown():
    with terminal("--wait-scale", "0.001") as chat:
        chat.until("You > ")
        chat.type("/simulate-failure 3\n")
        chat.until("the next 3 sends will fail")
        chat.type("This one will be tried again.\n")
        short = chat.until(r"\[delivery\] enqueued: (\w{8}) -> terminal\r\n")[1]
        failed = rf"\[delivery\] FAILED: {short} \(simulated failure\)"
        for number, wait in ((1, "5s"), (2, "25s"), (3, "120s")):
            chat.until(rf"{failed}, retry {number}, backoff {wait}\r\n")
        chat.until("Agent > You said: This one will be tried again.\r\n")
        chat.until(rf"\[delivery\] sent: {short} \(ack, after 3 retries\)\r\n")
        chat.type("\x04")
        assert chat.end()[0] == 0


def test_what_waits_when_one_leaves_is_delivered_after_a_restart():
    with terminal() as chat:
        chat.until("You > ")
        chat.type("/simulate-failure 6\n")
        chat.until("6 sends will fail")
        chat.type("Keep this.\n")
        short = chat.until(r"FAILED: (\w{8}) \(simulated failure\), retry 1, backoff 5s")[1]
        chat.type("/queue\n")
        chat.until(rf"  {short} -> terminal, .* old, 1 retry, next attempt (in \d+ (s|ms)|now)\r\n")
        chat.type("\x03")  # Ctrl+C
        code, said = chat.end()
        assert code == 0, said
        assert "1 waiting reply is kept for the next start" in said
        assert "Traceback" not in said
    with terminal() as chat:
        chat.until(
            r"Delivery Queue Recovery:\r\n"
            r"  Pending: 1 item \(oldest: \d+s ago, 1 retry\)\r\n"
            r"  Failed:  0 items\r\n"
            r"  Resuming delivery\.\.\.\r\n"
        )
        chat.until(r"Agent > You said: Keep this\.\r\n")
        chat.until(rf"\[delivery\] sent: {short} \(ack, after 1 retry\)\r\n")
        chat.type("\x04")
        assert chat.end()[0] == 0


def test_what_was_given_up_is_shown_and_sent_again():
    with terminal("--wait-scale", "0") as chat:
        chat.until("You > ")
        chat.type("/simulate-failure 6\n")
        chat.until("6 sends will fail")
        chat.type("Once more.\n")
        short = chat.until(r"FAILED: (\w{8}) \(simulated failure; given up after 6 attempts\)")[1]
        chat.type("/failed\n")
        chat.until(rf"  {short} -> terminal, failed, .* old: simulated failure; given up")
        chat.type("/retry\n")
        chat.until("write /retry ID")
        chat.type("/retry zzzz\n")
        chat.until("ackbone: there is no reply 'zzzz'")
        chat.type(f"/retry {short}\n")
        chat.until("Agent > You said: Once more.\r\n")
        chat.until(rf"\[delivery\] sent: {short} \(ack\)\r\n")
        chat.type("/quit\n")
        assert chat.end()[0] == 0


# ── through pipes ────────────────────────────────────────────────────────────────────────────────


def test_what_comes_through_a_pipe_is_answered_before_it_ends():
    said = piped(lines="one\ntwo\n/nonsense\n/simulate-failure x\n//tmp\n")
    assert "You > " not in "".join(said)
    answers = [line for line in said if line.startswith("Agent > ")]
    assert answers == [f"Agent > You said: {text}" for text in ("one", "two", "/tmp")]
    assert "there is no command /nonsense; /help lists them" in said
    assert "write a number: /simulate-failure 3" in said


def test_help_names_every_command():
    said = "\n".join(piped(lines="/help\n"))
    for name in ("/queue", "/failed", "/retry", "/simulate-failure", "/help", "/quit"):
        assert name in said


def test_programs_read_json():
    said = [json.loads(line) for line in piped("--json", lines="hi\n")]
    (reply,) = [each["reply"] for each in said if "reply" in each]
    assert reply["content"] == "You said: hi"
    assert {"line": f"[delivery] sent: {reply['id'][:8]} (ack)"} in said


def test_control_characters_of_a_reply_do_nothing():
    (answer,) = [each for each in piped(lines="a\x1b[2Jb\n") if each.startswith("Agent")]
    assert answer == "Agent > You said: a\\e[2Jb"


# ── one's own app ────────────────────────────────────────────────────────────────────────────────


def test_ones_own_app_answers_and_its_failures_are_told():
    Path("app.py").write_text(APP)
    said = piped("--type", "ask", lines="hi\nbad\nho\n")
    assert said[0] == "mine is listening. Type a message, or /help."
    # What the handler prints itself goes the same way, and keeps to no line.
    text = "\n".join(said)
    for wanted in (
        "Agent > HI",
        "Agent > HO",
        r"\[message\] failed: .*I cannot; ackbone dlq show \S+",
    ):
        assert re.search(wanted, text), (
            said,
            Path(os.environ["ACKBONE_HOME"], "chat.log").read_text(),
        )


def test_a_type_without_a_handler_is_a_mistake(home: Path):
    Path("mine.py").write_text(APP)
    said = "\n".join(piped("mine:app", lines="hi\n", code=Exit.USAGE))
    assert "no handler for 'chat'; it has handlers for: ask" in said
    assert not (home / "ackbone.db").exists()


def test_other_log_lines_go_to_a_file(home: Path):
    piped("--log-level", "info", lines="hi\n")
    log = home / "chat.log"
    assert "worker" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


# ── other starts ─────────────────────────────────────────────────────────────────────────────────


def test_run_and_dev_say_what_an_earlier_process_left():
    piped(lines="/simulate-failure 1\nhi\n")
    report = "Delivery Queue Recovery:\n  Pending: 1 item (oldest: "
    run = subprocess.run(
        [sys.executable, "-m", "ackbone", "run", "ackbone.cli.demo:app", "--until-idle"],
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert report in run.stderr
    with subprocess.Popen(
        [sys.executable, "-m", "ackbone", "dev"], stdout=subprocess.PIPE, text=True
    ) as dev:
        assert dev.stdout is not None
        seen = ""
        try:
            while "Resuming delivery..." not in seen:
                line = dev.stdout.readline()
                assert line, seen
                seen += line
        finally:
            dev.terminate()
        assert report in seen
