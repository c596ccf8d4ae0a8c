"""The life of one message as one timeline, from all tables that mention it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ackbone.core import events
from ackbone.core.broker import Delivery
from ackbone.core.message import Message
from ackbone.core.records import (
    DeadLetter,
    Effect,
    Found,
    LedgerEvent,
    Records,
    Reply,
    Task,
    Waiting,
)

from .bodies import decoded
from .naming import SHORTEST, check_typed, the_one

SENT = "message.sent"
REPLY_WAITS = "delivery.pending"
DERIVED = "queue-"
"""The prefix of the trace id that is derived for a message without a trace."""
MOST = 200


class Moment(msgspec.Struct, frozen=True):
    """One event in the life of a message."""

    at_us: int
    what: str
    subscription: str
    worker_id: int | None = None
    data: Mapping[str, Any] = {}


class Link(msgspec.Struct, frozen=True):
    """Another message that is related to this one."""

    message_id: str
    relation: str
    """`replay of`, `replayed as`, `follow-up` or `of the same correlation`."""
    status: str | None = None
    type: str | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known about one message."""

    tenant_id: str
    message_id: str
    status: str
    """The status of the task; `waiting` in its queue; `several` if its subscriptions differ."""
    tasks: Sequence[Task]
    waiting: Sequence[Waiting]
    timeline: Sequence[Moment]
    replies: Sequence[Reply]
    effects: Sequence[Effect]
    dead_letters: Sequence[DeadLetter]
    links: Sequence[Link]


async def trace(records: Records, name: str, *, tenant_id: str | None = None) -> Trace:
    """Return the trace of the message that `name` identifies.

    `name` is a message id or its beginning, a correlation id, a trace id, an idempotency key, or
    the id of a dead letter. Raises NotFound, or Ambiguous with the messages that match.
    """
    name = check_typed(name)
    subject = await _subject(records, name, tenant_id)
    tenant, message_id = subject.tenant_id, subject.message_id
    tasks, history, letters, replies, effects = await asyncio.gather(
        records.tasks(tenant, message_id),
        records.events_of(tenant, message_id),
        records.letters_of(tenant, message_id),
        records.replies_of(tenant, message_id),
        records.effects_of(tenant, message_id),
    )
    near = await records.waiting_with(message_id, limit=MOST)
    waiting = [each for each in near if each.message_id == message_id]
    return Trace(
        tenant_id=tenant,
        message_id=message_id,
        status=_status(tasks, waiting, history),
        tasks=tasks,
        waiting=waiting,
        timeline=_timeline(tasks, waiting, history, replies),
        replies=replies,
        effects=effects,
        dead_letters=[letter for letter in letters if letter.message_id == message_id],
        links=await _links(records, tenant, message_id, tasks, letters, near),
    )


async def _subject(records: Records, name: str, tenant_id: str | None) -> Found:
    bare = name.removeprefix(DERIVED)
    found = list(await records.find(bare, tenant_id=tenant_id, limit=20))
    if not any(each.by == "id" for each in found):
        # The store does not know a message that no worker has claimed yet.
        found += [
            subject
            for each in await records.waiting_with(bare, limit=MOST)
            if (subject := _waiting_subject(each, bare, tenant_id)) is not None
        ]
    if not found:
        found = [
            Found(tenant_id=letter.tenant_id, message_id=letter.message_id, by="prefix")
            for letter in await records.letters_named(bare, tenant_id=tenant_id)
        ]
    exact = [each for each in found if each.by == "id"]
    if not exact and len(bare) < SHORTEST:
        found = [each for each in found if each.by != "prefix"]
    unique = {(each.tenant_id, each.message_id): each for each in exact or found}
    return the_one(
        list(unique.values()),
        name=name,
        what="message",
        describe=lambda each: f"{each.message_id}  {each.tenant_id}  (by {each.by})",
        hint=", by message id, correlation id, trace id, idempotency key or dead letter id",
    )


