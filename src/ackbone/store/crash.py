"""Deaths of workers: which ones count, where a message runs after a crash, and when it ends.

A death counts for the messages of a worker only if another process of that machine outlived it, so
that a power cut, the end of a container and an announced stop do not count. A message with two
crashes runs in a small group in a child process; after a crash in a small group it runs alone in
one. Only crashes in which it ran alone can end it: the first one that its parent process explains
by an exit code or a signal, or the `crash_budget`th without an explanation (SIGKILL does not count
as one: an operator and the kernel send it, too).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from ackbone.core import events
from ackbone.core.events import Entry
from ackbone.core.machine import fate
from ackbone.core.outcome import Status
from ackbone.core.store import PARENT_WORKER, Company, Worker
from ackbone.store.letters import Letter
from ackbone.store.outcomes import final_data

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


SUSPECT_AT = 2
"""Crashes after which a message runs in a child process, in a small group."""
ALONE_AT = SUSPECT_AT + 1
"""Crashes after which a message runs alone in a child process."""
ANY_CRASHES = 1_000_000
_UNEXPLAINED = (-signal.SIGKILL, -signal.SIGTERM)
"""Signals that usually come from outside, and say nothing about the message."""


def crashes_of(company: Company, *, isolates: bool) -> tuple[int, int]:
    """Return the fewest and the most crashes of messages that run in this company.

    `isolates`: a supervisor starts child processes. Without one, all messages run together.
    """
    if not isolates:
        return (0, ANY_CRASHES) if company is Company.ANY else (ANY_CRASHES, ANY_CRASHES)
    return {
        Company.ANY: (0, SUSPECT_AT - 1),
        Company.FEW: (SUSPECT_AT, ALONE_AT - 1),
        Company.NONE: (ALONE_AT, ANY_CRASHES),
    }[company]


class Gone(NamedTuple):
    """A worker whose lease is over, and what is known about its machine."""

    worker_id: int
    state: str
    name: str
    parent: str | None
    parent_lives: bool
    """True if its parent is a worker that is alive."""
    machine_lives: bool
    """True if another worker of the same boot of the same machine is alive."""
    sibling_lives: bool
    """True if such a worker has the same parent."""
    outlived: bool
    """True if such a worker was there before this one died."""


class Judgement(StrEnum):
    """The decision about a worker that is gone."""

    COUNT = "count"
    """Its messages go back with one crash more each."""
    HAND_BACK = "hand back"
    """Its messages go back as if they had not run."""
    LEAVE = "leave"
    """The parent of the worker knows how it ended, and decides."""


def judge(gone: Gone, me: Worker, ended: Mapping[str, int]) -> Judgement:
    """Decide whether the death of a worker counts for the messages that it ran.

    `ended`: children of this worker that have ended, by name.
    """
    if gone.state == "leaving":
        return Judgement.HAND_BACK
    if gone.parent == me.as_parent:
        return Judgement.COUNT if gone.name in ended else Judgement.LEAVE
    if gone.parent is not None and gone.parent.startswith(PARENT_WORKER):
        return Judgement.LEAVE if gone.parent_lives else Judgement.HAND_BACK
    if gone.parent is None:  # no supervisor of ours started it, so any worker of the machine counts
        outlived = gone.machine_lives
    else:
        outlived = gone.sibling_lives or gone.outlived
    return Judgement.COUNT if outlived else Judgement.HAND_BACK


def silent_children(gone: Iterable[Gone], me: Worker, ended: Mapping[str, int]) -> list[str]:
    """Return the names of children of this worker whose lease is over and that have not ended."""
    return [each.name for each in gone if each.parent == me.as_parent and each.name not in ended]


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
    """The death of a worker under one of its messages, found at `now_us`."""

    def __init__(
        self,
        task: Victim,
        worker: Worker,
        budget: int,
        now_us: int,
        *,
        ended: Mapping[str, int] | None = None,
    ) -> None:
        """`ended`: exit codes by the names of workers, where the reaper knows them."""
        self.task = task
        self.now_us = now_us
        self.crashes = task.crashes + 1
        code = (ended or {}).get(worker.name)
        alone = task.crashes >= ALONE_AT
        explained = code is not None and code not in _UNEXPLAINED
        self.spent_the_budget = alone and (explained or self.crashes - ALONE_AT >= budget)
        how = "" if code is None else f" ({fate(code)})"
        where = " alone" if alone else ""
        self.error = (
            f"worker {worker.worker_id} died{how} while running it{where} (crash {self.crashes})"
        )
        self._history = [
            *(_decode(task.history) if task.history else []),
            {"attempt": task.attempt, "at": now_us, "error": self.error, "crash": True},
        ]
        self._worker = worker

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.task.tenant_id, self.task.subscription, self.task.message_id

    @property
    def history(self) -> str:
        """The history as the row stores it."""
        return _encode(self._history).decode()

    def lost(self, me: Worker) -> Entry:
        """Return the event that names the dead worker and the worker that found it."""
        data = {
            "worker": self._worker.worker_id,
            "by": me.worker_id,
            "consumer": self._worker.name,
            "crashes": self.crashes,
        }
        return (*self.identity, events.LOST, data)

    def failed(self) -> Entry:
        """Return the final event, once the budget is spent."""
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
