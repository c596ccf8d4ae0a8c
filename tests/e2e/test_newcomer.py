"""A new user's first hour: our wheel in an empty environment, and the commands that the documents
print, taken from the documents."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import (
    ROOT,
    Machine,
    blocks,
    build_wheel,
    commands,
    make_environment,
    text_of,
)
from tests.faults.waiting import wait_until

pytestmark = pytest.mark.xdist_group("newcomer")  # the wheel is built once

SAMPLE_ID = re.compile(r"\b01[0-9a-f]{6}(-[0-9a-f]{4})*(-[0-9a-f]{12})?\b")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    make_environment(folder / "venv", build_wheel(folder))
    return folder / "venv"


@pytest.fixture
def machine(environment: Path) -> Iterator[Machine]:
    machine = Machine(environment)
    yield machine
    machine.remove()


def test_the_environment_has_the_wheel_and_what_it_requires_alone(
    machine: Machine, environment: Path
) -> None:
    where = machine.run("python -c 'import ackbone; print(ackbone.__file__)'").stdout
    assert where.startswith(str(environment))
    check = machine.run("ACKBONE__BROKER=redis://localhost ackbone config check", code=10)
    assert "its driver is missing; install the extra 'redis'" in check.stdout


def test_readme(machine: Machine) -> None:
    readme = text_of("README.md")
    shutil.copytree(ROOT / "examples", machine.folder / "examples")
    cloned, make, send, install = commands(readme)
    assert install.startswith("pip install '/path/to/ackbone[")
    assert cloned.startswith("git clone ")
    assert make == "make run"
    (started,) = re.findall(r"\$\(BIN\)/(ackbone dev \S+)", text_of("Makefile"))
    machine.start(f".venv/bin/{started}", until="Ctrl+C stops after the current runs.")
    machine.run(send)
    machine.shows("You said: hello")
    machine.shows("succeeded")

    (agent,) = blocks(readme, "python")
    (machine.folder / "agent.py").write_text(agent)
    (command,) = re.findall(r"`(ackbone run agent\.py:app[^`]*)`", readme)
    queues = "default (1 handler), packing (1 handler)"
    machine.start(command, until=f"ready: 4 workers, broker sqlite, queues {queues}\n")
    ended = sent(machine, "ackbone send --type order")
    assert "succeeded" in ended
    assert "Thank you, a parcel is on its way." in ended
    machine.stop()


def sent(machine: Machine, command: str) -> str:
    """Send a message, and wait for its end; what `trace` then shows."""
    message = machine.run(command).stdout.strip()

    def has_ended() -> bool:
        shown = json.loads(machine.run(f"ackbone trace {message} --json").stdout)
        return any(task["status"] in ("succeeded", "failed") for task in shown["tasks"])

    wait_until(has_ended, f"the end of {message}")
    return machine.run(f"ackbone trace {message}").stdout


def ends(machine: Machine) -> dict[str, int]:
    """How the messages of `prod.yaml` ended."""
    stats = json.loads(machine.run("ackbone stats --json --config prod.yaml").stdout)
    found: dict[str, int] = stats["statuses"]["default"]
    return found


def test_quickstart(machine: Machine) -> None:
    """Every command of the page, in its order."""
    page = text_of("docs/quickstart.md")
    shutil.copytree(ROOT / "examples", machine.folder / "examples")
    for name, _, block in re.findall(
        r"^Save this as `(\S+)`:\n\n```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    ):
        (machine.folder / name).write_text(block)
    walk = Walk(machine)
    for command in commands(page):
        walk.take(command)
    done = walk.done
    killed = next(shown for line, shown in done.items() if line.startswith("ackbone trace"))
    assert [killed.count(name) for name in ("task.reclaimed", "task.succeeded")] == [1, 1]
    assert killed.count("reply to") == 1
    charges = (machine.folder / "charges.log").read_text().splitlines()
    assert len({json.loads(line)["key"] for line in charges}) == len(charges) == 3
    assert "the ledger is intact" in done["ackbone ledger verify"]
    assert "replayed as" in next(shown for line, shown in done.items() if "--set" in line)
    assert ends(machine) == {"succeeded": 1}
    assert (machine.folder / "prod-data" / "ackbone.db").exists()


class Walk:
    """Carries out a page's commands as its reader does: with the ids and processes of this run."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._message = ""
        """The id that the last `send` printed."""
        self.done: dict[str, str] = {}
        """What each command, and the terminal of those that go on, showed."""

    def take(self, command: str) -> None:
        machine = self._machine
        # A reader has ten seconds to find the worker and to kill it; this one is quicker.
        line = SAMPLE_ID.sub(self._id, command.replace('"think_s": 10', '"think_s": 6'))
        if command.startswith(("git clone", "source ")):
            return
        if command == "make run":
            machine.start("ackbone dev examples/echo.py:app", until="Ctrl+C stops")
            machine.run('ackbone send --type chat --payload \'{"text": "hello"}\'')
            machine.shows("You said: hello")
            machine.shows("succeeded")
            return
        if command.startswith("ackbone run") and "--until-idle" not in command:
            machine.start(line, until="ready: ")
            return
        if command.startswith("kill -9"):
            line = f"kill -9 {self._busy_worker()}"
        if command.startswith("ackbone trace"):
            self._until(f"ackbone trace {self._message}", "task.succeeded")
        if command.startswith(("ackbone dlq list", "ackbone dlq replay")):
            self._until(f"ackbone dlq show {self._message} || true", self._message)
        self.done[command] = shown = machine.run(line).stdout
        if command.startswith("ackbone send"):
            self._message = shown.strip()

    def _id(self, sample: re.Match[str]) -> str:
        return self._message

    def _until(self, command: str, text: str) -> None:
        wait_until(lambda: text in self._machine.run(command).stdout, f"{text} in {command}")

    def _busy_worker(self) -> str:
        """The process that `stats` shows with a run."""
        found: list[str] = []

        def is_there() -> bool:
            shown = self._machine.run("ackbone stats").stdout
            found[:] = re.findall(r"@\S+:(\d+)  alive, 1 running", shown)
            return bool(found)

        wait_until(is_there, "a worker with a run")
        return found[0]


