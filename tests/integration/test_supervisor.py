"""`ackbone run` over workers that fail: when it starts another, and when it gives up."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ackbone.processes import supervisor, worker_place
from tests.faults.waiting import PATIENCE_S, wait_until

APP = """
import os, sys
from pathlib import Path
from ackbone import App, Context

home = Path(os.environ["ACKBONE_HOME"])
starts = home / "starts"
with starts.open("a") as file:
    file.write("x")
n = starts.stat().st_size  # the number of this start

{trouble}

app = App(name="trouble")

@app.on("touch")
async def touch(ctx: Context) -> None:
    (home / ctx.payload["file"]).touch()

@app.on("die")
async def die(ctx: Context) -> None:
    if ctx.payload < 0:
        os.kill(os.getpid(), -ctx.payload)
    os._exit(ctx.payload)
"""


@pytest.fixture
def target(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home / "trouble.py"


def starts(home: Path) -> int:
    return len((home / "starts").read_text()) if (home / "starts").exists() else 0


def ackbone(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ackbone", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@contextmanager
def running(home: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ackbone run`, its talk in `run.log`; whatever is left of it is ended."""
    with (home / "run.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ackbone", "run", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_it_gives_up_when_no_start_succeeds(home: Path, target: Path) -> None:
    target.write_text(APP.format(trouble="os.kill(os.getpid(), 11)"))
    done = ackbone("run", f"{target}:app", "--until-idle")
    assert done.returncode == 1, done.stderr
    assert starts(home) == 5
    told = done.stderr[done.stderr.rindex("giving up") :]
    assert "5 starts in a row" in told
    assert "killed by SIGSEGV" in done.stderr
    assert "could not say why" in told
    assert f"{target}:app" in told, "and so is what to look at"


@pytest.mark.parametrize(
    ("trouble", "words", "code"),
    [
        ('raise RuntimeError("no key")', "could not be loaded: RuntimeError: no key", 1),
        ('sys.exit("no key")', "could not be loaded: SystemExit: no key", 1),
        ("sys.exit(0)", "could not be loaded: SystemExit: 0", 1),
        (
            'Path("ackbone.yaml").write_text("channels: {hook: {connection: {}}}")',
            "channels.hook: no kind 'hook'",
            2,
        ),
    ],
)
def test_an_app_that_cannot_start_is_reported_once(
    target: Path, trouble: str, words: str, code: int
) -> None:
    target.write_text(APP.format(trouble=trouble))
    done = ackbone("run", f"{target}:app", "--workers", "3")
    assert done.returncode == code, done.stderr
    assert done.stderr.count(words) == 1
    assert "another one starts" not in done.stderr
    assert "ready" not in done.stderr


@pytest.mark.parametrize("command", ["run", "dev"])
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ('raise RuntimeError("no key")', "RuntimeError: no key"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("1 +", "SyntaxError: invalid syntax"),
    ],
)
def test_what_is_wrong_with_an_app_is_said_without_the_way_there(
    target: Path, command: str, trouble: str, said: str
) -> None:
    target.write_text(APP.format(trouble=trouble))
    done = ackbone(command, f"{target}:app")
    assert done.returncode == 1, done.stderr
    assert f"{target}:app could not be loaded: " in done.stderr
    assert said in done.stderr
    assert target.name in done.stderr.replace(f"{target}:app", "")
    for noise in ("internal error", "importlib", "Traceback", "worker_process.py", "load_app.py"):
        assert noise not in done.stderr


def test_it_starts_again_after_failures_that_pass(home: Path, target: Path) -> None:
    target.write_text(APP.format(trouble="if n < 4: os._exit(1)"))
    done = ackbone("run", f"{target}:app", "--until-idle")
    assert done.returncode == 0, done.stderr
    assert starts(home) == 4


BLIP = """
from ackbone.core.errors import StoreUnavailable
from ackbone.store.sqlite.store import SqliteStore

is_empty, asked = SqliteStore.is_empty, []

async def away_once(self, names):
    asked.append(names)
    if len(asked) == 1:
        raise StoreUnavailable("away for a moment")
    return await is_empty(self, names)

SqliteStore.is_empty = away_once
"""


def test_a_store_that_gives_no_answer_is_not_taken_for_idle(home: Path, target: Path) -> None:
    target.write_text(APP.format(trouble=BLIP))
    payload = '{"file": "touched"}'
    sent = ackbone("send", "--type", "touch", "--payload", payload, "--delay", "2")
    assert sent.returncode == 0, sent.stderr
    done = ackbone("run", f"{target}:app", "--until-idle")
    assert done.returncode == 0, done.stderr
    assert (home / "touched").exists(), "it ended with a message left"


class Started:
    """A worker process that does what it is told."""

    pid = 1

    def __init__(self) -> None:
        self.told: list[int] = []

    def send_signal(self, number: int) -> None:
        self.told.append(number)

    def poll(self) -> int | None:
        return -self.told[0] if self.told else None


