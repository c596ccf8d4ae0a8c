"""What people do to the replies of a folder, job by job, by whoever is alone in it.

Nobody needs to be sending from it. A sender in another process sees a change at its next look, and
reads every file again before it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core import events
from holdfast.core.clock import Clock
from holdfast.core.delivery import Status
from holdfast.core.delivery_desk import DeliveryFilter, DeliveryRecord, refusal
from holdfast.core.errors import HoldfastError
from holdfast.core.events import Entry
from holdfast.core.message import DEFAULT_TENANT
from holdfast.core.text import storable

from . import whole_files
from .file_queue import log, parsed
from .filed import Filed, filed, to_us
from .queued import QueuedDelivery
from .watched_folder import WatchedFolder
from .whole_files import Stamp

_RETRIED_FROM = frozenset({Status.FAILED, Status.UNKNOWN, Status.PENDING})
_CHANGED_IN = _RETRIED_FROM | {Status.QUEUED}


@dataclass(slots=True)
class Kept:
    """A reply that is in the folder."""

    filed: Filed
    path: Path
    status: Status

    @property
    def id(self) -> str:
        return self.filed.delivery.id

    def entry(self, kind: str, **data: Any) -> Entry:
        reply = self.filed.parcel().reply
        named = {"delivery_id": reply.id, "channel": reply.channel, **data}
        return reply.tenant_id, "", reply.task_id or "", kind, named


class DeskWork:
    """One person's. What it did stands in the log of acts: who sends from here tells of it."""

    def __init__(self, folder: WatchedFolder, clock: Clock, *, by: str) -> None:
        self._folder = folder
        self._queue = folder.queue
        self._clock = clock
        self._by = by
        self._read: dict[Path, tuple[Stamp, Filed]] = {}

    # -- looking ----------------------------------------------------------------------------------

    def records(self, where: DeliveryFilter) -> list[DeliveryRecord]:
        """The oldest first."""
        found = [_record(kept) for kept in self._kept().values()]
        found = [each for each in found if _fits(each, where)]
        return sorted(found, key=lambda each: (each.created_at_us, each.id))

    def named(self, name: str, tenant_id: str | None) -> list[DeliveryRecord]:
        found = self.records(DeliveryFilter(tenant_id=tenant_id))
        exact = [each for each in found if each.id == name]
        begins = [each for each in found if each.id.startswith(name)]
        return exact or sorted(begins, key=lambda each: each.id)

    def paused(self) -> frozenset[str]:
        return self._queue.paused.names()

    def acts(self) -> list[dict[str, Any]]:
        """What people did here, the first act first."""
        return self._folder.acts.all()

    def _kept(self) -> dict[str, Kept]:
        """All that are here. What is no delivery is left to the sender, which sets it aside."""
        queue, found = self._queue, {}
        read: dict[Path, tuple[Stamp, Filed]] = {}
        for folder in (queue.discarded_dir, queue.failed_dir, queue.queue_dir):
            for name, stamp in whole_files.listed(folder):
                path = folder / name
                known = self._read.get(path)
                each = known[1] if known and known[0] == stamp else _readable(path)
                if each is not None:
                    read[path] = stamp, each
                    found[each.delivery.id] = Kept(each, path, self._status_in(folder, each))
        self._read = read
        self._line_up(found.values())
        return found

    def _status_in(self, folder: Path, each: Filed) -> Status:
        if folder == self._queue.discarded_dir:
            return Status.DISCARDED
        if folder == self._queue.failed_dir:
            is_unknown = each.details.status == Status.UNKNOWN
            return Status.UNKNOWN if is_unknown else Status.FAILED
        return Status.PENDING

    def _line_up(self, found: Iterable[Kept]) -> None:
        """Of those that wait: who is being sent, and who stands behind another."""
        runs = self._queue.has_runner()
        lanes: dict[str, list[Kept]] = {}
        for kept in found:
            if kept.status is Status.PENDING:
                lanes.setdefault(kept.filed.parcel().lane or "", []).append(kept)
        for line in lanes.values():
            line.sort(key=lambda kept: kept.filed.order)
            under_way = [kept for kept in line if runs and kept.filed.is_cut_off]
            for kept in line if under_way else line[1:]:
                kept.status = Status.QUEUED
            for kept in under_way:
                kept.status = Status.SENDING

    # -- acting -----------------------------------------------------------------------------------

    def retry(self, ids: Sequence[str]) -> list[HoldfastError | None]:
        def allowed(kept: Kept) -> bool:
            return kept.status in _RETRIED_FROM

        def change(kept: Kept) -> None:
            kept.filed.retry()
            # In its own folder first: it is in one place all the time.
            self._write(kept)
            self._move(kept, self._queue.queue_dir)

        return self._each(ids, allowed, change, ("sent again", events.DELIVERY_RETRIED, {}))

    def edit(self, delivery_id: str, content: str) -> HoldfastError | None:
        text = content.encode("utf-8", "backslashreplace").decode()

        def allowed(kept: Kept) -> bool:
            return kept.status in _CHANGED_IN and not kept.filed.details.receipts

        def change(kept: Kept) -> None:
            kept.filed.delivery.content = text
            self._write(kept)

        (answer,) = self._each(
            [delivery_id], allowed, change, ("edited", events.DELIVERY_EDITED, {})
        )
        return answer

    def discard(self, ids: Sequence[str], reason: str) -> list[HoldfastError | None]:
        def allowed(kept: Kept) -> bool:
            return kept.status in _CHANGED_IN

        def change(kept: Kept) -> None:
            self._queue.discarded_dir.mkdir(exist_ok=True, mode=0o700)
            self._move(kept, self._queue.discarded_dir)

        data = {"reason": storable(reason)}
        return self._each(ids, allowed, change, ("discarded", events.DELIVERY_DISCARDED, data))

    def pause(self, channel: str) -> bool:
        return self._set_paused(channel, on=True)

    def unpause(self, channel: str) -> bool:
        return self._set_paused(channel, on=False)

    def _set_paused(self, channel: str, *, on: bool) -> bool:
        paused = self._queue.paused
        if (channel in paused.names()) is on:
            return False
        kind = events.DELIVERY_PAUSED if on else events.DELIVERY_RESUMED
        # An act on a channel belongs to no message, and to no queue.
        entry: Entry = (DEFAULT_TENANT, "", "", kind, {"channel": channel, "by": self._by})
        self._folder.acts.add([entry], self._clock.now_us())
        self._folder.look_anew()
        return paused.add(channel) if on else paused.remove(channel)

    def _each(
        self,
        ids: Sequence[str],
        allowed: Callable[[Kept], bool],
        change: Callable[[Kept], None],
        act: tuple[str, str, dict[str, Any]],
    ) -> list[HoldfastError | None]:
        """One answer per item: one that cannot be helped does not stop the others."""
        verb, kind, data = act
        kept = self._kept()
        answers: list[HoldfastError | None] = []
        chosen: dict[str, Kept] = {}
        for delivery_id in ids:
            found = kept.get(delivery_id)
            if found is not None and allowed(found):
                chosen[delivery_id] = found
                answers.append(None)
            else:
                answers.append(refusal(delivery_id, self._state(delivery_id, found), verb))
        entries = [each.entry(kind, **data, by=self._by) for each in chosen.values()]
        self._folder.acts.add(entries, self._clock.now_us())
        self._read = {}  # these are changed in memory first
        self._folder.look_anew()
        for each in chosen.values():
            change(each)
            log.info("[delivery] %s: %s (by %s)", verb, each.id[:8], self._by)
        return answers

    def _state(self, delivery_id: str, kept: Kept | None) -> tuple[str, bool] | None:
        if kept is not None:
            return kept.status, bool(kept.filed.details.receipts)
        return (Status.SENT, False) if delivery_id in self._folder.sent else None

    def _write(self, kept: Kept) -> None:
        whole_files.write(kept.path, kept.filed.to_bytes())
        self._folder.changed.add(kept.path.parent)

    def _move(self, kept: Kept, folder: Path) -> None:
        if kept.path.parent != folder:
            whole_files.move(kept.path, folder)
            self._folder.changed |= {kept.path.parent, folder}


