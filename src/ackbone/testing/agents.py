"""Mocks for a queue trigger: agent runtime, governance, ledger, dedup store."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ackbone.core.clock import Clock, SystemClock
from ackbone.triggers.ports import IdempotencyStore

from .signals import Signal


@dataclass
class TriggeredEvent:
    """One call of `trigger_event`."""

    event_name: str
    context: dict[str, Any]
    focus: str | None
    tenant_id: str | None

    @property
    def message_id(self) -> str:
        return str(self.context["message_id"])


Answer = Mapping[str, Any] | BaseException
Behaviour = Callable[[TriggeredEvent], Awaitable[Mapping[str, Any]]]


class MockAgentRuntime:
    """An agent runtime that succeeds at once by default. A test can wait for `events`.

    `fail(error, times=2)` makes the next two calls fail. `results` are returned one after the
    other. `block` holds every run until its event is set. A `behaviour` replaces the whole call.
    """

    def __init__(
        self, behaviour: Behaviour | None = None, *, results: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self.events: Signal[TriggeredEvent] = Signal("triggered events")
        self.finished: Signal[TriggeredEvent] = Signal("finished events")
        self.running = 0
        self.most_running = 0
        self.gate: asyncio.Event | None = None
        self._behaviour = behaviour
        self._answers: deque[Answer] = deque(results)
        self._for_message: dict[str, deque[Answer]] = defaultdict(deque)

    def fail(self, error: BaseException, *, times: int = 1, message_id: str | None = None) -> None:
        """Make the next `times` calls raise an error: all calls, or those for one message."""
        answers = self._answers if message_id is None else self._for_message[message_id]
        answers.extend([error] * times)

    def answer(self, result: Mapping[str, Any], *, message_id: str | None = None) -> None:
        """Set the result of the next call: any call, or one for this message."""
        answers = self._answers if message_id is None else self._for_message[message_id]
        answers.append(result)

    def block(self) -> asyncio.Event:
        """Make every run wait until the returned event is set."""
        self.gate = asyncio.Event()
        return self.gate

    def get_triggered_events(self) -> list[TriggeredEvent]:
        """Every call so far, in order, also the failed ones."""
        return self.events.seen

    async def trigger_event(
        self,
        event_name: str,
        context: dict[str, Any],
        focus: str | None = None,
        tenant_id: str | None = None,
    ) -> Mapping[str, Any]:
        event = TriggeredEvent(event_name, context, focus, tenant_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            self.events.emit(event)
            if self.gate is not None:
                await self.gate.wait()
            result = await self._respond(event)
        finally:
            self.running -= 1
        self.finished.emit(event)
        return result

    async def _respond(self, event: TriggeredEvent) -> Mapping[str, Any]:
        if self._behaviour is not None:
            return await self._behaviour(event)
        for answers in (self._for_message.get(event.message_id), self._answers):
            if answers:
                answer = answers.popleft()
                if isinstance(answer, BaseException):
                    raise answer
                return answer
        return {"run_id": f"run-{self.events.count}"}


@dataclass
class GovernanceResult:
    """The answer of governance."""

    allowed: bool = True
    reason: str = ""
    policies: list[str] = field(default_factory=list)


class MockGovernanceLayer:
    """Allows everything except what `deny` names. `checks` lists the contexts of all questions."""

    def __init__(self) -> None:
        self.checks: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self._denied: dict[str | None, GovernanceResult] = {}

    def deny(
        self, reason: str, policies: Iterable[str] = (), *, message_id: str | None = None
    ) -> None:
        """Refuse one message, or all."""
        self._denied[message_id] = GovernanceResult(False, reason, list(policies))

    async def check_permission(self, context: dict[str, Any]) -> GovernanceResult:
        self.checks.append(dict(context))
        if self.error is not None:
            raise self.error
        denied = self._denied.get(context["message_id"]) or self._denied.get(None)
        return denied or GovernanceResult()


class MockLedger:
    """A ledger that keeps its records in memory."""

    def __init__(self) -> None:
        self.records: Signal[dict[str, Any]] = Signal("ledger records")
        self.error: Exception | None = None

    async def record(self, entry: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.records.emit(dict(entry))

    def get_records(self) -> list[dict[str, Any]]:
        """Every record so far, in order."""
        return self.records.seen


class MockIdempotencyStore(IdempotencyStore):
    """A dedup store in memory, with times to live. `error` makes every call fail."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.error: Exception | None = None
        self._clock: Clock = clock or SystemClock()
        self._values: dict[str, tuple[Any, float]] = {}

    async def exists(self, key: str) -> bool:
        return self._find(key) is not None

    async def set(self, key: str, value: Any, ttl: int) -> None:
        self._maybe_fail()
        self._values[key] = (value, self._clock.monotonic() + ttl)

    async def get(self, key: str) -> Any | None:
        found = self._find(key)
        return None if found is None else found[0]

    def _find(self, key: str) -> tuple[Any, float] | None:
        self._maybe_fail()
        found = self._values.get(key)
        if found is not None and found[1] <= self._clock.monotonic():
            del self._values[key]
            return None
        return found

    def _maybe_fail(self) -> None:
        if self.error is not None:
            raise self.error
