"""The background relays of a worker process, beside those that the engine itself runs.

Ledger anchors, retention, approvals, metrics, rules, outbox, deliveries, suspects.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ackbone.config.settings import DEFAULT
from ackbone.core.approvals import GovernanceUpkeep
from ackbone.core.breaker import BreakerPolicy
from ackbone.core.broker import DeadLetters, Shows, Subscription, Trims
from ackbone.core.store import Store, Worker
from ackbone.core.task_protocol import TaskBroker
from ackbone.delivery.carrier import Carried, Carrier
from ackbone.delivery.channels.terminal_channel import TerminalChannel
from ackbone.delivery.missing_channels import LOOK_S as MISSING_CHANNELS_S
from ackbone.delivery.missing_channels import MissingChannelWatch
from ackbone.engine.broker_dead_letters import BrokerDeadLetters
from ackbone.engine.foreign_dead_letters import ForeignDeadLetters
from ackbone.engine.lost_copies import LostCopies
from ackbone.engine.relays import Relay
from ackbone.observe.export import Exporter
from ackbone.processes.suspects import SuspectWatch
from ackbone.store.ledger import ledger_key
from ackbone.store.retention import Keep

if TYPE_CHECKING:
    from ackbone.app import App
    from ackbone.backends import Storage
    from ackbone.config import Config
    from ackbone.governance.rulebook import RuleFile
    from ackbone.observe.metrics import Metrics
    from ackbone.processes.start_report import StartReport

log = logging.getLogger("ackbone.background")

LOOK_S = 1.0
"""How often a relay looks by itself, in case a wake-up got lost."""
RULES_S = 0.4
"""How often the rule file is checked. A changed file is read at the second check."""
RETENTION_S = 60.0
COPIES_S = 60.0
"""How often the store is asked for messages whose broker copy may be lost."""
LETTERS_S = 5.0
"""How often dead letters of other programs' workers and of brokers' servers are read."""
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
    """Return the background relays of this process. The app must be open.

    `spawn_solo`: when suspects wait, it asks its supervisor (`report`) for a warden, or starts one.
    `carry`: it sends replies. `terminal`: it prints those of the terminal channel. `child`: it is a
    child process for suspects, and leaves to others what it can.
    """
    relays = [] if child else store_relays(app.storage, app.store, app.config)
    if app.metrics is not None:
        relays += _exporting(app, app.metrics)
    if app.rule_file is not None:
        relays.append(_rules(app.rule_file, app.storage.governance(app.store)))
    if not child and any(not app.store.holds(sub.queue) for sub in app.subscriptions()):
        relays.append(_outbox(app))
        relays += _trimming(app)
        relays += _lost_copies(app)
        relays += _foreign_letters(app)
        relays += _broker_letters(app)
    if carry:
        relays += _carrying(app, terminal=terminal)
    if spawn_solo and app.target is not None:
        # One worker for each kind of app: a child of this app runs only its message types.
        watch = SuspectWatch(app, app.target, report)
        role = f"suspects {app.kind}"
        relays.append(Relay(name="suspects", every_s=0.5, step=watch.step, role=role))
    return relays


def store_relays(storage: Storage, store: Store, config: Config) -> list[Relay]:
    """Store maintenance that every worker process runs: ledger anchors, retention, expiry of
    unanswered approvals."""
    return [
        *_ledger_relays(storage, store, config),
        _retention(storage, store, config),
        Relay(name="upkeep", every_s=PRUNE_S, step=storage.upkeep(store).step, role="upkeep"),
        _approvals(storage.governance(store)),
    ]


def export_relay(exporter: Exporter, every_s: float) -> Relay:
    """The relay that writes the counts of this process to `queue_metrics`."""
    return Relay(name="metrics", every_s=every_s, step=exporter.step, at_end=True)


def _exporting(app: App, metrics: Metrics) -> list[Relay]:
    """The relays that export metrics. A trigger may have its own interval, or no rows at all."""
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


def _approvals(governance: GovernanceUpkeep) -> Relay:
    async def step(worker: Worker) -> None:
        while n := await governance.expire(worker=worker):
            log.warning("%d approvals expired without an answer: their messages are rejected", n)

    return Relay(
        name="approvals",
        every_s=LOOK_S,
        step=step,
        role="approvals",
        due=governance.has_overdue,
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


def _rules(file: RuleFile, governance: GovernanceUpkeep) -> Relay:
    """The relay that reads a changed rule file. Every worker has one."""
    changed = False

    async def step(worker: Worker) -> None:
        nonlocal changed
        changed = await file.step() or changed
        if changed:
            await governance.quotas_changed()
            changed = False  # stays True if the store is away: the next step repeats it

    return Relay(name="rules", every_s=RULES_S, step=step)


def _outbox(app: App) -> Relay:
    outbox = app.storage.outbox(
        app.store,
        app.brokers.of,
        codec_of=lambda queue: app.config.queue(queue).codec,
        name_of=lambda queue: app.config.endpoint(queue).name,
    )
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
    """The relay that removes old entries from the streams of results and dead letters."""
    days: dict[str, float] = {}
    for sub in app.subscriptions():
        to, tasks = app._notices_of(sub.queue), app.config.tasks
        if to is not None and to.results and tasks.results_days:
            days[to.results] = tasks.results_days
        if to is not None and to.dead_letters and tasks.dead_letters_days:
            days[to.dead_letters] = tasks.dead_letters_days
    days = {queue: kept for queue, kept in days.items() if isinstance(_broker(app, queue), Trims)}

    async def step(worker: Worker) -> None:
        for queue, kept in days.items():
            broker = _broker(app, queue)
            assert isinstance(broker, Trims)  # noqa: S101 - for the type checker
            removed = await broker.trim(queue, older_than_s=kept * 86_400)
            if removed:
                log.info("%s: %d entries older than %g days are removed", queue, removed, kept)

    return [Relay(name="trimming", every_s=RETENTION_S, step=step, role="trimming")] if days else []


def _lost_copies(app: App) -> list[Relay]:
    """The relay for messages that the broker's server lost while their worker was dead."""
    relays = []
    for name, subs in _by_broker(app).items():
        broker = app._broker_of(subs[0].queue)
        if broker is None or not isinstance(broker, Shows):
            continue
        lease_s = broker.capabilities.lease_s or 0.0
        after_s = max(app.config.worker.copy_lost_after_s, 2 * lease_s)
        lost = LostCopies(app.storage.copies(app.store), broker, subs, after_s=after_s)
        role = "copies" if name == DEFAULT else f"copies:{name}"
        relays.append(
            Relay(
                name=role,
                every_s=min(COPIES_S, after_s / 2),
                step=lost.step,
                role=role,
                due=lost.due,
            )
        )
    return relays