def _waiting_subject(waiting: Waiting, name: str, tenant_id: str | None) -> Found | None:
    """Return a queued message if it is the one searched for and does not just contain the text."""
    message = message_of(waiting)
    tenant = message.tenant_id if message is not None else "default"
    names = {"id": waiting.message_id, "prefix": waiting.message_id[: len(name)]}
    if message is not None:
        names["correlation id"] = message.correlation_id or ""
        names["idempotency key"] = message.idempotency_key or ""
        names["trace id"] = message.trace_id if message.trace is not None else ""
    by = next((by for by, known in names.items() if known == name), None)
    if by is None or tenant_id not in (None, tenant):
        return None
    return Found(tenant_id=tenant, message_id=waiting.message_id, by=by)


def message_of(waiting: Waiting) -> Message | None:
    """Decode a queued message; None if its bytes are not a message."""
    if not waiting.intact:
        return None
    delivery = Delivery(
        body=waiting.body, headers=dict(waiting.headers), tag=None, identity=waiting.message_id
    )
    return decoded(delivery, waiting.queue, ["standard", "json"]).message


def _status(
    tasks: Sequence[Task], waiting: Sequence[Waiting], history: Sequence[LedgerEvent]
) -> str:
    found = {task.status for task in tasks}
    if len(found) == 1:
        return found.pop()
    if found:
        return "several"
    if waiting:
        return "delayed" if all(each.state == "delayed" for each in waiting) else "waiting"
    ends = [event.type for event in history if event.type in events.FINAL_EVENTS]
    return ends[-1].removeprefix("task.") if ends else "unknown"


def _timeline(
    tasks: Sequence[Task],
    waiting: Sequence[Waiting],
    history: Sequence[LedgerEvent],
    replies: Sequence[Reply],
) -> list[Moment]:
    found = [
        Moment(each.at_us, each.type, each.subscription, each.worker_id, each.data)
        for each in history
    ]
    for task in tasks:
        if task.created_at_us is not None:
            sent: dict[str, Any] = {"queue": task.queue, "type": task.type}
            found.append(Moment(task.created_at_us, SENT, task.subscription, data=sent))
    for each in waiting:
        message = message_of(each)
        kind = None if message is None else message.type
        sent = {"queue": each.queue, "type": kind, "state": each.state, "due_at_us": each.due_at_us}
        found.append(Moment(each.sent_at_us, SENT, each.queue, data=sent))
    told = {e.data.get("delivery_id") for e in history if e.type == events.DELIVERY_CREATED}
    for reply in replies:
        if reply.id not in told:
            data = {"channel": reply.channel, "recipient": reply.recipient, "status": reply.status}
            found.append(
                Moment(reply.created_at_us, REPLY_WAITS, reply.subscription or "", data=data)
            )
    # The sort is stable, so events of one commit keep the order of the ledger.
    return sorted(found, key=lambda each: each.at_us)


async def _links(
    records: Records,
    tenant_id: str,
    message_id: str,
    tasks: Sequence[Task],
    letters: Sequence[DeadLetter],
    near: Sequence[Waiting],
) -> list[Link]:
    found: dict[str, Link] = {}
    for letter in letters:
        if letter.replay_id == message_id:
            found[letter.message_id] = Link(letter.message_id, "replay of", type=letter.type)
        elif letter.replay_id is not None:
            found[letter.replay_id] = Link(letter.replay_id, "replayed as")
    family = {message_id: "follow-up"}
    for task in tasks:
        if task.correlation_id is not None:
            family.setdefault(task.correlation_id, "of the same correlation")
    for correlation_id, relation in family.items():
        for task in await records.tasks_correlated(correlation_id, limit=MOST):
            if task.tenant_id == tenant_id and task.message_id != message_id:
                link = Link(task.message_id, relation, type=task.type)
                found.setdefault(task.message_id, link)
    for waiting in near:
        message = message_of(waiting)
        if message is None or waiting.message_id == message_id:
            continue
        if message.correlation_id == message_id and message.tenant_id == tenant_id:
            link = Link(waiting.message_id, "follow-up", type=message.type)
            found.setdefault(waiting.message_id, link)
    return [await _with_status(records, tenant_id, link, near) for link in found.values()]


async def _with_status(
    records: Records, tenant_id: str, link: Link, near: Sequence[Waiting]
) -> Link:
    tasks = await records.tasks(tenant_id, link.message_id)
    if tasks:
        return msgspec.structs.replace(
            link, status=tasks[0].status, type=link.type or tasks[0].type
        )
    queued = any(each.message_id == link.message_id for each in near)
    return msgspec.structs.replace(link, status="waiting" if queued else None)
