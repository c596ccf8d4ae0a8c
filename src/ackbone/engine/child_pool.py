"""The worker's side of isolated handlers: a pool of child processes that can be killed.

A child is started when it is first needed, and used again. It loads the app by its target and has
no store: the worker makes the writes of a run, under the run's token. A handler past its time limit
is killed. A handler that kills its process counts as a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from ackbone.core.errors import (
    HandlerCrashed,
    HandlerFailed,
    HandlerTimeout,
    StoreUnavailable,
)
from ackbone.core.machine import fate

from .child_protocol import (
    Answer,
    Ask,
    FromChild,
    Hello,
    Kept,
    Raised,
    Returned,
    ToChild,
    error_of,
    fault_of,
    packed,
    read_from_child,
    result_of,
    start,
)
from .context import Context
from .handlers import Handler
from .patient_store import PatientStore

log = logging.getLogger("ackbone.engine")

LAST_WORDS_S = 1.0
"""How long to wait for the last frames of a child that has ended."""
READY_S = 60.0
"""How long a child may take to load the app. A child that hangs would keep its message."""
FAREWELL_S = 2.0
"""How long an idle child may take to end by itself."""


class Children:
    """Runs handlers in at most `size` child processes. `command` starts one. The file descriptor of
    its socket and the id of this process are added as its last arguments."""

    def __init__(self, command: Sequence[str], *, size: int) -> None:
        self._command = list(command)
        self._room = asyncio.Semaphore(size)
        self._idle: list[Child] = []
        self._all: set[Child] = set()

    async def call(self, handler: Handler, context: Context) -> Any:
        """Return the handler's result, or raise its error. The time limit begins when a child is
        ready."""
        async with self._room:
            child = await self._child()
            try:
                async with asyncio.timeout(handler.timeout_s) as limit:
                    return await child.run(handler, context)
            except TimeoutError:
                if not limit.expired():
                    raise  # the handler raised it
                store = context._store
                if isinstance(store, PatientStore) and store.is_waiting(context._run):
                    raise StoreUnavailable(
                        f"{handler.name} waited for the store past its timeout and was killed"
                    ) from None
                raise HandlerTimeout(
                    f"{handler.name} ran longer than {handler.timeout_s} s and was killed"
                ) from None
            finally:
                await self._put_away(child)

    async def close(self) -> None:
        """End every child. Idle ones are asked to end, the others are killed."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(child.leave() for child in idle))
        await asyncio.gather(*(child.kill() for child in self._all))
        self._all.clear()

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._all]

    async def _child(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            await self._end(child)
        child = await Child.spawn(self._command)
        self._all.add(child)
        try:
            await child.hello()
        except BaseException:
            await self._end(child)
            raise
        return child

    async def _put_away(self, child: Child) -> None:
        """Keep a child whose run has ended for the next run. Kill one in the middle of a run."""
        if child.is_free and child.is_alive:
            self._idle.append(child)
        else:
            await self._end(child)

    async def _end(self, child: Child) -> None:
        await child.kill()
        self._all.discard(child)


class Child:
    """One child process and the connection to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._exit = asyncio.create_task(process.wait(), name="ackbone isolated child")
        self.is_free = True
        """Not in the middle of a run."""

    @classmethod
    async def spawn(cls, command: Sequence[str]) -> Child:
        ours, theirs = socket.socketpair()
        try:
            # Spawned, never forked: a fork would keep this worker's locks. In a session of its own,
            # so that it can be killed with everything it started, and Ctrl-C stays with the worker.
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._exit.done()

    async def hello(self) -> None:
        """Waits until the child has loaded the app."""
        try:
            async with asyncio.timeout(READY_S):
                frame = await self._or_gone(read_from_child(self._reader))
        except TimeoutError:
            raise HandlerFailed(
                f"the child process has not loaded the app within {READY_S:.0f} s and was killed: "
                "see what the app waits for while it is imported"
            ) from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise HandlerFailed(
                f"the child process cannot load the app: {await self._fate()}"
            ) from None
        if not isinstance(frame, Hello) or frame.problem:
            why = frame.problem if isinstance(frame, Hello) else "it does not speak our language"
            raise HandlerFailed(f"the child process cannot load the app: {why}")

    async def run(self, handler: Handler, context: Context) -> Any:
        """Run one message. Returns its result or raises its error."""
        self.is_free = False
        try:
            await self._send(start(context._run))
            frame = await self._or_gone(self._converse(context))
        except (ConnectionError, asyncio.IncompleteReadError):
            raise HandlerCrashed(f"{handler.name}: {await self._fate()}") from None
        self.is_free = True
        if isinstance(frame, Raised):
            raise error_of(frame.fault)
        return result_of(frame)

    async def leave(self) -> None:
        """Ask the child to end: it ends when its socket is closed."""
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.shield(self._exit)

    async def kill(self) -> None:
        """Kill the child and everything it started in its session. Returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive:
                os.killpg(self.pid, signal.SIGKILL)
        self._writer.close()
        await asyncio.shield(self._exit)

    async def _converse(self, context: Context) -> Returned | Raised:
        """Answer what the run asks for, until it ends."""
        while True:
            frame: FromChild = await read_from_child(self._reader)
            match frame:
                case Returned() | Raised():
                    return frame
                case Kept():
                    context._keep(frame.replies, frame.sends, frame.usage)
                case Ask():
                    await self._send(await _answer(context, frame))
                case Hello():
                    continue

    async def _send(self, frame: ToChild) -> None:
        self._writer.write(packed(frame))
        await self._writer.drain()

    async def _or_gone(self, talk: Any) -> Any:
        """Return the result of `talk`. Raises IncompleteReadError if the child ends before it."""
        talking = asyncio.ensure_future(talk)
        try:
            await asyncio.wait({talking, self._exit}, return_when=asyncio.FIRST_COMPLETED)
            if not talking.done():  # its last frames may still have to be read
                await asyncio.wait({talking}, timeout=LAST_WORDS_S)
            if not talking.done():  # a program that it started holds its end of the socket
                raise asyncio.IncompleteReadError(b"", None)
            return talking.result()
        finally:
            talking.cancel()

    async def _fate(self) -> str:
        await self.kill()
        code = self._process.returncode or 0
        return f"its process {'was' if code < 0 else 'ended with'} {fate(code)}"


async def _answer(context: Context, ask: Ask) -> Answer:
    """Make the write that a run asked for."""
    store, run = context._store, context._run
    value: Any = None
    try:
        match ask.what:
            case "effect_begin":
                value = list(await store.effect_begin(run, ask.name))
            case "effect_done":
                await store.effect_done(run, ask.name, ask.value)
            case "effect_raised":
                await store.effect_raised(run, ask.name, ask.value.decode())
            case "effect_clear":
                await store.effect_clear(run, ask.name)
            case "heartbeat":
                await store.heartbeat(run, ask.data)
            case "reply_now" if ask.reply is not None:
                value = await store.reply_now(run, ask.reply, ask.n)
            case _:
                raise HandlerFailed(f"a child process asked for {ask.what!r}")
    except Exception as error:
        return Answer(call=ask.call, fault=fault_of(error))
    return Answer(call=ask.call, value=value)
