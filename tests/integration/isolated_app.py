"""The app of the isolation tests, loaded by the worker and by each of its child processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ackbone.app import App
from ackbone.config import Breaker, Config, Retry, Worker
from ackbone.core.errors import FinalError, ParkMessage, TemporaryError
from ackbone.core.outcome import Dead
from ackbone.core.retry import RetryPolicy
from ackbone.engine.context import Context, SyncContext

HOME = Path(os.environ["ACKBONE_HOME"])

app = App(
    Config(
        home=HOME,
        worker=Worker(slots=8, lease_s=5.0, shutdown_timeout_s=5.0, isolated=2),
        retry=Retry(base_delay_s=0.01, max_delay_s=0.05, jitter=0.0),
        breaker=Breaker(failures=1000),
    )
)


class UpstreamBusy(TemporaryError):
    """An error of the user's own, below one of ours."""


class Wrong(Exception):  # an error of the user's own, below nothing
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


def note(line: str) -> None:
    """Something that stays when a process is killed."""
    with (HOME / "notes").open("a") as file:
        file.write(f"{line}\n")


async def until(look: Callable[[], bool]) -> None:
    while True:
        if look():
            return
        await asyncio.sleep(0.01)


@app.on("echo", isolation="process")
async def echo(ctx: Context) -> Any:
    return {"payload": ctx.payload, "pid": os.getpid(), "attempt": ctx.attempt}


@app.on("plain", isolation="process")
def plain(ctx: SyncContext) -> Any:
    ctx.reply("from a thread")
    ctx.usage(tokens=5)
    ctx.heartbeat({"half": True})
    return ctx.once("effect", lambda key: key)


@app.on("full", isolation="process", retries=1)
async def full(ctx: Context) -> str:
    await ctx.reply(f"reply {ctx.attempt}")
    await ctx.reply("now", now=True)
    child = await ctx.send("child", {"n": 1}, queue="children")
    ctx.usage(llm_calls=1, tokens=10, cost=0.5)
    ctx.usage(tokens=5)
    await ctx.heartbeat({"step": 1})
    if ctx.attempt == 1:
        raise RuntimeError("all of that again")
    return child


@app.on(
    "raise",
    isolation="process",
    retry=RetryPolicy(max_retries=1, base_delay=0.0, jitter=0.0, final_on=(Wrong, LookupError)),
)
async def raises(ctx: Context) -> None:
    match ctx.payload:
        case "final":
            raise FinalError("never")
        case "busy":
            raise UpstreamBusy("later", retry_after_s=1000.0)
        case "wrong":
            raise Wrong(7, detail="mine")
        case "key":
            raise KeyError("builtin")
        case "value":
            raise ValueError("builtin")
        case "park":
            raise ParkMessage("ask first", kind="waiting_approval")
        case "exit":
            sys.exit(3)
        case "decode":
            b"\xff".decode()
        case "group":
            raise ExceptionGroup("many", [ValueError("a"), Wrong(1, detail="b")])


@app.on("outcome", isolation="process")
def outcome(ctx: SyncContext) -> Any:
    return Dead(reason="mine", error="told so") if ctx.payload == "dead" else object()


@app.on("hang", isolation="process", timeout_s=0.5, retries=1)
def hang(ctx: SyncContext) -> str:
    note(f"hang {ctx.attempt} {os.getpid()}")
    if ctx.attempt == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note(f"helper {helper.pid}")
        time.sleep(600)
    return "second time lucky"


@app.on("crash", isolation="process", retries=0)
async def crash(ctx: Context) -> str:
    note(f"crash {ctx.attempt} {os.getpid()}")
    await ctx.reply("never sent" if ctx.attempt == 1 else "sent")
    if ctx.attempt == 1:
        if ctx.payload == "exit":
            os._exit(9)
        if ctx.payload == "segfault":
            ctypes.string_at(0)
        os.kill(os.getpid(), 40 if ctx.payload == "nameless signal" else signal.SIGKILL)
    return f"{ctx.attempt} {ctx.retry_count}"


@app.on("poison", isolation="process", retries=50)
async def poison(ctx: Context) -> None:
    note(f"poison {ctx.attempt}")
    os._exit(1)


@app.on("pay", isolation="process", retries=2)
async def pay(ctx: Context) -> Any:
    def charge(key: str) -> dict[str, str]:
        note(f"charged {key}")
        return {"key": key}

    def lost(key: str) -> None:
        note(f"lost {key}")
        os._exit(1)

    charged = await ctx.once("charge", charge)
    if ctx.attempt == 1:
        os._exit(1)
    if ctx.payload == "unknown":
        await ctx.once("second", lost)
    return charged


@app.on("impatient", isolation="process", timeout_s=0.5, retries=0)
async def impatient(ctx: Context) -> int:
    await ctx.once("effect", lambda: None)
    return ctx.attempt


@app.on("together", isolation="process")
async def together(ctx: Context) -> int:
    """Ends when two of them run at the same time."""
    note(f"together {ctx.payload}")
    while True:
        lines = (HOME / "notes").read_text().splitlines()
        if len([line for line in lines if line.startswith("together")]) >= 2:
            return os.getpid()
        await asyncio.sleep(0.01)


@app.on("leaves", isolation="process")
async def leaves(ctx: Context) -> None:
    """Returns, and goes on beside the next run of its process."""

    async def go_on() -> None:
        await until((HOME / "next").exists)
        try:
            ctx.usage(tokens=1000)
            await ctx.reply("late")
            await ctx.once("charge", lambda key: key)
        finally:
            note("left over")

    left_over.append(asyncio.create_task(go_on()))


left_over: list[asyncio.Task[None]] = []


@app.on("next", isolation="process")
async def comes_next(ctx: Context) -> str:
    (HOME / "next").touch()
    await until(lambda: "left over" in (HOME / "notes").read_text())
    charged: str = await ctx.once("charge", lambda key: key)
    return charged


@app.on("forever", isolation="process")
def forever(ctx: SyncContext) -> None:
    note(f"forever {os.getpid()}")
    time.sleep(600)


@app.on("here")
async def here(ctx: Context) -> int:
    return os.getpid()
