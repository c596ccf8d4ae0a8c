"""The parts of an app's worker: connections, handlers and limits, as the configuration says."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ackbone.core.breaker import BreakerPolicy
from ackbone.core.errors import ConfigError
from ackbone.core.store import Company
from ackbone.engine.child_pool import Children
from ackbone.engine.wiring import Handling, Ports, WorkerSettings
from ackbone.observe.redact import redact

if TYPE_CHECKING:
    from ackbone.app import App


def ports(app: App) -> Ports:
    return Ports(
        store=app.store,
        broker_of=app._broker_of,
        clock=app.clock,
        meter=app.metrics,
        results_on_ack={
            sub.name: to.results
            for sub in app.subscriptions()
            if (to := app._notices_of(sub.queue)) is not None and to.on_ack and to.results
        },
    )


def handling(app: App) -> Handling:
    config, breaker = app.config, app.config.breaker
    return Handling(
        handlers=app.handlers,
        make_send=app._follow_up,
        guard=app._guards,
        guard_timeout_s=config.worker.guard_timeout_s,
        middleware=tuple(app._middleware),
        breaker=BreakerPolicy(failures=breaker.failures, probe_s=breaker.probe_s),
        isolated=_children(app),
        # One thread per slot, because a handler's timeout already runs while it waits for a free
        # thread.
        threads=sum(config.slots(sub.queue) for sub in app.subscriptions()),
        mask=redact,
    )


def worker_settings(
    app: App, *, company: Company, cautious: bool, parent: str | None
) -> WorkerSettings:
    config = app.config
    settings = config.worker
    return WorkerSettings(
        # Children read no queue, and their parent knows them by their process id.
        name=app._consumer if company is Company.ANY else app.worker_name(os.getpid()),
        slots=settings.slots,
        own_slots={each.queue_name: config.slots(each.queue_name) for each in config.triggers},
        paused=frozenset(name for name, queue in config.queues.items() if queue.paused),
        lease_s=settings.lease_s,
        crash_budget=settings.crash_budget,
        shutdown_timeout_s=settings.shutdown_timeout_s,
        stall_limit_s=settings.stall_limit_s,
        recycle_grace_s=settings.recycle_grace_s,
        max_message_bytes=config.max_message_bytes,
        extend_s=config.tasks.heartbeat_interval_s,
        company=company,
        cautious=cautious,
        parent=parent,
    )


def _children(app: App) -> Children | None:
    """Return the child processes of isolated handlers, if there are such handlers."""
    isolated = [handler for handler in app.handlers if handler.isolation == "process"]
    if not isolated:
        return None
    if app.target is None:
        raise ConfigError(
            [
                f"{isolated[0].name} asks for isolation='process', but a child process would "
                "not find this app: start it with 'ackbone run MODULE:APP', or say where it "
                "is with app.target = 'MODULE:APP' or 'path/to/file.py:APP'"
            ]
        )
    command = [sys.executable, "-m", "ackbone.processes.handler_child", app.target]
    worker = app.config.worker
    return Children(command, size=worker.isolated or min(worker.slots, os.cpu_count() or 1))
