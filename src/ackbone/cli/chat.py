"""`ackbone chat`: a conversation with an app, whose worker runs in this process."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any, cast

import click
from msgspec.structs import replace

from ackbone.admin import deliveries as desk
from ackbone.core.breaker import BreakerPolicy
from ackbone.core.errors import AckboneError
from ackbone.core.outbound.delivery import Deliveries
from ackbone.core.outbound.delivery_records import DeliveryRecord

from .chat_channel import AnnouncedDeliveries, ChatChannel, chat_logs
from .chat_commands import Conversation
from .chat_screen import PROMPT, Screen, TypedLines
from .output import safe
from .running import LEVELS, usual_target
from .session import Session, command, operating

if TYPE_CHECKING:
    from ackbone.app import App
    from ackbone.backends import Looking
    from ackbone.delivery.carrier import Carrier
    from ackbone.engine.worker import EngineWorker

NEVER = 10**9
"""Failures in a row after which a destination counts as down. In a chat each failure is shown."""


@command(
    "ackbone chat",
    "ackbone chat myagent:app --type question",
    "ackbone chat --wait-scale 0.01          # do not wait minutes between attempts",
)
@click.argument("target", metavar="[MODULE:APP]", required=False)
@click.option(
    "--type", "type_", default="chat", show_default=True, help="Send messages of this type."
)
@click.option("--queue", help="Send to this queue instead of one that has a handler.")
@click.option(
    "--wait-scale",
    type=click.FloatRange(0.0, 1000.0),
    help="Multiply the waits between attempts (5 s, 25 s, 2 min, 10 min) by this factor.",
)
@click.option(
    "--log-level",
    type=LEVELS,
    default="warning",
    show_default=True,
    help="Log level for everything except deliveries (written to chat.log in ACKBONE_HOME).",
)
def chat(session: Session, target: str | None, **options: Any) -> None:
    """Talk to an app in this terminal and watch its replies.

    Without MODULE:APP it uses ./app.py if there is one, else a bundled agent that needs no network.
    Each line that you type is sent as a message, {"text": ...}. /help lists commands that show the
    queue, retry replies and simulate failures. Ctrl+C, Ctrl+D and /quit leave; waiting replies are
    kept.
    """
    app = session.load_app(usual_target(target))
    app.check()
    options["queue"] = options["queue"] or _queue_for(app, options["type_"])
    session.run(_chat(session, app, options))


def _queue_for(app: App, type_: str) -> str:
    """Return a queue with a handler for this type; the default queue is preferred."""
    usual = app.config.default_queue
    queues = sorted(app.handlers.queues, key=lambda name: (name != usual, name))
    for queue in queues:
        if app.handlers.find(queue, type_) is not None:
            return queue
    known = sorted({each for queue in queues for each in app.handlers.types(queue)})
    there_are = f"it has handlers for: {', '.join(known)}" if known else "it has no handlers"
    raise click.UsageError(
        f"The app has no handler for {type_!r}; {there_are}. Choose one with --type."
    )


async def _chat(session: Session, app: App, options: dict[str, Any]) -> None:
    as_json = session.out.as_json
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(prompt=PROMPT if on_terminal and not as_json else "", as_json=as_json)
    try:
        with chat_logs(screen, app.config.home / "chat.log", options["log_level"]):
            async with app:
                await _open(session, app, screen, options)
    finally:
        screen.close()


async def _open(session: Session, app: App, screen: Screen, options: dict[str, Any]) -> None:
    """Run a worker that prints replies on the screen, until the person leaves."""
    from ackbone.composition.background import carrier_relay, relays_of
    from ackbone.delivery.recovery_report import store_report, store_scan

    async with operating(app) as (records, operations):
        channel = ChatChannel(screen)
        talk = Conversation(
            app, screen, desk.Deliveries(records, operations), channel,
            type=options["type_"], queue=options["queue"],
        )  # fmt: skip
        carrier = await _carrier(app, records, screen, channel, options["wait_scale"])
        relays = [*relays_of(app, spawn_solo=True, carry=False), carrier_relay(carrier)]
        worker = app.worker(relays=relays)
        screen.show(f"{safe(app.name)} is listening. Type a message, or /help.")
        report = await store_report(records, carried=carrier.channels)
        if report:
            screen.show(report)
        with session.signals.gently() as asked:
            await worker.begin()
            try:
                await _talk(talk, screen, worker, asked)
            finally:
                await _leave(screen, worker)
        kept = (await store_scan(records))["pending"]
        if kept:
            what = "1 waiting reply is" if kept == 1 else f"{kept} waiting replies are"
            screen.show(f"{what} kept for the next start")
    if worker.failure is not None:
        raise AckboneError(f"the worker stopped: {worker.failure}") from worker.failure


async def _carrier(
    app: App, records: Looking, screen: Screen, channel: ChatChannel, wait_scale: float | None
) -> Carrier:
    """Return a carrier for all channels of the app, with this screen as the terminal."""
    from ackbone.delivery.attempts import Policy
    from ackbone.delivery.carrier import Carried, Carrier

    settings = app.config.delivery
    scale = settings.wait_scale if wait_scale is None else wait_scale
    carried = {
        each.channel.name: Carried(each.channel, replace(each.policy, wait_scale=scale))
        for each in app.carried()
    }
    policy = Policy(timeout_s=settings.timeout_s, wait_scale=scale)
    carried[channel.name] = Carried(channel, policy)

    def announce(new: DeliveryRecord) -> None:
        screen.show(safe(f"[delivery] enqueued: {new.id[:8]} -> {new.channel}"))

    deliveries = AnnouncedDeliveries(app.storage.deliveries(app.store), records, announce)
    await deliveries.begin()
    return Carrier(
        cast(Deliveries, deliveries),
        list(carried.values()),
        slots=settings.calls,
        tenant_per_minute=settings.tenant_per_minute,
        breaker=BreakerPolicy(failures=NEVER),
    )


async def _talk(
    talk: Conversation, screen: Screen, worker: EngineWorker, asked: asyncio.Event
) -> None:
    """Read lines until the person leaves. After input from a pipe, wait for the answers."""
    typed = TypedLines(sys.stdin.fileno())
    ends = [asyncio.create_task(_end(typed, event)) for event in (asked, worker.stopped)]
    try:
        screen.ask()
        async for line in typed:
            screen.answered()
            if not await talk.take(line):
                return
            screen.ask()
        if not sys.stdin.isatty():
            answers = asyncio.create_task(talk.answered())
            await asyncio.wait({answers, *ends}, return_when=asyncio.FIRST_COMPLETED)
            answers.cancel()
    finally:
        for task in ends:
            task.cancel()
        screen.leave()


async def _end(typed: TypedLines, event: asyncio.Event) -> None:
    await event.wait()
    typed.end()


async def _leave(screen: Screen, worker: EngineWorker) -> None:
    if worker.running:
        screen.show("waiting for the agent to finish; Ctrl+C leaves at once")
    await worker.drain()
    if worker.running:
        # A thread cannot be stopped. Its message is released when this process has ended.
        screen.show("a handler cannot be stopped: its message runs again at the next start")
        screen.close()
        os._exit(1)
