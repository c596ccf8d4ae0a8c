"""`ackbone tail`, `trace` and `stats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ackbone.admin.bodies import read_body
from ackbone.admin.stats import Stats
from ackbone.admin.stats import stats as take_stats
from ackbone.admin.tail import EventFilter, follow
from ackbone.admin.trace import Trace, message_of
from ackbone.admin.trace import trace as find_trace
from ackbone.core.clock import SystemClock
from ackbone.core.codecs.values import loads
from ackbone.core.errors import DecodeError, NotFound
from ackbone.core.outcome import Status
from ackbone.core.records import DeadLetter, LedgerEvent, Reply, Task
from ackbone.core.text import counted

from .bodies import show_traceback
from .output import Output, cut, dump, plain, safe, span, when
from .parameters import MOMENT, SPAN, filter_options, one_id
from .session import Session, command

_COLOURS = {
    "succeeded": "green",
    "failed": "red",
    "expired": "red",
    "rejected": "red",
    "dlq": "red",
    "lost": "yellow",
    "reclaimed": "yellow",
    "retried": "yellow",
    "parked": "yellow",
}
MOST_SHOWN = 1000
"""Characters of a payload or a result in the text of a trace; --json has them whole."""
_LEFT_OUT = ("trace_id", "message_id", "queue", "tenant_id", "created_at", "event_name")
"""Fields of an event's data that `details` leaves out: the line shows them elsewhere."""


@command(
    "ackbone tail",
    "ackbone tail --type 'task.f*' --since 1h --no-follow",
    "ackbone tail --queue orders --json | jq .task_id",
)
@filter_options(
    EventFilter,
    click.option("--queue", "queues", multiple=True, help="Only this queue; may be repeated."),
    click.option("--type", "types", multiple=True, help="Only events like this: task.*, *failed."),
    click.option("--tenant", "tenant_id", help="Only this tenant."),
    click.option("--id", "task_id", help="Only messages whose id begins with this."),
)
@click.option("--since", type=MOMENT, help="Start at this time: 15m, 2h (ago) or 2025-11-20T10:00.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Start this many events before the end.",
)
@click.option(
    "--no-follow", is_flag=True, help="Stop at the end instead of waiting for new events."
)
async def tail(
    session: Session, where: EventFilter, since: int | None, lines: int, no_follow: bool
) -> None:
    """Follow the ledger, event by event.

    Shows each event when it is written: claims, retries, outcomes, actions of operators. Stop it
    with Ctrl+C.
    """
    async with session.reading() as records:
        start = 0 if since is not None else await records.last_position(back=lines)
        async for event in follow(
            records, where, position=start, since_us=since, forever=not no_follow
        ):
            session.out.data(event, event_line(session.out, event))


def event_line(out: Output, event: LedgerEvent) -> str:
    """Return an event as one line of text."""
    kind = event.type.rpartition(".")[2]
    what = out.tinted(f"{safe(event.type):<16}", _COLOURS.get(kind))
    return f"{when(event.at_us, fine=True)}  {what}  {safe(event.subscription)}  " + (
        f"{safe(event.task_id or '-')}  {details(event.data)}".rstrip()
    )


def details(data: Any) -> str:
    """Return the rest of an event's data as one line of text."""
    parts = [
        f"{name}={_short(value)}"
        for name, value in data.items()
        if name not in _LEFT_OUT and value not in (None, "", [], {})
    ]
    return safe(" ".join(parts))


def _short(value: Any) -> str:
    return cut(value if isinstance(value, str) else dump(value), 120)


@command("ackbone trace 0199a1e1-ab12-7c02", "ackbone trace order-4711 --json")
@one_id
async def trace(session: Session, name: str, tenant: str | None) -> None:
    """Show the life of one message.

    ID is a message id or its beginning, a correlation id, a trace id, an idempotency key or the id
    of a dead letter. If more than one message matches, the command lists them (exit code 5). The
    timeline runs from the send to the last reply; replays and follow-ups are listed below it.
    """
    try:
        async with session.reading() as records:
            found = await find_trace(records, name, tenant_id=tenant)
    except NotFound as error:
        raise NotFound(f"{error}{_elsewhere(session)}") from None
    if session.out.as_json:
        session.out.data(_decoded(found))
    else:
        _show_trace(session.out, found)