def _by_broker(app: App) -> dict[str, list[Subscription]]:
    """Return the subscriptions by the names of their brokers."""
    found: dict[str, list[Subscription]] = {}
    for sub in app.subscriptions():
        found.setdefault(sub.broker, []).append(sub)
    return found


def _broker(app: App, queue: str) -> object:
    """Return the broker of a queue, to be asked for its roles."""
    return app.brokers.of(queue)


def _foreign_letters(app: App) -> list[Relay]:
    """The relays that read the dead letters of other programs' workers."""
    relays = []
    for sub in app.subscriptions():
        to, broker = app._notices_of(sub.queue), app.brokers.of(sub.queue)
        if sub.protocol is None or to is None or not to.dead_letters:
            continue
        if isinstance(broker, TaskBroker):
            letters = ForeignDeadLetters(app.store, broker, sub, to.dead_letters)
            relays.append(
                Relay(
                    name=f"letters of {sub.queue}",
                    every_s=LETTERS_S,
                    step=letters.step,
                    role=f"letters:{sub.queue}",
                    at_end=True,
                )
            )
    return relays


def _broker_letters(app: App) -> list[Relay]:
    """The relays that read the dead-letter queues of brokers' servers."""
    relays = []
    for name, subs in _by_broker(app).items():
        broker: object = app._broker_of(subs[0].queue)
        if isinstance(broker, DeadLetters):
            role = f"dead letters of {name}"
            step = BrokerDeadLetters(app.store, broker, subs).step
            relays.append(Relay(name=role, every_s=LETTERS_S, step=step, role=role))
    return relays


def _carrying(app: App, *, terminal: bool) -> list[Relay]:
    """The relays that send replies by the channels of this process."""
    channels = app.carried()
    if terminal:
        channels.append(Carried(TerminalChannel()))
    for name in sorted(app.telling_channels - {each.channel.name for each in channels}):
        log.warning(
            "no channel %r in this process: notifications for its subscribers stay queued until a"
            " worker that has it starts. Write channels.%s, or use App.channel",
            name,
            name,
        )
    watch = MissingChannelWatch(
        app.storage.records(app.store), frozenset(each.channel.name for each in channels)
    )
    app.store.on_events(watch.hear)
    relays = [
        Relay(name="missing channels", every_s=MISSING_CHANNELS_S, step=watch.step, bell=watch)
    ]
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
    """The relay in which a carrier sends."""
    return Relay(
        name="deliveries",
        every_s=LOOK_S,
        step=carrier.step,
        channels=carrier.channels,
        bell=carrier,
        at_end=True,
        last=carrier.finish,
    )
