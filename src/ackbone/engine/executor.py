"""Guard and run: one task per claimed message, its outcome a value handed to the settler."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
from msgspec import structs

from ackbone.core.breaker import Breaker, BreakerPolicy, Passage
from ackbone.core.broker import Subscription
from ackbone.core.clock import Clock
from ackbone.core.current import current_message
from ackbone.core.errors import (
    EffectUnknown,
    HandlerCrashed,
    HandlerFailed,
    HandlerTimeout,
    LeaseLost,
    ParkMessage,
    StoreUnavailable,
)
from ackbone.core.json_text import result_bytes
from ackbone.core.outcome import (
    Dead,
    Done,
    Outcome,
    Park,
    ParkKind,
    Released,
    Retry,
)
from ackbone.core.retry import decide, describe
from ackbone.core.secret import mask_line
from ackbone.core.store import Finished, Run

from .context import Context, MakeSend, RunStore, SyncContext
from .deadlines import Deadlines
from .guard import Guard, asking
from .handlers import Handler, Handlers
from .patience import PatientStore
from .results import LOST, as_failure, call_plain, outcome_of, run_id_of
from .tracebacks import Mask, bounded, user_trace, warn

log = logging.getLogger("ackbone.engine")

REMIND_S = 10.0
"""How often whoever waits for threads says so."""
CallNext = Callable[[Context], Awaitable[Any]]
Middleware = Callable[[Context, CallNext], Awaitable[Any]]
"""Wraps the handler's call. Folded once, the first registered outermost."""


class Isolated(Protocol):
    """Runs a handler in a child process that can be killed."""

    async def call(self, handler: Handler, context: Context) -> Any: ...

    async def close(self) -> None: ...


class Active(msgspec.Struct, eq=False):
    """A run in progress."""

    run: Run
    sub: Subscription
    handler: Handler | None
    started_us: int = 0
    task: asyncio.Task[None] | None = None
    thread: bool = False
    cause: str = ""
    """Why it was cancelled: timeout, store (it timed out while it waited for the store), drain,
    lost, cancel. "given up": its end was reported."""
    result: bytes | None = None
    """The handler's result as JSON."""
    trace: str = ""
    """The traceback, if the attempt failed."""