_LOOK = {"redis": "redis-cli XLEN QUEUE", "rabbitmq": "rabbitmqctl list_queues -p VHOST"}
"""How to look at the queues of a broker server without ackbone, by the kind of broker."""


def _elsewhere(session: Session) -> str:
    """Return where a message may be that the store does not know, if queues are on servers."""
    kinds = {each.kind.name for each in session.config.endpoints.values() if each.kind.is_server}
    if not kinds:
        return ""
    how = " or ".join(f"`{_LOOK[kind]}`" for kind in sorted(kinds) if kind in _LOOK)
    return (
        "; a message that no worker has received yet is only on its broker, or in the outbox while "
        "it is not due or its broker is away. `ackbone stats` counts the queues of the "
        f"configuration; look for others on the server: {how}"
    )


def _decoded(found: Trace) -> dict[str, Any]:
    """Return the trace for --json, with results decoded."""
    record: dict[str, Any] = plain(found)
    for shown, task in zip(record["tasks"], found.tasks, strict=True):
        if task.result is not None:
            shown["result"] = _value(task.result)
    return record


def _value(result: bytes) -> Any:
    try:
        return loads(result)
    except DecodeError:
        return plain(result)


def _show_trace(out: Output, found: Trace) -> None:
    out.line(out.strong(f"message {safe(found.message_id)}"))
    colour = _COLOURS.get(found.status)
    out.line(f"  status    {out.tinted(safe(found.status), colour)}")
    out.line(f"  tenant    {safe(found.tenant_id)}")
    for task in found.tasks:
        took = "" if task.duration_ms is None else f", {task.duration_ms} ms"
        out.line(
            f"  queue     {safe(task.queue)}, type {safe(task.type or '-')}, "
            f"attempt {task.attempt}, crashes {task.crashes}{took}"
        )
        out.fields(
            ("key", task.idempotency_key),
            ("order", task.ordering_key),
            ("belongs", task.correlation_id),
            ("trace", task.trace_id),
            ("payload", _payload(task)),
            ("result", None if task.result is None else cut(dump(_value(task.result)), MOST_SHOWN)),
            ("error", task.error),
        )
        if task.status != Status.SUCCEEDED:
            _show_last_failure(out, task, found.dead_letters)
    for each in found.waiting:
        message = message_of(each)
        kind = "-" if message is None else message.type
        out.line(f"  queue     {safe(each.queue)}, type {safe(kind)}")
    begin = found.timeline[0].at_us if found.timeline else 0
    out.line()
    for moment in found.timeline:
        after = (moment.at_us - begin) / 1e6
        kind = moment.what.rpartition(".")[2]
        what = out.tinted(f"{safe(moment.what):<17}", _COLOURS.get(kind))
        # `by` is the operator whose command it was, or the handler or effect of a worker.
        by = moment.data.get("by")
        by_person = isinstance(by, str) and by not in ("handler", "effect")
        who = "" if moment.worker_id is None or by_person else f"worker {moment.worker_id} "
        out.line(
            f"  {when(moment.at_us, fine=True)}  +{after:<9.3f} {what} "
            f"{who}{details(moment.data)}".rstrip()
        )
    for reply in found.replies:
        out.line(
            f"  reply to {safe(reply.channel)}:{safe(reply.recipient)} ({_reply_state(reply)}): "
            f"{safe(reply.content)}"
        )
    for letter in found.dead_letters:
        out.line(f"  dead letter {letter.id} ({letter.state}): {safe(letter.reason)}")
    for link in found.links:
        status = f" ({safe(link.status)})" if link.status else ""
        out.line(f"  {link.relation}: {safe(link.message_id)} {safe(link.type or '')}{status}")


def _payload(task: Task) -> str | None:
    """Return the payload as text, or None. The store drops it when a message succeeds."""
    if task.body is None:
        return None
    message = read_body(task, "json").message
    return None if message is None else cut(dump(plain(message.payload)), MOST_SHOWN)


