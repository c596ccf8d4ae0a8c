"""The executor: runs each granted message in a task of its own and turns its end into an outcome.

The task makes steps 4 and 5 (`steps.py`). Around them: breakers, time limits, threads for plain
handlers, cancellation.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Awaitable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from ackbone.core.breaker import Breaker, Passage
from ackbone.core.broker import Subscription
from ackbone.core.clock import Clock
from ackbone.core.codecs.values import result_bytes
from ackbone.core.errors import (
    HandlerFailed,
    LeaseLost,
)
from ackbone.core.message import current_message
from ackbone.core.outcome import (
    Dead,
    Done,
    Outcome,
    Released,
    Retry,
)
from ackbone.core.retry import describe
from ackbone.core.store import Finished, Run

from .context import Context, SyncContext
from .deadlines import Deadlines
from .failures import cancelled, raised
from .handlers import LOST, Handler, call_plain, run_id_of
from .patient_store import PatientStore
from .steps import Steps
from .wiring import CallNext, Handling, Middleware

if TYPE_CHECKING:
    from .flow import Flow

log = logging.getLogger("ackbone.engine")

REMIND_S = 10.0
"""How often the log repeats that the worker waits for threads."""


class Active(msgspec.Struct, eq=False):
    """A run in progress."""

    run: Run
    sub: Subscription
    handler: Handler | None
    context: Context
    cause: str = ""
    """Why it was cancelled: timeout, store (it timed out while it waited for the store), drain,
    lost, cancel. "given up": its end was reported."""
    started_us: int = 0
    task: asyncio.Task[None] | None = None
    thread: bool = False
    result: bytes | None = None
    """The handler's result as JSON."""
    trace: str = ""
    """The traceback, if the attempt failed."""


