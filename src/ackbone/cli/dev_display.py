"""The output of `ackbone dev`: where the data is, commands to try, and a line for each message."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ackbone.admin.tail import EventFilter, follow
from ackbone.composition.event_loops import LoopThread
from ackbone.core import events
from ackbone.core.errors import AckboneError
from ackbone.core.outcome import ParkKind
from ackbone.core.records import LedgerEvent

from .output import Output, safe

if TYPE_CHECKING:
    from ackbone.app import App
    from ackbone.backends import Looking

_SHOWN = (*sorted(events.FINAL_EVENTS), events.RETRIED, events.PARKED, events.RECLAIMED)
_COLOURS = {
    events.SUCCEEDED: "green",
    events.DUPLICATE: None,
    events.RETRIED: "yellow",
    events.PARKED: "yellow",
    events.RECLAIMED: "yellow",
}


class Display:
    """Watches the store in a thread while the supervisor runs in the main thread.

    The worker is another process, so the display survives a crash of the worker.
    """

    def __init__(self, app: App, target: str, out: Output) -> None:
        self._app = app
        self._target = target
        self._out = out
        self._position = 0
        self._open = contextlib.AsyncExitStack()

    def __enter__(self) -> Display:
        self._loop = LoopThread()
        try:
            self._loop.run(self._begin())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.suppress(
                Exception
            ):  # the output may be closed; the command ends anyway
                self._loop.run(self._end())
        finally:
            self._loop.close()

    async def _begin(self) -> None:
        from ackbone.app import App

        async with contextlib.AsyncExitStack() as opened:
            app = await opened.enter_async_context(App(self._app.config))
            self._records = app.storage.records(app.store)
            self._position = await self._records.last_position()
            self._greet()
            await self._tell_recovery(self._records)
            self._watch = asyncio.create_task(self._follow(forever=True))
            self._open = opened.pop_all()

    async def _end(self) -> None:
        async with self._open:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            if self._watch.cancelled():
                # Show the events that were committed while the worker stopped.
                await self._follow(forever=False)

    async def _follow(self, *, forever: bool) -> None:
        try:
            where = EventFilter(types=_SHOWN)
            async for event in follow(
                self._records, where, position=self._position, forever=forever
            ):
                self._show(event)
        except AckboneError as error:
            self._out.say(f"ackbone: {error}")

    async def _tell_recovery(self, records: Looking) -> None:
        from ackbone.delivery.recovery_report import store_report

        terminal = () if self._out.as_json else ("terminal",)
        carried = {*self._app.channel_names, *terminal}
        report = await store_report(records, carried=carried)
        if report:
            self._out.line(f"{report}\n")

    def _show(self, event: LedgerEvent) -> None:
        self._position = event.position
        data = event.data
        kind = event.type.removeprefix("task.")
        word = self._out.tinted(f"{kind:<9}", _COLOURS.get(event.type, "red"))
        parts = [word, safe(event.task_id), safe(data.get("event_name") or "")]
        if data.get("duration_ms"):
            parts.append(f"{data['duration_ms']} ms")
        reason = data.get("error") or data.get("reason")
        if reason:
            parts.append(safe(reason))
        if event.type == events.FAILED:
            parts.append(f"(ackbone dlq show {safe(event.task_id)})")
        if event.type == events.PARKED:
            asked = data.get("kind") == ParkKind.WAITING_APPROVAL
            command = "approvals" if asked else "parked"
            parts.append(f"(ackbone {command} show {safe(event.task_id)})")
        self._out.data({"event": event}, " ".join(part for part in parts if part))

    def _greet(self) -> None:
        out, config = self._out, self._app.config
        out.line(out.strong("ackbone is running") + f" {safe(self._target)}")
        out.line(f"  database  {safe(self._app.storage.place)}")
        out.line(f"  settings  {safe(config.file) if config.file else 'the defaults'}")
        queues = ", ".join(sub.queue for sub in self._app.subscriptions())
        out.line(f"  queues    {safe(queues)}")
        out.line()
        out.line("Try in another terminal:")
        said = ((name, os.environ.get(name)) for name in ("ACKBONE_CONFIG", "ACKBONE_HOME"))
        prefix = "".join(f"{name}={shlex.quote(value)} " for name, value in said if value)
        for command in (self._example(), "tail", "stats"):
            out.line(f"  {prefix}{_program()} {command}")
        out.line()
        out.line("Ctrl+C stops after the current runs.")
        out.line()

    def _example(self) -> str:
        """Return a `send` command for a message that this app has a handler for."""
        for queue in sorted(self._app.handlers.queues):
            types = [name for name in self._app.handlers.types(queue) if name != "*"]
            kind = types[0] if types else "chat"
            to = "" if queue == self._app.config.default_queue else f" --queue {shlex.quote(queue)}"
            return f'send{to} --type {shlex.quote(kind)} --payload \'{{"text": "hello"}}\''
        return 'send --type chat --payload \'{"text": "hello"}\''


def _program() -> str:
    """Return how to call this program from the current folder."""
    if shutil.which("ackbone"):
        return "ackbone"
    beside = Path(sys.executable).with_name("ackbone")
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m ackbone"
    return shlex.quote(min(str(beside), os.path.relpath(beside), key=len))
