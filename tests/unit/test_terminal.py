"""The terminal channel: replies appear at once, in order, at least once, and harmless."""

import asyncio
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ackbone import App, Context
from ackbone.composition.background import relays_of
from ackbone.config import load_config
from ackbone.core.errors import RateLimited
from ackbone.core.outbound.delivery import Merges, Outbound, unlimited
from ackbone.core.text import lines, one_line
from ackbone.delivery.channels.terminal_channel import TerminalChannel
from ackbone.engine.relays import Relay
from ackbone.testing import Signal

CHANNELS = {"terminal": unlimited}
ECHO = Path(__file__).parents[2] / "examples" / "echo.py"


def reply(content: str, *, to: str = "ann") -> Outbound:
    return Outbound(id="x", tenant_id="acme", channel="terminal", recipient=to, content=content)


async def test_a_reply_is_a_line():
    screen: list[str] = []
    await TerminalChannel(write=screen.append).send(reply("hello"))
    assert screen == ["[reply] to ann: hello\n"]


async def test_what_may_have_been_printed_before_is_marked():
    """A worker that died after it printed, and before it said so."""
    screen: list[str] = []
    again = msgspec.structs.replace(reply("hello"), in_doubt=True)
    await TerminalChannel(write=screen.append).send(again)
    assert screen == ["[reply] to ann: (may be a repeat) hello\n"]


async def test_several_replies_are_lines_of_their_own():
    screen: list[str] = []
    channel = TerminalChannel(write=screen.append)
    assert isinstance(channel, Merges)
    assert channel.merges
    merged = channel.merged([reply("one\n[reply] to ann: forged"), reply("two")])
    assert merged.id == "x"
    await channel.send(merged)
    assert screen == ["[reply] to ann: one\n    [reply] to ann: forged\n[reply] to ann: two\n"]


async def test_control_characters_cannot_move_the_cursor_or_forge_a_reply():
    screen: list[str] = []
    text = "a\x1b[2Jb\n[reply] to bob: forged\r\nend\u202e"
    await TerminalChannel(write=screen.append).send(reply(text, to="a\nb"))
    assert "".join(screen) == (
        "[reply] to a\\nb: a\\e[2Jb\n    [reply] to bob: forged\n    end\\u202e\n"
    )


async def test_a_screen_that_is_gone_costs_a_reply_nothing():
    def broken(text: str) -> None:
        raise BrokenPipeError("gone")

    with pytest.raises(RateLimited, match="cannot be printed: gone"):
        await TerminalChannel(write=broken).send(reply("hello"))


def test_escapes():
    assert one_line("a\tb\0\x9b\u2028é") == "a\\tb\\x00\\x9b\\u2028é"
    assert one_line("\ud800") == "\\ud800"
    assert lines("a\nb\x07") == "a\n    b\\x07"


# ── wired ────────────────────────────────────────────────────────────────────────────────────────


def terminal_relay(app: App, write: Any) -> Relay:
    app.channel(TerminalChannel(write=write))
    (relay,) = (r for r in relays_of(app, spawn_solo=False) if r.name == "deliveries")
    return relay


async def test_a_reply_rings_the_bell_of_the_terminal(home):
    """The loop would look by itself only after an hour: what wakes it is the commit."""
    app = App(load_config(environ={}, cwd=home, overrides={"home": str(home)}))
    printed: Signal[str] = Signal("printed")

    @app.on("chat", queue="q")
    async def answer(ctx: Context) -> None:
        await ctx.reply("at once", now=True)
        await ctx.reply("at the end")

    async with app:
        from msgspec.structs import replace

        relay = replace(terminal_relay(app, printed.emit), every_s=3600.0)
        worker = app.worker(relays=[relay])
        await worker.begin()
        await app.send("chat", {}, queue="q")
        await printed.wait_for(lambda text: "at once" in text, timeout=30)
        await printed.wait_for(lambda text: "at the end" in text, timeout=30)
        await worker.drain(1.0)


async def test_without_the_word_nothing_is_printed(home):
    app = App(load_config(environ={}, cwd=home, overrides={"home": str(home)}))
    async with app:
        names = {relay.name for relay in relays_of(app, spawn_solo=False)}
    assert "deliveries" not in names
    assert {"ledger anchor", "retention", "metrics"} <= names


def test_a_worker_on_a_real_terminal_prints_what_its_handlers_reply(home):
    environment = {**os.environ, "ACKBONE_HOME": str(home)}
    subprocess.run(
        [sys.executable, "-m", "ackbone", "send", "--type", "chat", "--payload", '{"text": "hi"}'],
        env=environment,
        check=True,
        capture_output=True,
        timeout=60,
    )
    primary, secondary = pty.openpty()
    worker = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ackbone.processes.worker_process",
            str(ECHO),
            "--until-idle",
            "--terminal",
        ],
        env=environment,
        stdout=secondary,
        stderr=subprocess.DEVNULL,
    )
    os.close(secondary)
    try:
        seen = b""
        deadline = time.monotonic() + 60
        while b"You said: hi" not in seen and time.monotonic() < deadline:
            if select.select([primary], [], [], 0.2)[0]:
                try:
                    seen += os.read(primary, 4096)
                except OSError:
                    break
        assert b"[reply] to -: You said: hi" in seen
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
        os.close(primary)


async def test_the_last_replies_are_printed_before_the_worker_ends(home):
    app = App(load_config(environ={}, cwd=home, overrides={"home": str(home)}))
    printed: list[str] = []
    done = asyncio.Event()

    @app.on("chat", queue="q")
    async def answer(ctx: Context) -> None:
        await ctx.reply("bye")
        done.set()

    async with app:
        from msgspec.structs import replace

        relay = terminal_relay(app, printed.append)
        deaf = replace(relay, every_s=3600.0, bell=None)  # only the last step prints
        worker = app.worker(relays=[deaf])
        await worker.begin()
        await app.send("chat", {}, queue="q")
        await asyncio.wait_for(done.wait(), 30)
        await worker.drain(5.0)
    assert printed == ["[reply] to -: bye\n"]
