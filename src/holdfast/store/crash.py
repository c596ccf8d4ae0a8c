"""One more crash of one message: what is told of it, and what is kept once it spent its budget."""

from __future__ import annotations

from typing import Protocol

import msgspec

from holdfast.core import events
from holdfast.core.events import Entry
from holdfast.core.outcome import Status
from holdfast.store.letter import Letter
from holdfast.store.outcomes import final_data

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Victim(Protocol):
    """A row that a dead worker ran."""

    @property
    def tenant_id(self) -> str: ...
    @property
    def subscription(self) -> str: ...
    @property
    def message_id(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def event_name(self) -> str | None: ...
    @property
    def attempt(self) -> int: ...
    @property
    def crashes(self) -> int: ...
    @property
    def history(self) -> str | None: ...
    @property
    def body(self) -> bytes | None: ...
    @property
    def body_info(self) -> str | None: ...
    @property
    def trace_id(self) -> str | None: ...


class Crash:
    """The death of `worker_id` under a message, found at `now_us`."""

    def __init__(self, task: Victim, worker_id: int, budget: int, now_us: int) -> None:
        self.task = task
        self.now_us = now_us
        self.crashes = task.crashes + 1
        self.spent_the_budget = self.crashes >= budget
        self.error = f"worker {worker_id} died while running it (crash {self.crashes} of {budget})"
        self._history = [
            *(_decode(task.history) if task.history else []),
            {"attempt": task.attempt, "at": now_us, "error": self.error, "crash": True},
        ]
        self._worker_id = worker_id

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.task.tenant_id, self.task.subscription, self.task.message_id

    @property
    def history(self) -> str:
        """As the row keeps it."""
        return _encode(self._history).decode()

    def lost(self, me: int, *, its_name: str) -> Entry:
        """The event that says whose death was found, and by whom."""
        data = {
            "worker": self._worker_id,
            "by": me,
            "consumer": its_name,
            "crashes": self.crashes,
        }
        return (*self.identity, events.LOST, data)

    def failed(self) -> Entry:
        """The final event, once the budget is spent."""
        task = self.task
        final = final_data(
            task.queue,
            task.tenant_id,
            task.message_id,
            task.event_name,
            task.trace_id,
            Status.FAILED,
        )
        final.update(reason="crash_budget", error=self.error)
        return (*self.identity, events.FAILED, final)

    def letter(self) -> Letter:
        task = self.task
        return Letter(
            tenant_id=task.tenant_id,
            subscription=task.subscription,
            message_id=task.message_id,
            queue=task.queue,
            event_name=task.event_name,
            reason="crash_budget",
            error=self.error,
            retry_count=max(0, task.attempt - self.crashes),
            history=self._history,
            body=task.body,
            body_info=task.body_info,
        )
