"""The relays that a worker process runs beside the engine's own."""

from __future__ import annotations

import logging
import subprocess
from typing import TYPE_CHECKING

from ackbone.core.approvals import Clerk
from ackbone.core.breaker import BreakerPolicy
from ackbone.core.broker import Shows, Trims
from ackbone.core.store import Store, Suspects, Worker
from ackbone.delivery.carrier import Carried, Carrier
from ackbone.delivery.terminal import TerminalChannel
from ackbone.delivery.uncarried import LOOK_S as UNCARRIED_S
from ackbone.delivery.uncarried import UncarriedWatch
from ackbone.engine.copies import LostCopies
from ackbone.engine.foreign_letters import ForeignLetters
from ackbone.engine.relays import Relay
from ackbone.observe.export import Exporter
from ackbone.store.keep import Keep
from ackbone.store.ledger_key import ledger_key
from ackbone.store.outbox import Outbox

if TYPE_CHECKING:
    from ackbone.app import App
    from ackbone.config import Config
    from ackbone.governance.rulebook import RuleFile
    from ackbone.observe.metrics import Metrics
    from ackbone.start_report import StartReport
    from ackbone.storage import Storage

log = logging.getLogger("ackbone.services")

LOOK_S = 1.0
"""How often a relay with a bell looks by itself, should a ring get lost."""
RULES_S = 0.4
"""How often the rule file is looked at; a changed one is read at the second look."""
RETENTION_S = 60.0
COPIES_S = 60.0
"""How often messages are looked for whose broker copy may be lost."""
LETTERS_S = 5.0
"""How often dead letters of other programs' workers are looked for."""
PRUNE_S = 600.0


def relays_of(
    app: App,
    *,
    spawn_solo: bool,
    carry: bool = True,
    terminal: bool = False,
    child: bool = False,
    report: StartReport | None = None,
) -> list[Relay]:
    """What this process does beside running messages. The app must be open.

    `spawn_solo`: it asks for child processes when suspects wait, its supervisor if it has one
    (`report`). `carry`: it sends replies; `terminal`: it prints those of the terminal channel,
    too. `child`: it is such a child process, and leaves what it can to others.
    """
    relays = [] if child else store_relays(app.storage, app.store, app.config)
    if app.metrics is not None:
        relays += _exporting(app, app.metrics)
    if app.rule_file is not None:
        relays.append(_rules(app.rule_file, app.storage.clerk(app.store)))
    if not app.store.fused and not child:
        relays.append(_outbox(app))
        relays += _trimming(app)
        relays += _lost_copies(app)
        relays += _foreign_letters(app)
    if carry:
        relays += _carrying(app, terminal=terminal)
    if spawn_solo and app.target is not None:
        # One worker of each kind of app: a child of this app runs only what this app handles.
        watch = SuspectWatch(app, app.target, report)
        role = f"suspects {app.kind}"
        relays.append(Relay(name="suspects", every_s=0.5, step=watch.step, role=role))
    return relays


def store_relays(storage: Storage, store: Store, config: Config) -> list[Relay]:
    """What whoever runs messages does for their store: sign its ledger, let what is old go, end
    what nobody answered."""
    return [
        *_ledger_relays(storage, store, config),
        _retention(storage, store, config),
        *_upkeep(storage, store),
        _approvals(storage.clerk(store)),
    ]


def export_relay(exporter: Exporter, every_s: float) -> Relay:
    """The loop that writes what a process counted to `queue_metrics`."""
    return Relay(name="metrics", every_s=every_s, step=exporter.step, at_end=True)


def _exporting(app: App, metrics: Metrics) -> list[Relay]:
    """Each trigger may have an interval of its own, or no rows at all."""
    rows = app.storage.metric_rows(app.store)
    every_s = app.config.metrics.export_interval_s
    own = {
        trigger.queue_name: trigger.metrics.export_interval or every_s
        for trigger in app.config.triggers
        if trigger.metrics.enabled and trigger.metrics.export_interval is not None
    }
    off = [trigger.queue_name for trigger in app.config.triggers if not trigger.metrics.enabled]
    others = Exporter(metrics, rows, queues=lambda queue: queue not in own, off=off)
    return [
        export_relay(others, every_s),
        *(
            export_relay(Exporter(metrics, rows, queues=queue.__eq__, channels=False), seconds)
            for queue, seconds in own.items()
        ),
    ]


def _upkeep(storage: Storage, store: Store) -> list[Relay]:
    return [
        Relay(name="upkeep", every_s=PRUNE_S, step=each.step, role="upkeep")
        for each in storage.upkeep(store)
    ]


def _approvals(clerk: Clerk) -> Relay:
    async def step(worker: Worker) -> None:
        while n := await clerk.expire(worker=worker):
            log.warning("%d approvals expired unanswered: their messages are rejected", n)

    return Relay(
        name="approvals",
        every_s=LOOK_S,
        step=step,
        role="approvals",
        due=clerk.has_overdue,
    )


def _ledger_relays(storage: Storage, store: Store, config: Config) -> list[Relay]:
    key = ledger_key(config.ledger_key_file, create=True)
    anchors = storage.anchors(store, key=key, file=config.ledger_anchor_file)
    relays = [
        Relay(
            name="ledger anchor",
            every_s=config.ledger.anchor_interval_s,
            step=anchors.step,
            role="anchor",
            at_end=True,
        )
    ]
    if config.retention.events_days is not None:
        pruner = storage.pruner(store, key=key, keep_days=config.retention.events_days)
        relays.append(
            Relay(name="ledger pruning", every_s=PRUNE_S, step=pruner.step, role="retention")
        )
    return relays