class Executor:
    """Starts runs and turns whatever they do into outcomes."""

    def __init__(  # noqa: PLR0913 - wiring: each one is a port or a limit
        self,
        *,
        handlers: Handlers,
        store: RunStore,
        make_send: MakeSend,
        clock: Clock,
        done: Callable[[Finished, Subscription], None],
        guard: Guard | None = None,
        middleware: tuple[Middleware, ...] = (),
        breaker: BreakerPolicy | None = None,
        isolated: Isolated | None = None,
        threads: int = 100,
        crash_budget: int = 2,
        guard_timeout_s: float = 10.0,
        recycle_grace_s: float = 10.0,
        on_stuck: Callable[[Run], None] | None = None,
        mask: Mask = mask_line,
    ) -> None:
        """`mask` takes secrets out of the errors and tracebacks that are kept."""
        self._mask = mask
        self._handlers = handlers
        self._store = PatientStore(store)
        self._make_send = make_send
        self._clock = clock
        self._done = done
        self._ask = None if guard is None else asking(guard, timeout_s=guard_timeout_s)
        self._middleware = middleware
        self._breaker_policy = breaker or BreakerPolicy()
        self._breakers: dict[int, Breaker] = {}
        """By the identity of the handler: a registry keeps its handlers."""
        self._calls: dict[int, CallNext] = {}
        """The same: the calls of those that run on the loop, in their middleware."""
        self._isolated = isolated
        self._new_pool = functools.partial(
            ThreadPoolExecutor, threads, thread_name_prefix="ackbone-handler"
        )
        self._threads = self._new_pool()
        self._crash_budget = crash_budget
        self._recycle_grace_s = recycle_grace_s
        self._on_stuck = on_stuck
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
        """Run them; their ends go to the settler. `cause`: why they are over before they begin."""
        loop, handler_of = asyncio.get_running_loop(), self._handlers.find
        for run in runs:
            active = Active(run, sub, handler_of(run.queue, run.message.type), cause=cause)
            self._active[id(active)] = active
            active.task = loop.create_task(self._run(active), name="ackbone-run")

    def cancel_all(self, cause: str) -> None:
        """`drain`: hand back without spending the attempt. `lost`: drop, nothing may be written."""
        for active in self._active.values():
            self._cancel(active, cause)
        if cause == "lost":
            # Their slots are free, their threads are not: whoever comes next would wait for one,
            # and see its time pass.
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = self._new_pool()

    async def outlast_threads(self) -> int:
        """Waits until all plain handlers have returned; how many of them there were.

        Not for those past their time limit: these may never return, and have failed.
        """
        running = {
            active.task: active.run.message.id
            for active in self._active.values()
            if active.thread and active.task and active.cause != "timeout"
        }
        left = set(running)
        while left:
            log.warning(
                "waiting for %d plain handlers, which nothing can stop; messages: %s",
                len(left),
                ", ".join([running[task] for task in left][:5]),
            )
            _, left = await asyncio.wait(left, timeout=REMIND_S)
        return len(running)

    def give_up_timed_out(self, *, after_s: float) -> int:
        """End the attempts of runs that outlast their time limit, because this process ends; how
        many there were. They run again after `after_s` at the earliest, when it is gone.
        """
        late = [a for a in self._active.values() if a.cause == "timeout" and a.handler is not None]
        for active in late:
            assert active.handler is not None  # noqa: S101 - for the type checker
            outcome = self._cancelled(active, active.handler)
            if isinstance(outcome, Retry):
                wait_s = max(after_s, outcome.after_s)
                outcome = msgspec.structs.replace(outcome, after_s=wait_s)
            active.cause = "given up"
            del self._active[id(active)]
            context = Context(active.run, self._store, self._make_send)
            self._done(self._finished(active, context, outcome), active.sub)
        return len(late)

    def cancel(
        self, message_id: str, *, tenant_id: str | None = None, subscription: str | None = None
    ) -> bool:
        """Ask one run to stop; it ends as discarded unless it ended first."""
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
        """How long to hold a queue back whose every handler is failing; None: it may flow."""
        waits = []
        for handler in self._handlers:
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
        if self._isolated is not None:
            await self._isolated.close()

    # -- one run ----------------------------------------------------------------------------------

    async def _run(self, active: Active) -> None:
        current_message.set(active.run.message)  # this task's own context
        handler = active.handler
        focus = None if handler is None else handler.focus
        context = Context(active.run, self._store, self._make_send, focus)
        active.started_us = self._clock.now_us()
        try:
            outcome = await self._outcome(active, context)
        except LeaseLost as error:
            log.warning("%s", error)
            outcome = None
        except BaseException as error:
            log.exception("message %s: the engine failed", active.run.message.id)
            outcome = Retry(after_s=5.0, reason=f"engine: {describe(error, self._mask)}")
        finally:
            self._active.pop(id(active), None)
        if active.cause != "given up":
            self._done(self._finished(active, context, outcome), active.sub)

    async def _outcome(self, active: Active, context: Context) -> Outcome | None:
        run, handler = active.run, active.handler
        if handler is None:  # the store grants only types that this worker has handlers for
            raise LookupError(f"no handler for type {run.message.type!r} on queue {run.queue!r}")
        if active.cause:  # stopped before its first step
            return self._cancelled(active, handler)
        breaker = self._breakers.get(id(handler)) or self._new_breaker(handler)
        if breaker is not None and breaker.in_a_row and breaker.ask() is Passage.WAIT:
            return Released(after_s=breaker.wait_s)
        outcome: Outcome | None = None
        try:
            outcome = await self._attempt(active, handler, context)
        finally:  # whatever happens: a probe that never reports back would keep the breaker open
            if breaker is not None and (breaker.in_a_row or type(outcome) is not Done):
                self._tell_breaker(breaker, handler, outcome)
        return outcome

    async def _attempt(self, active: Active, handler: Handler, context: Context) -> Outcome | None:
        """Guard and handler. Nothing that they raise goes further, but the loss of the claim."""
        try:
            if self._ask is not None:
                stopped = await self._ask(active.run)
                if stopped is not None:
                    return stopped
            outcome = outcome_of(await self._call(active, handler, context))
            if type(outcome) is Done:
                active.result = result_bytes(outcome.result)
            return outcome
        except ParkMessage as error:
            return Park(kind=error.kind, reason=self._mask(str(error)))
        except EffectUnknown as error:
            return Park(kind=ParkKind.EFFECT_UNKNOWN, reason=self._mask(str(error)))
        except LeaseLost:
            raise
        except BaseException as error:
            if active.cause:  # however the handler put it, it ended because it was told to
                return self._cancelled(active, handler)
            if isinstance(error, StoreUnavailable):
                return self._store_away(active.run, error)
            return self._failed(handler, active, as_failure(error), user_trace(error))

    def _call(self, active: Active, handler: Handler, context: Context) -> Awaitable[Any]:
        """The handler's call, middleware and time limit around it, to be awaited."""
        call = self._calls.get(id(handler))
        if call is None:
            call = self._caller(active, handler)
        if handler.timeout_s is None or handler.isolation == "process":
            return call(context)  # a child's time begins when it is ready
        return self._limited(active, handler, call(context), handler.timeout_s)

    async def _limited(
        self, active: Active, handler: Handler, call: Awaitable[Any], timeout_s: float
    ) -> Any:
        deadline = asyncio.get_running_loop().time() + timeout_s
        entry = self._deadlines.add(deadline, lambda: self._timed_out(active, handler))
        try:
            return await call
        finally:
            entry.cancel()

    def _caller(self, active: Active, handler: Handler) -> CallNext:
        isolated = self._isolated
        call: CallNext
        if handler.isolation == "process":
            if isolated is None:
                raise HandlerFailed(f"{handler.name}: this worker has no child processes")
            call = functools.partial(isolated.call, handler)
        elif handler.is_async:
            call = handler.call
        else:
            call = functools.partial(self._in_thread, active, handler)
        for wrap in reversed(self._middleware):
            call = _wrapped(wrap, call)
        if handler.is_async and handler.isolation == "none":  # nothing of this one run is in it
            self._calls[id(handler)] = call
        return call

    async def _in_thread(self, active: Active, handler: Handler, context: Context) -> Any:
        """A thread cannot be stopped: slot and claim stay with it until it returns."""
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
                continue  # wait for the thread; what it does until then is still this attempt's
            if active.cause and active.cause != "drain":
                raise asyncio.CancelledError
            return result  # while draining, too: what is done need not be done again

    # -- ends -------------------------------------------------------------------------------------

    def _store_away(self, run: Run, error: BaseException | str) -> Outcome:
        """No failure of the handler: it spends no attempt, and its breaker does not hear of it."""
        log.warning(
            "message %s: the store was away for too long; it runs again without a lost attempt: %s",
            run.message.id,
            error,
        )
        return Released(after_s=1.0)

    def _cancelled(self, active: Active, handler: Handler) -> Outcome | None:
        if active.cause == "timeout":
            error = HandlerTimeout(f"{handler.name} ran longer than {handler.timeout_s} s")
            return self._failed(handler, active, error, "")
        if active.cause == "store":
            return self._store_away(active.run, f"{handler.name} waited for it past its timeout")
        if active.cause == "drain":
            return Released()
        if active.cause == "cancel":
            from ackbone.core.outcome import Discarded

            return Discarded(reason="cancelled")
        return None  # lost

    def _failed(
        self, handler: Handler, active: Active, error: BaseException, trace: str
    ) -> Outcome:
        run = active.run
        active.trace = bounded(self._mask(trace))
        if isinstance(error, HandlerCrashed):
            log.warning("message %s: %s", run.message.id, error)
            return Retry(after_s=0.0, reason=describe(error, self._mask), crashed=True)
        decision = decide(handler.retry, failures=run.failures + 1, error=error, mask=self._mask)
        warn(
            log,
            "message %s: attempt %d of %d of %s failed: %s; %s",
            run.message.id,
            run.failures + 1,
            handler.retry.max_retries + 1,
            handler.name,
            describe(error, self._mask),
            f"retry in {decision.after_s:.1f} s"
            if isinstance(decision, Retry)
            else f"to dead letters (ackbone dlq show {run.message.id})",
            trace=active.trace,
            trace_id=run.message.trace_id,
        )
        log.debug("message %s: the whole traceback", run.message.id, exc_info=error)
        return decision

    def _finished(self, active: Active, context: Context, outcome: Outcome | None) -> Finished:
        run = active.run
        replies, sends, usage = context._collected()
        details: dict[str, Any] = {}
        agent_run_id = None
        told_on_ack = False
        if type(outcome) is Done:
            notices = active.sub.notices
            told_on_ack = notices is not None and notices.on_ack and run.delivery is not None
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
        # One more keyword above would cost every run more than this costs those that failed.
        return structs.replace(finished, traceback=active.trace) if active.trace else finished

    def _cancel(self, active: Active, cause: str) -> None:
        if not active.cause:
            active.cause = cause
            # A task that is cancelled before its first step never runs at all, and its end would
            # be heard by nobody: that one finds the cause by itself.
            if active.task is not None and active.started_us:
                active.task.cancel()

    def _timed_out(self, active: Active, handler: Handler) -> None:
        self._cancel(active, "store" if self._store.is_waiting(active.run) else "timeout")
        self._expect_end(active, handler)

    def _expect_end(self, active: Active, handler: Handler) -> None:
        at = asyncio.get_running_loop().time() + self._recycle_grace_s
        self._deadlines.add(at, lambda: self._stuck(active, handler))

    def _stuck(self, active: Active, handler: Handler) -> None:
        """Past its timeout and its grace: nothing here can end it, so this process must go.

        Not while it waits for the store: it ends when the store is back, and may have a result of
        an effect that only this process knows.
        """
        if id(active) not in self._active:
            return
        if self._store.is_waiting(active.run):
            self._expect_end(active, handler)
        elif self._on_stuck is not None:
            log.error(
                "message %s: %s did not stop %.1f s after its timeout; this worker is replaced",
                active.run.message.id,
                handler.name,
                self._recycle_grace_s,
            )
            self._on_stuck(active.run)

    # -- breakers ---------------------------------------------------------------------------------

    def _new_breaker(self, handler: Handler) -> Breaker | None:
        if self._breaker_policy.failures <= 0:
            return None
        breaker = Breaker(self._breaker_policy, self._clock.monotonic)
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
                        self._breaker_policy.failures,
                    )
            case _:
                breaker.cancelled()


def _wrapped(wrap: Middleware, inner: CallNext) -> CallNext:
    return lambda context: wrap(context, inner)
