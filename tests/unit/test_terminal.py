"""The terminal channel: replies appear at once, in order, at least once, and harmless."""

import asyncio
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import App, Context
from holdfast.config import load_config
from holdfast.core.store import Worker
from holdfast.core.text import lines, one_line
from holdfast.delivery.terminal import Terminal
from holdfast.engine.relays import Relay
from holdfast.services import relays_of
from holdfast.store.migrate import ensure_schema
from holdfast.store.sqlite.deliveries import SqliteDeliveries
from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing import FakeClock, Signal

ECHO = Path(__file__).parents[2] / "examples" / "echo.py"


class Desk:
    """A store with replies in it, and a screen."""

    def __init__(self, home: Path) -> None:
        self.clock = FakeClock()
        self.store = SqliteStore(home / "holdfast.db", clock=self.clock)
        self.deliveries = SqliteDeliveries(self.store)
        self.screen: list[str] = []
        self.worker = Worker(worker_id=0)

    async def open(self) -> None:
        ensure_schema(self.store.path)
        await self.store.open()
        self.worker = await self.store.register("w")

    def terminal(self) -> Terminal:
        return Terminal(self.deliveries, write=self.screen.append)

    async def reply(self, name: str, text: str, **columns: Any) -> None:
        now = self.clock.now_us()
        row = {
            "id": name,
            "tenant_id": "acme",
            "subscription": "q",
            "task_id": f"task of {name}",
            "channel": "terminal",
            "recipient": "ann",
            "content": text,
            "status": "pending",
            "due_at": now,
            "created_at": now,
            **columns,
        }
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        await self.store.file.write(
            lambda conn: conn.execute(
                f"INSERT INTO deliveries ({names}) VALUES ({marks})", tuple(row.values())
            )
        )

    async def statuses(self) -> dict[str, str]:
        return dict(
            await self.store.file.read(
                lambda conn: conn.execute("SELECT id, status FROM deliveries").fetchall()
            )
        )


@pytest.fixture
async def desk(home: Path) -> AsyncIterator[Desk]:
    desk = Desk(home)
    await desk.open()
    yield desk
    await desk.store.close()


async def test_replies_are_printed_oldest_first_and_marked_as_sent(desk):
    now = desk.clock.now_us()
    await desk.reply("late", "second", created_at=now + 5)
    await desk.reply("early", "first", priority=0)
    await desk.reply("elsewhere", "no", channel="telegram")
    await desk.reply("later", "no", due_at=now + 10_000_000)
    assert await desk.terminal().step(desk.worker) == 2
    assert "".join(desk.screen) == "[reply] to ann: first\n[reply] to ann: second\n"
    assert await desk.statuses() == {
        "late": "sent",
        "early": "sent",
        "elsewhere": "pending",
        "later": "pending",
    }
    assert await desk.terminal().step(desk.worker) == 0
    told = await desk.store.file.read(
        lambda conn: conn.execute(
            "SELECT tenant_id, subscription, task_id FROM event_log"
            " WHERE event_type = 'delivery.sent' ORDER BY rowid"
        ).fetchall()
    )
    assert sorted(told) == [("acme", "q", "task of early"), ("acme", "q", "task of late")]


async def test_more_than_one_batch_is_printed_in_one_step(desk):
    for n in range(230):
        await desk.reply(f"r{n:03}", f"text {n}", created_at=desk.clock.now_us() + n)
    assert await desk.terminal().step(desk.worker) == 230
    printed = "".join(desk.screen).splitlines()
    assert printed == [f"[reply] to ann: text {n}" for n in range(230)]


async def test_control_characters_cannot_move_the_cursor_or_forge_a_reply(desk):
    await desk.reply("x", "a\x1b[2Jb\n[reply] to bob: forged\r\nend\u202e", recipient="a\nb")
    await desk.terminal().step(desk.worker)
    assert "".join(desk.screen) == (
        "[reply] to a\\nb: a\\e[2Jb\n    [reply] to bob: forged\n    end\\u202e\n"
    )


async def test_a_printer_that_died_is_followed_by_one_that_prints_again(desk):
    """It had marked the reply, and perhaps printed it: nobody can say."""
    await desk.reply("x", "hello")
    dead = await desk.store.register("dead")
    taken = await desk.deliveries.take("terminal", limit=10, worker=dead)
    assert [reply.content for reply in taken] == ["hello"]
    assert await desk.terminal().step(desk.worker) == 0, "it is another's as long as that one lives"
    await desk.store.leave(dead)
    assert await desk.terminal().step(desk.worker) == 1
    await desk.deliveries.sent(["x"], worker=dead)  # too late, and harmless
    assert await desk.statuses() == {"x": "sent"}


async def test_a_late_printer_cannot_mark_what_is_no_longer_its_own(desk):
    await desk.reply("x", "hello")
    late = await desk.store.register("late")
    await desk.deliveries.take("terminal", limit=10, worker=late)
    await desk.store.leave(late)
    await desk.deliveries.recover("terminal", worker=desk.worker)
    await desk.deliveries.sent(["x"], worker=late)
    assert await desk.statuses() == {"x": "pending"}


async def test_a_screen_that_is_gone_leaves_replies_pending(desk):
    await desk.reply("x", "hello")

    def broken(text: str) -> None:
        raise BrokenPipeError("gone")

    assert await Terminal(desk.deliveries, write=broken).step(desk.worker) == 0
    assert await desk.statuses() == {"x": "pending"}
    assert await desk.terminal().step(desk.worker) == 1


def test_escapes():
    assert one_line("a\tb\0\x9b\u2028é") == "a\\tb\\x00\\x9b\\u2028é"
    assert one_line("\ud800") == "\\ud800"
    assert lines("a\nb\x07") == "a\n    b\\x07"


# ── wired ────────────────────────────────────────────────────────────────────────────────────────


def terminal_relay(app: App, write: Any) -> Relay:
    (relay,) = (r for r in relays_of(app, spawn_solo=False, terminal=True) if r.name == "terminal")
    terminal = relay.step.__self__  # type: ignore[attr-defined]
    terminal._write = write
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
    assert "terminal" not in names
    assert {"ledger anchor", "retention", "metrics"} <= names


def test_a_worker_on_a_real_terminal_prints_what_its_handlers_reply(home):
    environment = {**os.environ, "HOLDFAST_HOME": str(home)}
    subprocess.run(
        [sys.executable, "-m", "holdfast", "send", "--type", "chat", "--payload", '{"text": "hi"}'],
        env=environment,
        check=True,
        capture_output=True,
        timeout=60,
    )
    primary, secondary = pty.openpty()
    worker = subprocess.Popen(
        [sys.executable, "-m", "holdfast.supervisor", str(ECHO), "--until-idle", "--terminal"],
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
