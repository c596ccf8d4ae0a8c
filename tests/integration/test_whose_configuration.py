"""Which configuration counts: that of the command, in every process, when the app is opened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from ackbone import App, Config, Context
from ackbone.core.errors import ConfigError
from ackbone.processes.load_app import load_app
from tests.faults.waiting import PATIENCE_S, wait_until

AGENT = """
import os
from ackbone import App, Config, Context, load_config

app = App({own})

@app.on("order")
async def take(ctx: Context) -> str:
    await ctx.reply("taken")
    return str(app.config.home)

@app.on("child", isolation="process")
def child(ctx: Context) -> str:
    return str(app.config.home)

@app.on("die")
async def die(ctx: Context) -> str:
    with open("deaths", "a") as file:
        file.write("x")
    if os.path.getsize("deaths") <= 2:
        os._exit(9)
    return str(app.config.home)
"""


@pytest.fixture(name="folder")
def project_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an agent and a second configuration; nothing is said in the environment."""
    monkeypatch.delenv("ACKBONE_HOME")
    monkeypatch.delenv("ACKBONE_CONFIG", raising=False)
    monkeypatch.chdir(home)
    (home / "agent.py").write_text(AGENT.format(own=""))
    (home / "prod").mkdir()
    (home / "prod" / "prod.yaml").write_text("home: data\n")
    return home


def ackbone(
    *arguments: str, code: int = 0, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ackbone", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **(variables or {})},
    )
    assert done.returncode == code, done.stderr
    return done


@contextmanager
def dev(folder: Path, *arguments: str) -> Iterator[Path]:
    """`ackbone dev` in the background; gives the file that it writes to."""
    log = folder / "dev.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "ackbone", "dev", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("way", "type_"),
    [
        ("--config", "order"),
        ("--home", "order"),
        ("ACKBONE_CONFIG", "order"),
        ("--config", "child"),
        ("--config", "die"),
    ],
)
def test_a_message_runs_under_the_configuration_it_was_sent_with(
    folder: Path, way: str, type_: str
) -> None:
    """In the worker, in an isolated child, and in the child that runs a suspect alone."""
    place = "prod/prod.yaml" if way.endswith(("config", "CONFIG")) else "prod/data"
    options = [way, place] if way.startswith("--") else []
    variables = {} if options else {way: place}
    ackbone("send", "--type", type_, "--id", "m1", *options, variables=variables)
    ackbone("run", "agent.py:app", "--until-idle", *options, variables=variables)
    trace = json.loads(ackbone("trace", "m1", "--json", *options, variables=variables).stdout)
    (task,) = trace["tasks"]
    assert task["status"] == "succeeded"
    assert not (folder / ".ackbone").exists(), "nobody wrote into the project's own"


def test_dev_runs_under_the_configuration_of_the_command(folder: Path) -> None:
    with dev(folder, "agent.py:app", "--config", "prod/prod.yaml") as log:
        wait_until(lambda: "Ctrl+C stops" in log.read_text(), "it greets")
        shown = log.read_text()
        assert str(folder / "prod" / "data" / "ackbone.db") in shown
        assert f"ACKBONE_CONFIG={folder}/prod/prod.yaml" in shown, "its examples go there, too"
        ackbone("send", "--type", "order", "--config", "prod/prod.yaml")
        wait_until(lambda: "succeeded" in log.read_text(), "the message ran")
    assert not (folder / ".ackbone").exists()


@pytest.mark.parametrize(
    ("command", "own", "is_own"),
    [
        ("run", '"own.yaml"', "own.yaml"),
        ("run", "Config()", "a Config made in Python"),
        ("run", 'load_config("own.yaml")', "own.yaml"),
        ("dev", '"own.yaml"', "own.yaml"),
        ("chat", '"own.yaml"', "own.yaml"),
    ],
)
def test_a_configuration_that_contradicts_the_command_is_an_error_that_names_both(
    folder: Path, command: str, own: str, is_own: str
) -> None:
    (folder / "own.yaml").write_text("home: own\n")
    (folder / "agent.py").write_text(AGENT.format(own=own))
    done = ackbone(command, "agent.py:app", "--config", "prod/prod.yaml", code=2)
    assert is_own in done.stderr
    assert str(folder / "prod" / "prod.yaml") in done.stderr
    assert done.stderr.count("has a configuration of its own") == 1
    assert "ackbone is running" not in done.stdout
    assert not list(folder.glob("**/ackbone.db")), "nothing was begun"


