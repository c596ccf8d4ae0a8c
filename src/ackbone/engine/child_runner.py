"""The child's side of an isolated handler: runs one message at a time and reports to the worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from ackbone.core.errors import HandlerFailed, LeaseLost
from ackbone.core.message import current_message
from ackbone.core.store import EffectState, Reply, Run

from .child_protocol import (
    Answer,
    Ask,
    FromChild,
    Hello,
    Kept,
    Raised,
    Start,
    error_of,
    fault_of,
    packed,
    read_to_child,
    returned,
    run_of,
)
from .context import Context, MakeSend, SyncContext
from .handlers import Handlers, as_failure, call_plain


class Link:
    """The socket to the worker."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._calls = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self.run: Run | None = None
        """The run in progress. Leftovers of an earlier run must not write into it."""

    def keep(self, run: Run, frame: Kept) -> None:
        """Pass on what is committed with a run, unless the run has ended."""
        if run is self.run:
            self.tell(frame)

    def tell(self, frame: FromChild) -> None:
        self._writer.write(packed(frame))

    async def ask(self, run: Run, what: str, **details: Any) -> Any:
        """Ask the worker for a write. Returns its answer, or raises the error it met."""
        if run is not self.run:
            raise LeaseLost(f"message {run.message.id}: this run has ended")
        call = next(self._calls)
        future = self._open[call] = asyncio.get_running_loop().create_future()
        try:
            self.tell(Ask(call=call, what=what, **details))
            return await future
        finally:
            del self._open[call]

    def answered(self, frame: Answer) -> None:
        future = self._open.get(frame.call)
        if future is None or future.done():
            return  # the caller was cancelled
        if frame.fault is None:
            future.set_result(frame.value)
        else:
            future.set_exception(error_of(frame.fault))


class RemoteWrites:
    """The store as a run in a child sees it: the worker makes every write."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def effect_begin(
        self, run: Run, name: str, *, again: bool = False
    ) -> tuple[EffectState, bytes | None]:
        state, value = await self._link.ask(run, "effect_begin", name=name)
        return EffectState(state), value

    async def effect_done(self, run: Run, name: str, result: bytes, *, again: bool = False) -> None:
        await self._link.ask(run, "effect_done", name=name, value=result)

    async def effect_raised(self, run: Run, name: str, error: str) -> None:
        await self._link.ask(run, "effect_raised", name=name, value=error.encode())

    async def effect_clear(self, run: Run, name: str) -> None:
        await self._link.ask(run, "effect_clear", name=name)

    async def heartbeat(self, run: Run, data: Mapping[str, Any]) -> None:
        await self._link.ask(run, "heartbeat", data=dict(data))

    async def reply_now(self, run: Run, reply: Reply, n: int) -> str:
        return str(await self._link.ask(run, "reply_now", reply=reply, n=n))


class ChildContext(Context):
    """A context that passes replies, follow-ups and usage to the worker at once."""

    def __init__(self, run: Run, link: Link, make_send: MakeSend) -> None:
        super().__init__(run, RemoteWrites(link), make_send)
        self._link = link

    async def _add(self, reply: Reply) -> None:
        await super()._add(reply)
        self._pass_on()

    async def send(self, type: str, payload: Any = None, **options: Any) -> str:
        message_id = await super().send(type, payload, **options)
        self._pass_on()
        return message_id

    def usage(self, *, llm_calls: int = 0, tokens: int = 0, cost: float = 0.0) -> None:
        super().usage(llm_calls=llm_calls, tokens=tokens, cost=cost)
        self._pass_on()

    def _pass_on(self) -> None:
        replies, sends, usage = self._collected()
        if replies or sends or usage is not None:
            self._replies, self._sends, self._usage = [], [], None
            self._loop_tell(Kept(replies=replies, sends=sends, usage=usage))

    def _loop_tell(self, frame: Kept) -> None:
        """Write on the loop, which owns the socket. A plain handler calls `usage` in its thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._home.call_soon_threadsafe(self._link.keep, self._run, frame)
        else:
            self._link.keep(self._run, frame)

    _home: asyncio.AbstractEventLoop


async def serve(sock: socket.socket, handlers: Handlers, make_send: MakeSend) -> None:
    """Run the messages that the worker sends, one at a time, until the worker is gone."""
    reader, writer = await asyncio.open_connection(sock=sock)
    link = Link(writer)
    link.tell(Hello())
    running: asyncio.Task[None] | None = None
    while True:
        try:
            frame = await read_to_child(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            # The worker does not need this process any more, or is gone. A run in progress ends.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        match frame:
            case Answer():
                link.answered(frame)
            case Start():
                running = asyncio.create_task(_run(run_of(frame), link, handlers, make_send))
                running.add_done_callback(_ended)


def _ended(task: asyncio.Task[None]) -> None:
    """End the process if reporting failed. Errors of the run itself are reported as frames."""
    if not task.cancelled() and task.exception() is not None:
        sys.excepthook(*_info(task.exception()))
        os._exit(1)


def _info(error: BaseException | None) -> Any:
    return type(error), error, error.__traceback__ if error is not None else None


async def _run(run: Run, link: Link, handlers: Handlers, make_send: MakeSend) -> None:
    context = ChildContext(run, link, make_send)
    loop = context._home = asyncio.get_running_loop()
    current_message.set(run.message)
    link.run = run
    frame: FromChild
    try:
        handler = handlers.find(run.queue, run.message.type)
        if handler is None:
            raise HandlerFailed(f"the child process has no handler for {run.message.type!r}")
        context._focus = handler.focus
        if handler.is_async:
            result = await handler.call(context)
        else:
            result = await asyncio.to_thread(call_plain, handler, SyncContext(context, loop))
        frame = returned(result)
    except BaseException as error:
        frame = Raised(fault=fault_of(as_failure(error)))
    sys.stdout.flush()
    link.run = None
    link.tell(frame)
