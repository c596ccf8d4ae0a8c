"""Workers that leave or die, and what becomes of the messages that they were running.

A message of a worker that stopped in order goes back as if it had not run. A message of a dead
worker goes back with one crash more if the death counts: only if another process of that machine
outlived it, so that a power cut, the end of a container and an announced stop do not count. A
message with two crashes runs in a small group in a child process; after a crash in a small group it
runs alone in one. Only crashes in which it ran alone can end it: the first one that its parent
process explains by an exit code or a signal, or the `crash_budget`th without an explanation
(SIGKILL does not count as one: an operator and the kernel send it, too).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from ackbone.core import events
from ackbone.core.events import Entry
from ackbone.core.machine import fate
from ackbone.core.outcome import Status
from ackbone.core.store import PARENT_WORKER, Company, Reclaimed, Worker

from .outcomes import TaskRow, bury
from .unit import WORK, Change, Tx

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


class Crash:
    """The death of a worker under one of its messages, found at `now_us`."""

    def __init__(
        self,
        task: Running,
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
        self.attempts = [
            *(_decode(task.history) if task.history else []),
            {"attempt": task.attempt, "at": now_us, "error": self.error, "crash": True},
        ]
        self._worker = worker

    @property
    def history(self) -> str:
        """The history as the row stores it."""
        return _encode(self.attempts).decode()

    def lost(self, me: Worker) -> Entry:
        """Return the event that names the dead worker and the worker that found it."""
        data = {
            "worker": self._worker.worker_id,
            "by": me.worker_id,
            "consumer": self._worker.name,
            "crashes": self.crashes,
        }
        return (*self.task.identity, events.LOST, data)


class Running(TaskRow):
    """A task that runs under the id of a worker that is not there any more."""

    worker_id: int
    worker_state: str | None
    worker_name: str | None
    attempt: int
    crashes: int
    key: str | None
    lane: str | None
    history: str | None
    body: bytes | None
    body_info: str | None


async def leave(tx: Tx, change: Change, worker_id: int) -> None:
    """End a worker that stops in order. Runs that it did not end or begin cost no attempt."""
    sql, now_us = tx.sql.workers, await tx.moment()
    await tx.send(sql.end, worker_id, "left", now_us)
    await tx.send(sql.free_sources, worker_id)
    for task in [Running(*row) for row in await tx.rows(sql.running, worker_id)]:
        await _hand_back(tx, change, task, None, now_us)


async def reap(
    tx: Tx,
    change: Change,
    missing: Sequence[Gone],
    *,
    me: Worker,
    crash_budget: int,
    ended: Mapping[str, int],
) -> Reclaimed:
    """Declare the missing workers dead, and give back what they ran.

    Whatever runs under an id that is not there any more is given back, too: a claim may be
    committed just after its worker was declared dead. `ended`: exit codes of children of this
    worker, by name.
    """
    judged = {gone: judge(gone, me, ended) for gone in missing}
    gone = [each for each in missing if judged[each] is not Judgement.LEAVE]
    sql, now_us = tx.sql.workers, await tx.moment()
    for each in gone:
        state = "dead" if judged[each] is Judgement.COUNT else "left"
        await tx.send(sql.end, each.worker_id, state, now_us)
        await tx.send(sql.free_sources, each.worker_id)
    died = {each.worker_id for each in gone if each.state != "leaving"}
    found = [Running(*row) for row in await tx.rows(sql.running_of_the_gone)]
    quarantined = 0
    for task in found:
        lost_by = task.worker_name if task.worker_id in died else None
        if task.worker_state != "dead":
            await _hand_back(tx, change, task, lost_by, now_us)
            continue
        worker = Worker(worker_id=task.worker_id, name=task.worker_name or "")
        crash = Crash(task, worker, crash_budget, now_us, ended=ended)
        change.entries.append(crash.lost(me))
        if crash.spent_the_budget:
            await _quarantine(tx, change, task, crash)
            quarantined += 1
        else:
            values = (crash.crashes, task.attempt, crash.history, lost_by, now_us)
            await tx.send(sql.give_back, *task.identity, *values)
            change.topics.add(WORK)
    return Reclaimed(
        workers=[each.worker_id for each in gone],
        tasks=len(found) - quarantined,
        quarantined=quarantined,
        silent=silent_children(missing, me, ended),
    )


async def _hand_back(
    tx: Tx, change: Change, task: Running, lost_by: str | None, now_us: int
) -> None:
    """Make a task ready as if it had not run. `lost_by`: the name of its worker, if that died."""
    values = (task.crashes, task.attempt - 1, None, lost_by, now_us)
    await tx.send(tx.sql.workers.give_back, *task.identity, *values)
    data = {"attempt": task.attempt, "worker": task.worker_id}
    change.entries.append((*task.identity, events.RELEASED, data))
    change.topics.add(WORK)


async def _quarantine(tx: Tx, change: Change, task: Running, crash: Crash) -> None:
    """End a message that killed too many workers as a dead letter."""
    values = (crash.crashes, crash.error, crash.history, crash.now_us)
    await tx.send(tx.sql.workers.quarantine, *task.identity, *values)
    reason, error = "crash_budget", crash.error
    letter = task.letter(
        reason,
        error,
        retry_count=max(0, task.attempt - crash.crashes),
        history=crash.attempts,
        body=task.body,
        body_info=task.body_info,
    )
    final = task.final(Status.FAILED, reason=reason, error=error)
    change.entries += [final, bury(tx, letter, crash.now_us)]
    task.let_go(tx, change, task.key, task.lane)