def _readable(path: Path) -> Filed | None:
    delivery = parsed(path)
    if not isinstance(delivery, QueuedDelivery):
        return None
    try:
        return filed(delivery)
    except ValueError:
        return None


def _fits(record: DeliveryRecord, where: DeliveryFilter) -> bool:
    return (
        where.status in (None, record.status)
        and where.channel in (None, record.channel)
        and where.tenant_id in (None, record.tenant_id)
        and (where.since_us is None or record.created_at_us >= where.since_us)
    )


def _record(kept: Kept) -> DeliveryRecord:
    delivery, details = kept.filed.delivery, kept.filed.details
    is_sent_now = kept.status is Status.SENDING
    # An attempt under way marks its file as one in doubt is marked; of those it is one if it was.
    in_doubt = delivery.resent > 0 if is_sent_now else delivery.sending_since > 0
    tried = max(delivery.last_attempt_at, delivery.sending_since if is_sent_now else 0.0)
    created_us = to_us(delivery.created_at)
    return DeliveryRecord(
        id=delivery.id,
        tenant_id=details.tenant_id,
        subscription=None,
        task_id=details.task_id,
        channel=delivery.channel,
        recipient=delivery.recipient,
        content=delivery.content,
        conversation=details.conversation,
        priority=delivery.priority,
        status=kept.status,
        retry_count=delivery.retry_count,
        max_retries=delivery.max_retries,
        calls=details.calls,
        resent=delivery.resent,
        in_doubt=in_doubt,
        receipts=details.receipts,
        options=details.options,
        due_at_us=max(created_us, kept.filed.due_us),
        created_at_us=created_us,
        expires_at_us=None if details.expires_at is None else to_us(details.expires_at),
        last_attempt_at_us=to_us(tried) if tried else None,
        last_error=delivery.last_error or None,
    )