SHOP = """
from ackbone import App, Context

app = App()


@app.on("order", retries=0)
async def take_order(ctx: Context) -> str:
    return price(ctx.payload)


def price(order: dict) -> str:
    if order["currency"] not in ("EUR", "USD"):
        raise ValueError(f"unknown currency {order['currency']}")
    return f"{order['amount']} {order['currency']}"
"""
SEND = "ackbone send --config prod.yaml --type order --payload"
RUN = "ackbone run shop.py:app --config prod.yaml --until-idle"


@pytest.fixture
def shop(machine: Machine) -> Machine:
    """An agent of one's own, with settings of its own, and an order that it cannot take."""
    (machine.folder / "shop.py").write_text(SHOP)
    (settings,) = blocks(text_of("docs/quickstart.md"), "yaml")
    (machine.folder / "prod.yaml").write_text(settings)
    machine.run(f"""{SEND} '{{"amount": 7, "currency": "XYZ"}}'""")
    return machine


def test_a_dead_letter_is_fixed_with_the_commands_of_its_guide(shop: Machine) -> None:
    shop.run(RUN)
    repairs = [
        command
        for command in commands(text_of("docs/guides/dead-letters.md"))
        if command.startswith("ackbone dlq replay --error 'unknown currency' --set")
    ]
    dry, real = (f"{command} --config prod.yaml" for command in repairs)
    assert "--dry-run" in dry
    assert "1" in shop.run(dry).stdout
    assert "replayed as" in shop.run(real).stdout
    shop.run(RUN)
    assert ends(shop) == {"failed": 1, "succeeded": 1}
    assert "unknown currency" not in shop.run("ackbone dlq list --config prod.yaml").stdout
    assert not (shop.folder / ".ackbone").exists()


def test_a_failing_handler_shows_where_it_failed(shop: Machine) -> None:
    """The user's own file and line: while it runs, and later with the dead letter."""
    number = SHOP[: SHOP.index("raise ValueError")].count("\n") + 1
    place = re.compile(rf'shop\.py(\\?", line |:){number}\b')  # quotes are escaped in JSON lines
    assert place.search(shop.run(RUN).stderr)
    letter = json.loads(shop.run("ackbone dlq list --json --config prod.yaml").stdout)
    assert place.search(shop.run(f"ackbone dlq show {letter['id']} --config prod.yaml").stdout)
