"""Isolated handlers in real child processes: what they do comes through, what kills them stays."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ackbone.app import App
from ackbone.core.errors import ConfigError, StoreUnavailable
from ackbone.core.events import HEARTBEAT, RELEASED, SUCCEEDED
from ackbone.engine.context import Context
from ackbone.engine.worker import EngineWorker
from ackbone.processes.load_app import load_app
from tests.integration.lab import ONE_FILE, Lab

TARGET = f"{Path(__file__).with_name('isolated_app.py')}:app"


class IsolatedLab(Lab):
    """The lab with the app of isolated_app.py, in this process and in its children."""

    app: App
    worker: EngineWorker

    async def begin(self) -> None:
        sys.modules.pop("isolated_app", None)
        shutil.copy(self._schema, self.path)
        self.app = load_app(TARGET)
        self.app.observe(self.events.emit)
        await self.app.open()
        self._apps.append(self.app)
        self.worker = await self.start(self.app)

    async def result(self, kind: str, payload: Any = None) -> Any:
        """Send one, wait until it succeeded, return its result."""
        receipt = await self.app.send(kind, payload)
        assert await self.ends(receipt.id) == ["succeeded"], self.letters()
        written = self.task(receipt.id)["result"]
        return None if written is None else msgspec.json.decode(written)

    def notes(self, word: str) -> list[str]:
        path = self.home / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(f"{word} ")]

    @property
    def children(self) -> list[int]:
        pids: list[int] = self.worker._executor._handling.isolated.pids  # type: ignore[union-attr]
        return pids


@pytest.fixture
async def lab(home: Path, schema: Path) -> AsyncIterator[IsolatedLab]:
    lab = IsolatedLab(home, ONE_FILE, schema)
    await lab.begin()
    yield lab
    await lab.close()
    assert [pid for pid in lab.children if alive(pid)] == []


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_it_runs_in_another_process_which_is_used_again(lab: IsolatedLab) -> None:
    payload = {"text": "grüße", "n": 2**100, "f": 0.1, "none": None}
    first = await lab.result("echo", payload)
    second = await lab.result("echo", [1, 2])
    assert first["payload"] == payload
    assert second["payload"] == [1, 2]
    assert first["pid"] == second["pid"] != os.getpid()
    assert await lab.result("here") == os.getpid(), "others run where they always did"


async def test_everything_of_the_context_comes_through(lab: IsolatedLab) -> None:
    receipt = await lab.app.send("full", tenant_id="acme")
    assert await lab.ends(receipt.id) == ["succeeded"]
    child = msgspec.json.decode(lab.task(receipt.id)["result"])
    assert lab.rows("SELECT message_id, queue FROM messages") == [(child, "children")]
    assert sorted(lab.replies()) == ["now", "now", "reply 2"]
    events = lab.history(receipt.id)
    beats = [data for kind, data in events if kind == HEARTBEAT]
    assert [(beat["attempt"], beat["step"]) for beat in beats] == [(1, 1), (2, 1)]
    assert {beat["consumer"] for beat in beats} == {lab.worker.worker.name}
    (final,) = (data for kind, data in events if kind == SUCCEEDED)
    assert final["usage"] == {"llm_calls": 1, "tokens": 15, "cost": 0.5}


async def test_a_plain_handler_has_the_same_context(lab: IsolatedLab) -> None:
    receipt = await lab.app.send("plain")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert msgspec.json.decode(lab.task(receipt.id)["result"]) == f"{receipt.id}:effect"
    assert lab.replies() == ["from a thread"]
    (final,) = (data for kind, data in lab.history(receipt.id) if kind == SUCCEEDED)
    assert final["usage"]["tokens"] == 5


@pytest.mark.parametrize(
    ("payload", "reason", "error", "attempts"),
    [
        ("final", "final_error", "FinalError: never", 1),
        ("wrong", "final_error", "Wrong: 7: mine", 1),
        ("key", "final_error", "KeyError: 'builtin'", 1),
        ("value", "retries_exhausted", "ValueError: builtin", 2),
        ("exit", "retries_exhausted", "HandlerFailed: the handler raised SystemExit: 3", 2),
        ("decode", "retries_exhausted", "UnicodeDecodeError: 'utf-8' codec can't decode", 2),
        ("group", "retries_exhausted", "ExceptionGroup: many (2 sub-exceptions)", 2),
    ],
)
async def test_errors_decide_as_if_raised_here(
    lab: IsolatedLab, payload: str, reason: str, error: str, attempts: int
) -> None:
    receipt = await lab.app.send("raise", payload)
    assert await lab.ends(receipt.id) == ["failed"]
    (letter,) = lab.letters()
    assert (letter["reason"], len(letter["history"])) == (reason, attempts)
    assert letter["error"].startswith(error)
    assert lab.task(receipt.id)["crashes"] == 0
    assert len(lab.children) == 1, "an error does not cost the process"


async def test_retry_after_and_parking_come_through(lab: IsolatedLab) -> None:
    busy = await lab.app.send("raise", "busy")
    await lab.has_event(busy.id, "task.retried")
    (data,) = (data for kind, data in lab.history(busy.id) if kind == "task.retried")
    assert data["after_s"] == 1000.0
    assert data["error"] == "UpstreamBusy: later"
    park = await lab.app.send("raise", "park")
    await lab.becomes(park.id, "parked")
    assert lab.task(park.id)["parked_kind"] == "waiting_approval"


async def test_outcomes_and_results_without_a_written_form(lab: IsolatedLab) -> None:
    dead = await lab.app.send("outcome", "dead")
    assert await lab.ends(dead.id) == ["failed"]
    assert [(x["reason"], x["error"]) for x in lab.letters()] == [("mine", "told so")]
    odd = await lab.app.send("outcome", "object")
    assert await lab.ends(odd.id) == ["failed"]
    assert lab.letters()[-1]["error"].startswith("InvalidResult: the handler returned a object")


async def test_a_handler_past_its_time_is_killed_with_all_it_started(lab: IsolatedLab) -> None:
    assert await lab.result("hang") == "second time lucky"
    first, second = lab.notes("hang")
    assert first.split()[2] != second.split()[2]
    await lab.until(lambda: not alive(int(first.split()[2])), "the first process is gone")
    (helper,) = lab.notes("helper")
    await lab.until(lambda: not alive(int(helper.split()[1])), "and so is what it started")


@pytest.mark.parametrize("how", ["exit", "segfault", "kill", "nameless signal"])
async def test_a_handler_that_kills_its_process(lab: IsolatedLab, how: str) -> None:
    """Only its own message suffers: a crash is counted, no retry is spent, the worker lives."""
    before = await lab.result("echo")
    receipt = await lab.app.send("crash", how)
    assert await lab.ends(receipt.id) == ["succeeded"]
    task = lab.task(receipt.id)
    assert msgspec.json.decode(task["result"]) == "2 0"
    assert task["crashes"] == 1
    assert lab.replies() == ["sent"], "what a dead run had to say is not sent"
    assert (await lab.result("echo"))["pid"] != before["pid"]
    assert lab.worker.failure is None
    assert len(lab.rows("SELECT 1 FROM workers")) == 1, "it is still the same worker"


async def test_effects_across_a_crash(lab: IsolatedLab) -> None:
    receipt = await lab.app.send("pay")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert msgspec.json.decode(lab.task(receipt.id)["result"]) == {"key": f"{receipt.id}:charge"}
    assert lab.notes("charged") == [f"charged {receipt.id}:charge"]


async def test_an_effect_nobody_knows_about(home: Path, schema: Path) -> None:
    """Killed in the middle of an effect: the message waits for a person, the effect is not tried.

    A second crash makes it a suspect, which a worker leaves to a child worker of the supervisor.
    """
    lab = IsolatedLab(home, ONE_FILE, schema)
    shutil.copy(schema, lab.path)
    with _supervised(home):
        await _send(home, "pay", "unknown", "pay-1")
        await lab.becomes("pay-1", "parked")
    assert lab.task("pay-1")["parked_kind"] == "effect_unknown"
    assert len(lab.notes("charged")) == 1
    assert len(lab.notes("lost")) == 1


async def test_a_poison_message_ends_when_its_crash_budget_is_spent(
    home: Path, schema: Path
) -> None:
    lab = IsolatedLab(home, ONE_FILE, schema)
    shutil.copy(schema, lab.path)
    with _supervised(home):
        await _send(home, "poison", None, "poison-1")
        assert await lab.ends("poison-1") == ["failed"]
    (letter,) = lab.letters()
    assert letter["reason"] == "crash_budget"
    assert len(lab.notes("poison")) == 3


async def test_two_run_side_by_side_and_the_rest_waits(lab: IsolatedLab) -> None:
    ids = [(await lab.app.send("together", n)).id for n in range(5)]
    assert await lab.ends(*ids) == ["succeeded"] * 5
    pids = {lab.task(message_id)["result"] for message_id in ids}
    assert len(pids) == 2, "as many processes as the setting says"


async def test_an_outage_of_the_store_spends_no_attempt(
    lab: IsolatedLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the handler is over while it waits for the store."""

    async def away(*args: object, **options: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as outage:
        outage.setattr(lab.app.store, "effect_begin", away)
        receipt = await lab.app.send("impatient")
        await lab.has_event(receipt.id, RELEASED)
    assert await lab.ends(receipt.id) == ["succeeded"], lab.letters()
    assert msgspec.json.decode(lab.task(receipt.id)["result"]) == 1


async def test_what_a_run_leaves_behind_writes_nothing_into_the_next_one(lab: IsolatedLab) -> None:
    (lab.home / "notes").touch()
    await lab.result("leaves")
    receipt = await lab.app.send("next")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert msgspec.json.decode(lab.task(receipt.id)["result"]) == f"{receipt.id}:charge"
    assert lab.replies() == []
    (final,) = (data for kind, data in lab.history(receipt.id) if kind == SUCCEEDED)
    assert "usage" not in final
    assert len(lab.children) == 1, "both ran in one process"


async def test_drain_hands_back_what_a_child_runs(lab: IsolatedLab) -> None:
    receipt = await lab.app.send("forever")
    (line,) = await lab.until(lambda: lab.notes("forever"), "it runs")
    pid = int(line.split()[1])
    drained = await lab.stop(lab.worker, 0.0)
    assert drained.handed_back == 1
    assert not alive(pid)
    task = lab.task(receipt.id)
    assert (task["status"], task["attempt"], task["crashes"]) == ("ready", 0, 0)
    assert RELEASED in lab.kinds(receipt.id)


async def test_a_child_holds_none_of_the_workers_files(lab: IsolatedLab) -> None:
    await lab.result("echo")
    (pid,) = lab.children
    held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    assert [path for path in held if str(lab.home) in path] == []


async def test_a_stop_of_the_whole_group_is_no_crash(lab: IsolatedLab) -> None:
    """As a service manager does it: every process gets the signal, the worker decides."""
    first = await lab.result("echo")
    os.kill(first["pid"], signal.SIGTERM)
    os.kill(first["pid"], signal.SIGINT)
    assert (await lab.result("echo"))["pid"] == first["pid"]


async def test_a_killed_worker_leaves_no_orphan(home: Path, schema: Path) -> None:
    lab = IsolatedLab(home, ONE_FILE, schema)
    shutil.copy(schema, lab.path)
    worker = _start(home)
    try:
        await _send(home, "forever", None, "f")
        (line,) = await lab.until(lambda: lab.notes("forever"), "it runs")
        worker.kill()
        worker.wait(30)
        await lab.until(lambda: not alive(int(line.split()[1])), "its child is gone, too")
    finally:
        worker.kill()
        worker.wait(30)


async def test_without_a_target_it_says_what_to_do(home: Path) -> None:
    app = App()

    @app.on("n", isolation="process")
    async def run(ctx: Context) -> None:
        return None

    async with app:
        with pytest.raises(ConfigError, match=r"ackbone run MODULE:APP.*app\.target"):
            app.worker()


async def test_an_app_that_a_child_cannot_load(lab: IsolatedLab) -> None:
    """The message is retried and kept, the worker goes on."""
    children: Any = lab.worker._executor._handling.isolated
    children._command[-1] = "no_such_module:app"
    receipt = await lab.app.send("full")
    assert await lab.ends(receipt.id) == ["failed"]
    assert "No module named 'no_such_module'" in lab.letters()[0]["error"]
    assert await lab.result("here") == os.getpid()


# -- real workers ---------------------------------------------------------------------------------


def _start(home: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "ackbone.processes.worker_process", TARGET, "--log-level", "error"],
        env={**os.environ, "ACKBONE_HOME": str(home)},
    )


@contextlib.contextmanager
def _supervised(home: Path) -> Iterator[None]:
    """A worker process as the supervisor starts it, ended in good order."""
    process = _start(home)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


async def _send(home: Path, kind: str, payload: Any, message_id: str) -> None:
    sys.modules.pop("isolated_app", None)
    app = load_app(TARGET)
    async with app:
        await app.send(kind, payload, id=message_id)
