"""What `holdfast dev` shows: where things are, what to try, replies, and the ends of messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from holdfast.core import events
from holdfast.core.errors import HoldfastError
from holdfast.core.records import LedgerEvent, Operations, Records

from .output import Output, safe

if TYPE_CHECKING:
    from holdfast.app import App

TERMINAL = "terminal"
_SHOWN = (*sorted(events.FINAL_EVENTS), events.RETRIED, events.PARKED, events.RECLAIMED)
_LOOK_S = 0.25
_COLOURS = {
    events.SUCCEEDED: "green",
    events.DUPLICATE: None,
    events.RETRIED: "yellow",
    events.PARKED: "yellow",
    events.RECLAIMED: "yellow",
}


class Display:
    """Watches the store from a thread of its own while the supervisor has the main one.

    The worker is another process, and may die without taking the display with it.
    """

    def __init__(self, app: App, target: str, out: Output) -> None:
        self._app = app
        self._target = target
        self._out = out
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="holdfast-display")

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
        except HoldfastError as error:
            self._failure = error
            if self._ready.is_set():
                self._out.say(f"holdfast: {error}")
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        from holdfast.admin.tail import EventFilter, follow
        from holdfast.app import App

        from .session import operating

        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with App(self._app.config) as app, operating(app) as (records, operations):
            position = await records.last_position()
            self._greet()
            self._ready.set()
            replies = asyncio.create_task(self._replies(records, operations))
            where = EventFilter(types=_SHOWN)

            async def show_events() -> None:
                async for event in follow(records, where, position=position):
                    self._show(event)

            shown = asyncio.create_task(show_events())
            stopped = asyncio.create_task(self._stop.wait())
            tasks = {replies, shown, stopped}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await self._show_replies(operations)
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
                raise error

    async def _replies(self, records: Records, operations: Operations) -> None:
        """Replies to the terminal are printed, then marked as sent: at least once."""
        woken = records.subscribe()
        try:
            while True:
                woken.clear()
                if await self._show_replies(operations):
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), _LOOK_S)
        finally:
            records.unsubscribe(woken)

    async def _show_replies(self, operations: Operations) -> int:
        found = await operations.pending_replies(TERMINAL, limit=100)
        for reply in found:
            text = self._out.strong(safe(reply.content, lines=True))
            to = "" if reply.recipient == "-" else f" to {safe(reply.recipient)}"
            self._out.data({"reply": reply}, f"reply{to}: {text}")
        if found:
            await operations.replies_sent(found)
        return len(found)

    def _show(self, event: LedgerEvent) -> None:
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
            parts.append(f"(holdfast dlq show {safe(event.task_id)})")
        if event.type == events.PARKED:
            parts.append(f"(holdfast parked show {safe(event.task_id)})")
        self._out.data({"event": event}, " ".join(part for part in parts if part))

    def _greet(self) -> None:
        out, config = self._out, self._app.config
        out.line(out.strong("holdfast is running") + f" {safe(self._target)}")
        out.line(f"  database  {safe(config.store_file)}")
        out.line(f"  settings  {safe(config.file) if config.file else 'the defaults'}")
        queues = ", ".join(sub.queue for sub in self._app.subscriptions())
        out.line(f"  queues    {safe(queues)}")
        out.line()
        out.line("Try in another terminal:")
        home = os.environ.get("HOLDFAST_HOME")
        prefix = f"HOLDFAST_HOME={shlex.quote(home)} " if home else ""
        for command in (self._example(), "holdfast tail", "holdfast stats"):
            out.line(f"  {prefix}{command}")
        out.line()
        out.line("Ctrl+C drains and ends.")
        out.line()

    def _example(self) -> str:
        """A message that this app has a handler for."""
        for queue in sorted(self._app.handlers.queues):
            types = [name for name in self._app.handlers.types(queue) if name != "*"]
            kind = types[0] if types else "chat"
            to = "" if queue == "default" else f" --queue {shlex.quote(queue)}"
            return f'holdfast send{to} --type {shlex.quote(kind)} --payload \'{{"text": "hello"}}\''
        return 'holdfast send --type chat --payload \'{"text": "hello"}\''