def test_a_worker_that_was_being_started_is_asked_to_stop_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal finds its place empty: killed at the end of the grace, what it runs by then would
    count as crashed."""
    process = Started()
    watching = supervisor.Supervisor("app")

    def spawn(*args: object, **options: object) -> Started:
        watching.stop()  # as the handler of a signal, while the process is made
        return process

    monkeypatch.setattr(worker_place, "spawn", spawn)
    (place,) = watching._places
    watching._look(place)
    watching._look(place)
    assert process.told == [signal.SIGTERM]
    assert place.done


def test_after_a_crash_the_next_one_begins_at_once_and_with_few_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[str] = []

    def spawn(target: str, options: list[str], *, pass_fds: list[int]) -> Started:
        given[:] = options
        os.write(pass_fds[0], words)
        return Started()

    monkeypatch.setattr(worker_place, "spawn", spawn)
    place = worker_place.WorkerPlace()
    words, ends = b"up\n\n", []
    for said, code in (
        (b"work\n", -signal.SIGSEGV),  # a message ended it
        (b"", -signal.SIGSEGV),  # before it ran any message
        (b"", -signal.SIGSEGV),
        (b"work\nstops\n", os.EX_SOFTWARE),  # it failed
        (b"work\n", worker_place.EXIT_RECYCLE),
        (b"work\nstops\n", os.EX_OK),
    ):
        words = b"up\n\n" + said
        place.start("app", [], None)
        ends.append(("--cautious" in given, place.ended(code), place.pause_s(code)))
    assert ends[:5] == [
        (False, False, 0.0),
        (True, False, 0.1),
        (False, False, 0.2),
        (False, False, 0.4),
        (False, False, 0.0),
    ]
    assert ends[5][:2] == (False, True), "the one end in good order"


def test_it_goes_on_while_there_is_no_room_for_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    watching = supervisor.Supervisor("app", say=said.append)
    watching._was_up = True

    def spawn(*args: object, **options: object) -> Started:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(worker_place, "spawn", spawn)
        (place,) = watching._places
        watching._look(place)
    assert "could not be started" in said[0]
    monkeypatch.setattr(worker_place, "spawn", lambda *args, **options: Started())

    def has_tried_again() -> bool:
        watching._look(place)
        return place.process is not None

    wait_until(has_tried_again, "the next try")


def test_workers_that_are_up_go_on_without_the_one_that_fails(home: Path, target: Path) -> None:
    target.write_text(APP.format(trouble='if n > 1: raise RuntimeError("only one")'))
    with running(home, f"{target}:app", "--workers", "2") as process:
        wait_until(lambda: starts(home) > 6, "the second one failed six times")
        sent = ackbone("send", "--type", "touch", "--payload", '{"file": "touched"}')
        assert sent.returncode == 0, sent.stderr
        wait_until((home / "touched").exists, "the first one works")
        assert process.poll() is None
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    log = (home / "run.log").read_text()
    assert log.count("RuntimeError: only one") == 1, "later failures refer to the first"
    assert "(exit code 1): as before; another one starts in" in log
    assert "ready:" not in log, "one of the two is not"


def test_while_the_server_is_away_it_says_once_what_it_waits_for(
    home: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACKBONE__BROKER", "redis://127.0.0.1:1/0")
    target.write_text(APP.format(trouble=""))
    log = home / "run.log"
    with running(home, f"{target}:app") as process:
        wait_until(lambda: log.read_text().count("another one starts") > 2, "three starts")
        process.terminate()
        process.wait(PATIENCE_S)
    assert log.read_text().count("waiting for the server: redis://127.0.0.1:1/0") == 1
    assert "check `broker` and `store` in ackbone.yaml. Messages are kept." in log.read_text()


def test_it_says_what_it_serves_once_all_workers_are_up(home: Path, target: Path) -> None:
    target.write_text(APP.format(trouble="") + '\n\napp.on("parcel", queue="packing")(touch)\n')
    ready = "ready: 2 workers, broker sqlite, queues default (2 handlers), packing (1 handler)\n"
    with running(home, f"{target}:app", "--workers", "2") as process:
        wait_until(lambda: ready in (home / "run.log").read_text(), "the ready line")
        (workers,) = [
            line for line in ackbone("stats").stdout.splitlines() if line.startswith("workers")
        ]
        assert "2 alive" in workers
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert (home / "run.log").read_text().count("ready:") == 1


@pytest.mark.parametrize(
    ("code", "fate"),
    [
        (9, "exit code 9"),
        (os.EX_OK, "exit code 0"),
        (os.EX_SOFTWARE, "exit code 70"),
        (-40, "killed by signal 40"),  # one of those without a name
    ],
)
def test_poison_is_no_failed_start(
    home: Path, target: Path, monkeypatch: pytest.MonkeyPatch, code: int, fate: str
) -> None:
    """More workers die one after the other than starts may fail: each was up before. None of the
    codes makes an end that a message caused an orderly one."""
    monkeypatch.setenv("ACKBONE__WORKER__SLOTS", "1")
    monkeypatch.setenv("ACKBONE__WORKER__CRASH_BUDGET", "2")
    target.write_text(APP.format(trouble=""))
    for n in range(3):
        payload = ("--payload", str(code))
        assert ackbone("send", "--type", "die", "--id", f"die-{n}", *payload).returncode == 0
    done = ackbone("run", f"{target}:app", "--until-idle")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"ended ({fate})") >= 6
    assert ackbone("dlq", "list").stdout.count("crash_budget") == 3
