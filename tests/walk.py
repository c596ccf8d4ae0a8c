"""List the files that one message passes from `App.send` to the commit of its outcome.

    python -m tests.walk             SQLite: queue and store in one file
    python -m tests.walk redis       Redis and PostgreSQL, started for this and removed afterwards

A worker's relays (reaper, clock watch, …) run at the same time and enter files of their own.
Therefore several messages are followed, and a file counts if all of them entered it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ackbone
from ackbone.app import App
from ackbone.config import Config
from ackbone.engine.context import Context
from tests.servers.postgres import postgres_server
from tests.servers.redis import redis_server

PACKAGE = str(Path(ackbone.__file__).parent) + "/"
MESSAGES = 20


class Trace:
    """The functions of the package that are entered while it records, by file, in order."""

    def __init__(self) -> None:
        self.functions: dict[str, list[str]] = {}
        self._seen: set[CodeType] = set()
        self._records = False

    def install(self) -> None:
        """Follow this thread and those that start later. The writer thread starts with the app."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self.functions, self._seen, self._records = {}, set(), True
        yield
        self._records = False

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not self._records or event != "call" or code in self._seen:
            return
        self._seen.add(code)
        if code.co_filename.startswith(PACKAGE):
            file = code.co_filename.removeprefix(PACKAGE)
            self.functions.setdefault(file, []).append(code.co_name)


async def walk(config: Config) -> dict[str, list[str]]:
    """Return the functions that each message entered, by file, in the order of the first entry."""
    trace = Trace()
    trace.install()
    app = App(config)

    @app.on("order")
    async def order(ctx: Context) -> dict[str, int]:
        return {"seen": ctx.payload["n"]}

    walks: list[dict[str, list[str]]] = []
    async with app:
        worker = app.worker()
        await worker.begin()
        for n in range(-2, MESSAGES):
            await asyncio.sleep(0.05)  # the worker waits for work again
            done = worker._flow.finished + 1  # an attribute: reading it enters no function
            with trace.recording():
                await app.send("order", {"n": n})
                while worker._flow.finished < done:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            if n >= 0:  # the first ones also pass what is made once
                walks.append(trace.functions)
        await worker.drain()
    sys.setprofile(None)
    threading.setprofile(None)
    entered = set[str].intersection(*(set(each) for each in walks))
    return {file: names for file, names in walks[-1].items() if file in entered}


@contextlib.contextmanager
def configuration(kind: str) -> Iterator[Config]:
    with tempfile.TemporaryDirectory(prefix="ab-walk-") as folder, contextlib.ExitStack() as stack:
        if kind == "sqlite":
            yield Config(home=Path(folder))
            return
        redis, postgres = redis_server(), postgres_server()
        for server in (redis, postgres):
            stack.callback(server.remove)
            server.start()
        store = postgres.url(postgres.new_database())
        yield Config(home=Path(folder), broker=redis.url, store=store, default_queue="stream:task")


def main(arguments: list[str]) -> None:
    with configuration(arguments[0] if arguments else "sqlite") as config:
        files = asyncio.run(walk(config))
    for n, (file, names) in enumerate(files.items(), 1):
        print(f"{n:3} {file:36} {', '.join(dict.fromkeys(names))}")


if __name__ == "__main__":
    main(sys.argv[1:])