def _retention(storage: Storage, store: Store, config: Config) -> Relay:
    days = config.retention
    keep = Keep(
        tasks_days=days.tasks_days,
        metrics_days=days.metrics_days,
        deliveries_days=days.deliveries_days,
        dead_letters_days=days.dead_letters_days,
    )
    retention = storage.retention(store, keep)
    return Relay(name="retention", every_s=RETENTION_S, step=retention.step, role="retention")


def _rules(file: RuleFile, clerk: Clerk) -> Relay:
    """Every worker reads them for itself."""
    changed = False

    async def step(worker: Worker) -> None:
        nonlocal changed
        changed = await file.step() or changed
        if changed:
            await clerk.quotas_changed()
            changed = False  # not if the store was away: then it is told the next time

    return Relay(name="rules", every_s=RULES_S, step=step)


def _outbox(app: App) -> Relay:
    rows = app.storage.outbox(app.store)
    outbox = Outbox(rows, app.broker, codec_of=lambda queue: app.config.queue(queue).codec)
    return Relay(
        name="outbox",
        every_s=LOOK_S,
        step=outbox.step,
        role="outbox",
        due=outbox.due,
        bell=outbox,
        at_end=True,
    )


def _trimming(app: App) -> list[Relay]:
    """Streams of results and dead letters grow with every task: what is old goes."""
    broker: object = app.broker
    if not isinstance(broker, Trims):
        return []
    days: dict[str, float] = {}
    for sub in app.subscriptions():
        to, tasks = sub.notices, app.config.tasks
        if to is not None and to.results and tasks.results_days:
            days[to.results] = tasks.results_days
        if to is not None and to.dead_letters and tasks.dead_letters_days:
            days[to.dead_letters] = tasks.dead_letters_days

    async def step(worker: Worker) -> None:
        for queue, kept in days.items():
            removed = await broker.trim(queue, older_than_s=kept * 86_400)
            if removed:
                log.info("%s: %d entries older than %g days are removed", queue, removed, kept)

    return [Relay(name="trimming", every_s=RETENTION_S, step=step, role="trimming")] if days else []


def _lost_copies(app: App) -> list[Relay]:
    """A server may lose what it held, and the worker that ran it may have died."""
    broker: object = app.broker
    if not isinstance(broker, Shows):
        return []
    after_s = max(app.config.worker.copy_lost_after_s, 2 * (app.broker.capabilities.lease_s or 0.0))
    lost = LostCopies(app.storage.copies(app.store), broker, app.subscriptions(), after_s=after_s)
    every_s = min(COPIES_S, after_s / 2)
    return [Relay(name="copies", every_s=every_s, step=lost.step, role="copies", due=lost.due)]


def _foreign_letters(app: App) -> list[Relay]:
    """Workers of other programs give tasks up, too."""
    return [
        Relay(
            name=f"letters of {sub.queue}",
            every_s=LETTERS_S,
            step=ForeignLetters(app.store, app.broker, sub, sub.notices.dead_letters).step,
            role=f"letters:{sub.queue}",
            at_end=True,
        )
        for sub in app.subscriptions()
        if sub.codec == "task" and sub.notices is not None and sub.notices.dead_letters
    ]


def _carrying(app: App, *, terminal: bool) -> list[Relay]:
    """Replies go out by the channels that this process has."""
    channels = app.carried()
    if terminal:
        channels.append(Carried(TerminalChannel()))
    for name in sorted(app.telling_channels - {each.channel.name for each in channels}):
        log.warning(
            "subscribers are told by %r, and this process has no channel %r: what they are to hear"
            " waits for one that has. Write channels.%s, or use App.channel",
            name,
            name,
            name,
        )
    watch = UncarriedWatch(
        app.storage.records(app.store), frozenset(each.channel.name for each in channels)
    )
    app.store.on_events(watch.hear)
    relays = [Relay(name="uncarried replies", every_s=UNCARRIED_S, step=watch.step, bell=watch)]
    if not channels:
        return relays
    settings, breaker = app.config.delivery, app.config.breaker
    carrier = Carrier(
        app.storage.deliveries(app.store),
        channels,
        slots=settings.calls,
        tenant_per_minute=settings.tenant_per_minute,
        breaker=BreakerPolicy(failures=breaker.failures, probe_s=breaker.probe_s),
    )
    return [*relays, carrier_relay(carrier)]


def carrier_relay(carrier: Carrier) -> Relay:
    """The loop in which a carrier sends."""
    return Relay(
        name="deliveries",
        every_s=LOOK_S,
        step=carrier.step,
        channels=carrier.channels,
        bell=carrier,
        at_end=True,
        last=carrier.finish,
    )


async def suspects_of(app: App, worker: Worker) -> Suspects:
    """Count the messages that wait for child processes of an app. Those of paused queues do not."""
    names = [sub.name for sub in app.subscriptions()]
    found = await app.store.suspects(names, worker=worker)
    if not (found.few or found.none):
        return found
    paused = await app.store.paused()
    paused |= {name for name, queue in app.config.queues.items() if queue.paused}
    served = [name for name in names if name not in paused]
    return found if served == names else await app.store.suspects(served, worker=worker)


class SuspectWatch:
    """Asks for a warden (see warden.py) while suspects wait: the supervisor, or else starts it."""

    def __init__(self, app: App, target: str, report: StartReport | None = None) -> None:
        self._app = app
        self._target = target
        self._report = report
        self.warden: subprocess.Popen[bytes] | None = None

    async def step(self, worker: Worker) -> None:
        from ackbone.supervisor import spawn

        waiting = await suspects_of(self._app, worker)
        if not (waiting.few or waiting.none):
            return
        if self._report is not None and self._report.is_heard:
            self._report.suspects()
        elif self.warden is None or self.warden.poll() is not None:
            self.warden = spawn(self._target, ["--warden"])
