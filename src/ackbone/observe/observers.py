"""Observers: functions that are called with every event of this process, after its commit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ackbone.core.events import Entry, Event, Listener, Observer

log = logging.getLogger("ackbone.observe")


def listener_of(observer: Observer) -> Listener:
    """Return the store's listener for an observer. Errors that it raises are only logged."""

    def hear(entries: Sequence[Entry]) -> None:
        for tenant_id, subscription, task_id, kind, data in entries:
            event = Event(
                type=kind,
                tenant_id=tenant_id,
                subscription=subscription,
                task_id=task_id,
                data=data,
            )
            try:
                observer(event)
            except Exception:
                log.exception("an observer failed on %s", kind)

    return hear
