"""The output of `ackbone dev`: where the data is, commands to try, and a line for each message."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._position = 0
        self._thread = threading.Thread(target=self._watch, name="ackbone-display")

    def __enter__(self) -> Display:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _watch(self) -> None:
        try:
            asyncio.run(self._main())
        except AckboneError as error:
            self._failure = error
            if self._ready.is_set():
                self._out.say(f"ackbone: {error}")
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        from ackbone.admin.tail import EventFilter, follow
        from ackbone.app import App

        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with App(self._app.config) as app:
            records = app.storage.records(app.store)
            self._position = await records.last_position()
            self._greet()
            await self._tell_recovery(records)
            self._ready.set()
            stopped = asyncio.create_task(self._stop.wait())
            shown = asyncio.create_task(
                self._follow(follow(records, EventFilter(types=_SHOWN), position=self._position))
            )
            await asyncio.wait({stopped, shown}, return_when=asyncio.FIRST_COMPLETED)
            for task in (stopped, shown):
                task.cancel()
            *_, error = await asyncio.gather(stopped, shown, return_exceptions=True)
            if isinstance(error, Exception):
                raise error
            # Show the events that were committed while the worker stopped.
            async for event in follow(
                records, EventFilter(types=_SHOWN), position=self._position, forever=False
            ):
                self._show(event)

    async def _tell_recovery(self, records: Looking) -> None:
        from ackbone.delivery.recovery_report import store_report

        terminal = () if self._out.as_json else ("terminal",)
        carried = {*self._app.channel_names, *terminal}
        report = await store_report(records, carried=carried)
        if report:
            self._out.line(f"{report}\n")

    async def _follow(self, events_: AsyncIterator[LedgerEvent]) -> None:
        async for event in events_:
            self._show(event)

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