def test_a_home_that_contradicts_the_environment_is_an_error_that_names_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "agent.py").write_text(AGENT.format(own='Config(home="own")'))
    monkeypatch.setenv("ACKBONE_HOME", "other")
    with pytest.raises(ConfigError, match=r"home .*/own\), and this command is told to use other"):
        load_app("agent.py:app")
    monkeypatch.setenv("ACKBONE_HOME", "own")
    assert load_app("agent.py:app").config.home == folder / "own"


def test_the_same_configuration_twice_is_no_contradiction(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "agent.py").write_text(AGENT.format(own='"prod/prod.yaml"'))
    monkeypatch.setenv("ACKBONE_CONFIG", str(folder / "prod" / "prod.yaml"))
    assert load_app("agent.py:app").config.home == folder / "prod" / "data"


CHANNELS = """
channels:
  hook: {connection: {}}
  telegram: {connection: {token: "1:x"}}
  mail: {kind: email, connection: {hots: mx}}
"""
NO_AIOHTTP = "import sys; sys.modules['aiohttp'] = None\n"


def test_check_says_what_run_and_dev_refuse_in_their_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ackbone.yaml").write_text(CHANNELS)
    (folder / "sitecustomize.py").write_text(NO_AIOHTTP)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    check = ackbone("config", "check", "--json", code=10)
    problems = json.loads(check.stdout)["problems"]
    assert problems[0].startswith("channels.hook: no kind 'hook'; write `kind:` with ")
    assert problems[1].startswith("channels.telegram needs aiohttp: install the extra 'telegram'")
    assert problems[2].startswith("channels.mail.connection.hots: unknown")
    findings = [
        json.loads(line) for line in ackbone("doctor", "--json", code=10).stdout.split("\n")[:-1]
    ]
    assert [c["detail"] for c in findings if c["finding"] == "refused"] == problems
    assert [c["finding"] for c in findings if c["name"] == "config"] == ["refused"] * len(problems)
    for command in ("run", "dev", "chat"):
        done = ackbone(command, "agent.py:app", code=2)
        said = [line.strip() for line in done.stderr.splitlines()]
        assert said == ["ackbone: the configuration is wrong:", *problems]
        assert done.stdout == "", "nothing was claimed before"


async def test_variables_that_are_set_after_the_import_count(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a test of the user's: the app is imported first, and every test has its own home."""
    monkeypatch.setenv("ACKBONE_HOME", str(home / "real"))
    app = App()
    ran: list[str] = []

    @app.on("order", retries=1)
    async def take(ctx: Context) -> None:
        ran.append(ctx.message.id)

    app.subscribe("webhook", "https://example.org")
    for name in ("first", "second"):
        monkeypatch.setenv("ACKBONE_HOME", str(home / name))
        monkeypatch.setenv("ACKBONE__QUEUES__DEFAULT__TIMEOUT_S", str(len(ran) + 1))
        async with app:
            await app.send("order", id=name)
            (handler,) = app.handlers
            assert handler.timeout_s == len(ran) + 1
            assert handler.retry.max_retries == 1
        await app.work(until_idle=True)
        assert (home / name / "ackbone.db").exists()
    assert ran == ["first", "second"]
    assert not (home / "real").exists()


async def test_what_is_registered_after_a_look_at_the_settings_counts(home: Path) -> None:
    app = App(Config(home=home))
    assert list(app.handlers) == []
    app.on("a")(print)
    app.on("b", queue="other")(print)
    assert {(each.queue, each.type) for each in app.handlers} == {("default", "a"), ("other", "b")}
    with pytest.raises(ValueError, match="'default' has two handlers for type 'a'"):
        app.on("a")(print)


SLOW = """
import asyncio
from pathlib import Path
from ackbone import App, Config, Context

app = App(Config(home="own", worker={"shutdown_timeout_s": 60}))

@app.on("slow")
async def slow(ctx: Context) -> None:
    Path("begun").touch()
    await asyncio.sleep(7)
    Path("ended").touch()

async def main() -> None:
    async with app:
        await app.send("slow")

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_stop_takes_as_long_as_the_apps_own_settings_allow(folder: Path) -> None:
    """The command's own settings allow five seconds, the app's a minute."""
    (folder / "slow.py").write_text(SLOW)
    subprocess.run([sys.executable, "slow.py"], check=True, timeout=PATIENCE_S)
    process = subprocess.Popen(
        [sys.executable, "-m", "ackbone", "run", "slow.py:app"],
        env={**os.environ, "ACKBONE__WORKER__SHUTDOWN_TIMEOUT_S": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((folder / "begun").exists, "the run has begun")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert (folder / "ended").exists()