class Executor:
    """Starts runs and turns whatever they do into outcomes."""

    def __init__(
        self,
        handling: Handling,
        steps: Steps,
        flow: Flow,
        *,
        clock: Clock,
        crash_budget: int = 2,
        recycle_grace_s: float = 10.0,
    ) -> None:
        self._handling = handling
        self._mask = handling.mask
        self._steps = steps
        self._flow = flow
        self._store = PatientStore(steps.store)
        self._clock = clock
        self._breakers: dict[int, Breaker] = {}
        """The breakers of handlers, by `id(handler)`: a registry keeps its handlers."""
        self._calls: dict[int, CallNext] = {}
        """The calls of handlers that run on the event loop, in their middleware, by the same."""
        self._new_pool = functools.partial(
            ThreadPoolExecutor, handling.threads, thread_name_prefix="ackbone-handler"
        )
        self._threads = self._new_pool()
        self._crash_budget = crash_budget
        self._recycle_grace_s = recycle_grace_s
        self._active: dict[int, Active] = {}
        self._deadlines = Deadlines()

    # -- what the worker uses ---------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def active(self) -> list[Active]:
        return list(self._active.values())

    def start(self, runs: Iterable[Run], sub: Subscription, *, cause: str = "") -> None:
        """Start a task for each run. `cause`: why they are to end before their handlers begin."""
        loop, handler_of = asyncio.get_running_loop(), self._handling.handlers.find
        store, make_send = self._store, self._handling.make_send
        for run in runs:
            handler = handler_of(run.queue, run.message.type)
            focus = None if handler is None else handler.focus
            active = Active(run, sub, handler, Context(run, store, make_send, focus), cause)
            self._active[id(active)] = active
            active.task = loop.create_task(self._run(active), name="ackbone-run")

    def cancel_all(self, cause: str) -> None:
        """`drain`: hand back without spending the attempt. `lost`: drop, because nothing of these
        runs may be written."""
        for active in self._active.values():
            self._cancel(active, cause)
        if cause == "lost":
            # Their slots are free, but not their threads: the next runs would wait for one while
            # their time limits pass.
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = self._new_pool()

    async def outlast_threads(self) -> int:
        """Wait until all plain handlers have returned. Returns how many there were.

        Handlers past their time limit do not count: they have failed, and may never return.
        """
        running = {
            active.task: active.run.message.id
            for active in self._active.values()
            if active.thread and active.task and active.cause != "timeout"
        }
        left = set(running)
        while left:
            log.warning(
                "waiting for %d plain handlers, which cannot be stopped; messages: %s",
                len(left),
                ", ".join([running[task] for task in left][:5]),
            )
            _, left = await asyncio.wait(left, timeout=REMIND_S)
        return len(running)

    def give_up_timed_out(self, *, after_s: float) -> int:
        """End the attempts of runs that are past their time limit, because this process ends.
        Returns how many there were. They run again after `after_s` at the earliest, when the
        process is gone.
        """
        late = [a for a in self._active.values() if a.cause == "timeout" and a.handler is not None]
        for active in late:
            assert active.handler is not None  # noqa: S101 - for the type checker
            outcome = cancelled(active, active.handler, self._mask)
            if isinstance(outcome, Retry):
                wait_s = max(after_s, outcome.after_s)
                outcome = msgspec.structs.replace(outcome, after_s=wait_s)
            active.cause = "given up"
            del self._active[id(active)]
            active.context = Context(active.run, self._store, self._handling.make_send)
            self._flow.ended(self._finished(active, outcome), active.sub)
        return len(late)

    def cancel(
        self, message_id: str, *, tenant_id: str | None = None, subscription: str | None = None
    ) -> bool:
        """Ask one run to stop. It ends as discarded, unless it ends by itself first."""
        for active in self._active.values():
            run = active.run
            if (
                run.message.id == message_id
                and tenant_id in (None, run.message.tenant_id)
                and subscription in (None, run.subscription)
            ):
                self._cancel(active, "cancel")
                return True
        return False

    def breaker_wait_s(self, queue: str) -> float | None:
        """Return how long not to fetch from a queue, because all its handlers keep failing. None:
        fetch."""
        if not any(breaker.in_a_row for breaker in self._breakers.values()):
            return None
        waits = []
        for handler in self._handling.handlers:
            if handler.queue == queue:
                breaker = self._breakers.get(id(handler))
                if breaker is None or not breaker.is_open or breaker.may_probe:
                    return None
                waits.append(breaker.wait_s)
        return min(waits) if waits else None

    async def close(self) -> None:
        self._deadlines.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._store.close()
        if self._handling.isolated is not None:
            await self._handling.isolated.close()

    # -- one run ----------------------------------------------------------------------------------

    async def _run(self, active: Active) -> None:
        current_message.set(active.run.message)  # in the context of this task alone
        active.started_us = self._clock.now_us()
        try:
            outcome = await self._attempt(active)
        except LeaseLost as error:
            log.warning("%s", error)
            outcome = None
        except BaseException as error:
            log.exception("message %s: the engine failed", active.run.message.id)
            outcome = Retry(after_s=5.0, reason=f"engine: {describe(error, self._mask)}")
        finally:
            self._active.pop(id(active), None)
        if active.cause != "given up":
            self._flow.ended(self._finished(active, outcome), active.sub)

    async def _attempt(self, active: Active) -> Outcome | None:
        """Return the outcome of one attempt. Nothing that guard or handler raise gets any further,
        except the loss of the claim."""
        run, handler = active.run, active.handler
        if handler is None:  # the store grants only types that this worker has handlers for
            raise LookupError(f"no handler for type {run.message.type!r} on queue {run.queue!r}")
        if active.cause:  # cancelled before its first step
            return cancelled(active, handler, self._mask)
        breaker = self._breakers.get(id(handler)) or self._new_breaker(handler)
        if breaker is not None and breaker.in_a_row and breaker.ask() is Passage.WAIT:
            return Released(after_s=breaker.wait_s)
        outcome: Outcome | None = None
        try:
            outcome = await self._steps.guard_and_run(active, self._call)
            if type(outcome) is Done:
                active.result = result_bytes(outcome.result)
        except LeaseLost:
            raise
        except BaseException as error:
            outcome = raised(active, handler, error, self._mask)
        finally:  # always: a probe without a report would keep the breaker open
            if breaker is not None and (breaker.in_a_row or type(outcome) is not Done):
                self._tell_breaker(breaker, handler, outcome)
        return outcome

    def _call(self, active: Active) -> Awaitable[Any]:
        """Return the handler's call, with middleware and time limit around it, to be awaited."""
        handler, context = active.handler, active.context
        assert handler is not None  # noqa: S101 - for the type checker
        call = self._calls.get(id(handler)) or self._new_call(active, handler)
        if handler.timeout_s is None or handler.isolation == "process":
            return call(context)  # the time limit of a child process begins when it is ready
        return self._limited(active, handler, call(context), handler.timeout_s)

    def _new_call(self, active: Active, handler: Handler) -> CallNext:
        call: CallNext
        if handler.isolation == "process":
            if self._handling.isolated is None:
                raise HandlerFailed(f"{handler.name}: this worker has no child processes")
            call = functools.partial(self._handling.isolated.call, handler)
        elif handler.is_async:
            call = handler.call
        else:
            call = functools.partial(self._in_thread, active, handler)
        for wrap in reversed(self._handling.middleware):
            call = _wrapped(wrap, call)
        if handler.is_async and handler.isolation == "none":  # the same call for every run
            self._calls[id(handler)] = call
        return call

    async def _limited(
        self, active: Active, handler: Handler, call: Awaitable[Any], timeout_s: float
    ) -> Any:
        deadline = asyncio.get_running_loop().time() + timeout_s
        entry = self._deadlines.add(deadline, lambda: self._timed_out(active, handler))
        try:
            return await call
        finally:
            entry.cancel()

    async def _in_thread(self, active: Active, handler: Handler, context: Context) -> Any:
        """A thread cannot be stopped. It keeps its slot and its claim until it returns."""
        loop = asyncio.get_running_loop()
        sync = SyncContext(context, loop)
        active.thread = True
        carried = contextvars.copy_context()
        future = loop.run_in_executor(self._threads, carried.run, call_plain, handler, sync)
        while True:
            try:
                result = await asyncio.shield(future)
            except asyncio.CancelledError:
                if active.cause == "lost" or future.done():
                    raise
                continue  # wait for the thread: until it returns, this attempt goes on
            if active.cause and active.cause != "drain":
                raise asyncio.CancelledError
            return result  # while draining as well: the work is done

    # -- ends -------------------------------------------------------------------------------------

    def _finished(self, active: Active, outcome: Outcome | None) -> Finished:
        run, context = active.run, active.context
        replies, sends, usage = context._collected()
        details: dict[str, Any] = {}
        agent_run_id = None
        told_on_ack = False
        if type(outcome) is Done:
            told_on_ack = (
                run.delivery is not None and run.subscription in self._steps.results_on_ack
            )
            if outcome.result is not None:
                agent_run_id = run_id_of(outcome.result)
        if context._without_dedup:
            details["without_dedup"] = True
        handler = active.handler
        finished = Finished(
            run=run,
            outcome=LOST if outcome is None else outcome,
            result=active.result,
            started_at_us=active.started_us,
            finished_at_us=self._clock.now_us(),
            replies=replies,
            sends=sends,
            usage=usage,
            agent_run_id=agent_run_id,
            dedup_window_s=active.sub.dedup_window_s,
            on_parked=handler.on_parked if handler is not None else "wait",
            keep_rejected=active.sub.ack_policy == "dlq",
            crash_budget=self._crash_budget,
            told_on_ack=told_on_ack,
            details=details,
        )
        # A sixteenth keyword above would cost every run more than this costs the failed ones.
        return structs.replace(finished, traceback=active.trace) if active.trace else finished

    def _cancel(self, active: Active, cause: str) -> None:
        if not active.cause:
            active.cause = cause
            # A task that is cancelled before its first step never runs, and would report no end.
            # Such a task reads the cause when it starts.
            if active.task is not None and active.started_us:
                active.task.cancel()

    def _timed_out(self, active: Active, handler: Handler) -> None:
        self._cancel(active, "store" if self._store.is_waiting(active.run) else "timeout")
        self._expect_end(active, handler)

    def _expect_end(self, active: Active, handler: Handler) -> None:
        at = asyncio.get_running_loop().time() + self._recycle_grace_s
        self._deadlines.add(at, lambda: self._stuck(active, handler))

    def _stuck(self, active: Active, handler: Handler) -> None:
        """The handler is past its timeout and its grace. Only the end of this process can stop it.

        Not while it waits for the store: it ends when the store is back, and may have the result of
        an effect that only this process knows.
        """
        if id(active) not in self._active:
            return
        if self._store.is_waiting(active.run):
            self._expect_end(active, handler)
        else:
            log.error(
                "message %s: %s did not stop %.1f s after its timeout; this worker is replaced",
                active.run.message.id,
                handler.name,
                self._recycle_grace_s,
            )
            self._flow.stuck()

    # -- breakers ---------------------------------------------------------------------------------

    def _new_breaker(self, handler: Handler) -> Breaker | None:
        policy = self._handling.breaker
        if policy.failures <= 0:
            return None
        breaker = Breaker(policy, self._clock.monotonic)
        self._breakers[id(handler)] = breaker
        return breaker

    def _tell_breaker(self, breaker: Breaker, handler: Handler, outcome: Outcome | None) -> None:
        match outcome:
            case Done():
                if breaker.succeeded():
                    log.warning("%s works again", handler.name)
            case Retry(crashed=False) | Dead(reason="retries_exhausted"):
                if breaker.failed():
                    log.error(
                        "%s failed %d times in a row; one message at a time until it works",
                        handler.name,
                        self._handling.breaker.failures,
                    )
            case _:
                breaker.cancelled()


def _wrapped(wrap: Middleware, inner: CallNext) -> CallNext:
    return lambda context: wrap(context, inner)
