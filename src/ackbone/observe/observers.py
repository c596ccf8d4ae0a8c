"""Observers: functions that are called with every event of this process, after its commit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ackbone.core.events import Entry, Event, Observer

log = logging.getLogger("ackbone.observe")


class Observers:
    """A listener of the store. Errors that an observer raises are only logged."""

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def add(self, observer: Observer) -> None:
        self._all.append(observer)

    def hear(self, entries: Sequence[Entry]) -> None:
        if not self._all:
            return
        for tenant_id, subscription, task_id, kind, data in entries:
            event = Event(
                type=kind,
                tenant_id=tenant_id,
                subscription=subscription,
                task_id=task_id,
                data=data,
            )
            for observer in self._all:
                try:
                    observer(event)
                except Exception:
                    log.exception("an observer failed on %s", kind)