def _show_last_failure(out: Output, task: Task, letters: Sequence[DeadLetter]) -> None:
    """Show the traceback of the last failed attempt. A dead letter has the history of the task."""
    own = [letter for letter in letters if letter.subscription == task.subscription]
    history = own[-1].history if own else task.history
    if history:
        show_traceback(out, history[-1], "    ")


def _reply_state(reply: Reply) -> str:
    """Return a reply's status with its retries, doubt and last error."""
    parts = []
    if reply.status in ("sent", "discarded"):
        return safe(reply.status)
    if reply.retry_count:
        parts.append("1 retry" if reply.retry_count == 1 else f"{reply.retry_count} retries")
    if reply.in_doubt or reply.status == "unknown":
        parts.append("it may have arrived")
    if reply.last_error:
        parts.append(safe(reply.last_error))
    if not parts:
        return safe(reply.status)
    return ", ".join([f"{safe(reply.status)} {safe(reply.id[:8])}", *parts])


@command("ackbone stats", "ackbone stats --window 1h --json")
@click.option(
    "--window", type=SPAN, default="5m", show_default=True, help="Time window of the rates."
)
async def stats(session: Session, window: float) -> None:
    """Show queues, rates, workers and replies.

    Per queue, now: READY can start at once, DELAYED is not due yet (a delay or a retry), RUNNING is
    in a handler, WAITING is behind its conversation or a busy idempotency key, PARKED is set aside,
    DEAD counts open dead letters, OLDEST is the age of the oldest ready or waiting message.
    SUCCEEDED and FAILED count finished messages since the oldest that is kept. DONE/MIN and
    FAILED/MIN are rates over --window. Messages in the outbox count as ready or delayed. BROKER
    appears if there are several brokers. With --json, `uncounted` names those that did not answer.
    """
    if window <= 0:
        raise click.UsageError("--window must be greater than 0.")
    async with session.reading() as records:
        found = await take_stats(
            records,
            SystemClock(),
            window_s=window,
            configured=session.queues,
            look=session.look_at_brokers,
        )
    session.out.data(found)
    if not session.out.as_json:
        _show_stats(session.out, found, with_brokers=session.has_several_brokers)


def _show_stats(out: Output, found: Stats, *, with_brokers: bool) -> None:
    columns = ("queue", *(("broker",) if with_brokers else ()), "ready", "delayed", "running",
               "waiting", "parked", "dead", "oldest", "succeeded", "failed", "done/min",
               "failed/min")  # fmt: skip
    rows = []
    for state in found.queues:
        counts = found.statuses.get(state.queue, {})
        rates = found.rates.get(state.queue, {})
        rows.append((state, (
            state.queue + (" (paused)" if state.paused_at_us else ""),
            *((state.broker,) if with_brokers else ()),
            state.ready, state.delayed, state.running, state.waiting, state.parked, state.dead,
            span(state.oldest_age_s),
            counts.get("succeeded", 0),
            counts.get("failed", 0) + counts.get("expired", 0) + counts.get("rejected", 0),
            rates.get("succeeded", 0.0), rates.get("failed", 0.0),
        )))  # fmt: skip
    if rows:
        out.table(columns, rows)
    else:
        out.line("no queues yet")
    alive = [worker for worker in found.workers if worker.alive]
    out.line()
    out.line(f"workers   {len(alive)} alive, {len(found.workers) - len(alive)} dead")
    for worker in found.workers:
        state_word = "alive" if worker.alive else "dead"
        out.line(
            f"  {worker.worker_id}  {safe(worker.name)}  {state_word}, {worker.running} running, "
            f"since {when(worker.started_at_us)}"
        )
    for channel in sorted({*found.replies, *found.paused_channels}):
        statuses = found.replies.get(channel, {})
        shown = ", ".join(f"{count} {safe(status)}" for status, count in statuses.items()) or "none"
        paused = " (paused)" if channel in found.paused_channels else ""
        if channel in found.uncarried:
            shown += " (no living worker has this channel)"
        out.line(f"replies   {safe(channel)}{paused}: {shown}")
    for queue, count in found.unserved.items():
        wait = counted(count, "message", "wait")
        out.line(f"warning   {wait} in {safe(queue)}: no living worker reads it")
