"""The work on a folder of replies, job by job, in one thread: what is chosen, and what becomes of
it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.core import parcels
from holdfast.core.clock import Clock
from holdfast.core.delivery import Fits, Limits, Outbound, Settled, Status, Taken
from holdfast.core.errors import StoreError, StoreUnavailable
from holdfast.core.events import Entry
from holdfast.core.parcels import ASIDE, PAGE, Choice, Ended, Ending, Orphan, Parcel, Windows
from holdfast.core.windows import call_name, name_of

from . import whole_files
from .desk_work import DeskWork
from .file_queue import DeliveryQueue, log
from .filed import Filed, to_us
from .shelf import CLOCK_US, Sending
from .watched_folder import LOOK_S, NOBODY, WatchedFolder
from .window_file import WindowFile

NOTHING_EXPIRES = -1
_REFRESHES = 3


class Filing:
    """One folder. Its jobs leave what is to be told behind, until somebody collects it."""

    def __init__(self, queue: DeliveryQueue, clock: Clock) -> None:
        self.alive: set[int] = set()
        """Workers that may take."""
        self.expiry_paused = False
        self.entries: list[Entry] = []
        self._clock = clock
        self._folder = WatchedFolder(queue, clock)
        # No name that ends like a delivery's: other programs look for those.
        self._windows = WindowFile(queue.queue_dir / ".windows")
        self._is_open = False
        self._turn = 0
        self._made_us = 0
        self._offset_us: int | None = None
        """Wall minus steady clock, at the last look."""

    @property
    def changed(self) -> set[Path]:
        """Folders that have to be synced."""
        return self._folder.changed

    def open(self) -> None:
        """This process sends from the folder now."""
        self._windows.read()
        self._folder.open()
        self._is_open = True

    def close(self) -> None:
        """Another process may send from the folder now."""
        self._is_open = False
        self.alive.clear()

    def desk(self, by: str) -> DeskWork:
        """Where a person works on this folder, whether or not this process sends from it."""
        return DeskWork(self._folder, self._clock, by=by)

    # -- put --------------------------------------------------------------------------------------

    def now_us(self) -> int:
        """A moment of its own for everything that is put in: it orders conversations."""
        self._made_us = max(self._clock.now_us(), self._made_us + 1)
        return self._made_us

    def put(self, found: Sequence[Filed]) -> None:
        """All of them or none; what was here before, or arrived lately, is left as it is."""
        written: list[str] = []
        try:
            for each in found:
                if self._folder.holds(each.delivery.id):
                    continue
                path = self._folder.path(each.delivery.id)
                if whole_files.write(path, each.to_bytes(), new=True):
                    written.append(each.delivery.id)
                    self._folder.changed.add(self._folder.queue.queue_dir)
                    if self._is_open:
                        self._folder.read(each.delivery.id)
        except BaseException:
            for name in written:
                self._folder.remove(name)
            raise
        self._folder.rings = self._folder.rings or bool(written)
        self._folder.queue.added.set()

    def holds(self, delivery_id: str) -> bool:
        """It waits, was given up, or arrived lately."""
        return self._folder.holds(delivery_id)

    # -- take -------------------------------------------------------------------------------------

    def due_in_s(self, channels: Mapping[str, Limits]) -> float | None:
        """0 if `take` would change anything."""
        now = self._now()
        self._folder.look()
        moments: list[int] = []
        for channel, levels in self._folder.shelf.levels(self._unpaused(channels), now).items():
            for priority in sorted(levels, reverse=True):
                if levels[priority] > now:
                    moments.append(levels[priority])
                    continue
                choice, _ = self._chosen((channel, priority), channels[channel], now, 1)
                if choice.changes:
                    return 0.0
                if choice.blocked_us is not None:
                    moments.append(choice.blocked_us)
                    break
        return parcels.in_s(moments, now)

    def take(self, channels: Mapping[str, Limits], limit: int, worker_id: int) -> Taken:
        self._require_alive(worker_id)
        now = self._now()
        self._folder.look()
        self._turn += 1
        blocked: dict[str, int] = {}
        taken: list[Outbound] = []
        aside = 0
        open_ = self._unpaused(channels)
        levels = self._folder.shelf.levels(open_, now)
        due = {name: [p for p, at in found.items() if at <= now] for name, found in levels.items()}
        try:
            for channel, priority in parcels.turns(due, self._turn):
                while aside < ASIDE and len(taken) < limit and channel not in blocked:
                    level, room = (channel, priority), limit - len(taken)
                    choice, windows = self._chosen(level, channels[channel], now, room)
                    aside += choice.set_aside
                    if choice.blocked_us is not None:
                        blocked[channel] = choice.blocked_us
                    self._carry_out(choice, windows, worker_id, now, taken)
                    if not choice.may_go_on:
                        break
        except StoreError as error:
            if not taken:
                raise
            log.warning("[delivery] %s", error)  # the next take meets it again
            return Taken(taken, LOOK_S)
        if len(taken) >= limit or aside >= ASIDE:
            return Taken(taken, 0.0)
        left = self._folder.shelf.levels([name for name in open_ if name not in blocked], now)
        waiting = [at for found in left.values() for at in found.values()]
        return Taken(taken, parcels.in_s([*waiting, *blocked.values()], now))

    def _unpaused(self, channels: Collection[str]) -> list[str]:
        paused = self._folder.queue.paused.names()
        return [channel for channel in channels if channel not in paused]

    def give_back(self, taken: Sequence[Outbound]) -> None:
        """Nobody was told of these: they are looked at again, as what a dead process left."""
        for reply in taken:
            found = self._folder.shelf.sending.get(reply.id)
            if found is not None:
                found.worker_id = NOBODY

    def _chosen(
        self, level: tuple[str, int], limits: Limits, now: int, room: int
    ) -> tuple[Choice, Windows]:
        """Who may go, of those in front; and the windows of it, which are copies."""
        for _ in range(_REFRESHES):
            found = self._folder.shelf.page(level, now, PAGE if room > 1 else 1)
            if not sum(self._folder.refresh(place) for place in found):
                break
        page = [place.parcel for place in found]
        asked = parcels.limits_of(page, limits)
        windows = self._windows.copies(parcels.keys_of(asked))
        expiry = NOTHING_EXPIRES if self.expiry_paused else now
        choice = parcels.choose(page, asked, windows, now_us=now, expiry_us=expiry, room=room)
        return choice, windows

    def _carry_out(
        self, choice: Choice, windows: Windows, worker_id: int, now: int, taken: list[Outbound]
    ) -> None:
        """Adds to `taken` as it goes: what was taken counts, whatever happens to the next."""
        for each in choice.put_off:
            self._folder.shelf.put_off(each)
        for parcel in choice.expired:
            self._expire(parcel)
        begun: set[str] = set()
        try:
            for parcel in choice.granted:
                reply = self._grant(parcel.reply.id, worker_id, now)
                if reply is not None:
                    begun.add(reply.id)
                    wait_s, is_back = parcel.reply.wait_s, parcel.reply.is_back
                    taken.append(msgspec.structs.replace(reply, wait_s=wait_s, is_back=is_back))
        finally:
            for parcel in choice.granted:
                if parcel.reply.id not in begun:  # its call will not be made
                    for key in choice.keys:
                        windows[key].calls.pop(name_of(parcel.reply), None)
            self._windows.all |= {key: windows[key] for key in choice.keys}
            self._save_windows(choice.keys, now)

    def _grant(self, delivery_id: str, worker_id: int, now: int) -> Outbound | None:
        """It is being sent; None: somebody took it out meanwhile."""
        found = self._folder.current(delivery_id)
        if found is None:
            return None
        reply, parcel = found.reply(), found.parcel()
        found.begin(now)
        self._folder.write(found)
        begun = to_us(found.delivery.sending_since)
        sending = Sending(worker_id, reply.call, begun, reply.in_doubt)
        self._folder.shelf.begun(delivery_id, sending)
        self.entries += parcels.first_events([parcel])
        return reply

    def _expire(self, parcel: Parcel) -> None:
        found = self._folder.current(parcel.reply.id)
        if found is not None:
            found.fail(parcels.EXPIRED)
            self._folder.give_up(found)
            self.entries.append(parcels.expired_event(parcel))

    def follow(self, head: Outbound, fits: Fits, limit: int, worker_id: int) -> list[Outbound]:
        self._require_alive(worker_id)
        if not self._folder.shelf.is_sent_by(head.id, worker_id, head.call):
            return []
        now = self._now()
        behind: list[tuple[Parcel, str]] = []
        for place in self._folder.shelf.behind(head.id, limit):
            found = self._folder.current(place.id)
            if found is not None and found.delivery.sending_since > 0:
                break  # it may be there already
            if found is not None:
                behind.append((found.parcel(), found.delivery.content))
        expiry = NOTHING_EXPIRES if self.expiry_paused else now
        chosen = parcels.followers(head, behind, fits, expiry_us=expiry)
        granted: list[Outbound] = []
        try:
            for each in chosen:
                reply = self._grant(each.id, worker_id, now)
                if reply is None:
                    break  # what stands behind it was to be said after it
                granted.append(reply)
        except StoreError as error:  # those that are begun go
            log.warning("[delivery] %s", error)
        return granted

    # -- settle -----------------------------------------------------------------------------------

    def settle(
        self, channels: Mapping[str, Limits], batch: Sequence[Settled], worker_id: int
    ) -> None:
        now = self._now()
        asked = parcels.settled_limits(channels, batch)
        parcels.count_answers(asked, self._windows.all, now)
        opened = parcels.opened(batch, self._windows.all, now)
        self._save_windows(parcels.changed_keys(asked), now)
        if opened:
            self._folder.shelf.free(opened, now)
        ended = [
            (settled, parcels.ending_of(settled))
            for settled in batch
            if self._folder.shelf.is_sent_by(settled.reply.id, worker_id, settled.reply.call)
        ]
        arrived = [ending.id for _, ending in ended if ending.status is Status.SENT]
        again = {settled.reply.id for settled, _ in ended if parcels.is_repeat(settled)}
        try:
            self._folder.sent.add(
                arrived, again=again
            )  # first, so that whoever misses the file finds it here
        except StoreError as error:  # that is a memory; what arrived has arrived
            log.warning("[delivery] %s", error)
        for settled, ending in ended:
            self._end(settled, ending, now)
            self._folder.rings = self._folder.rings or settled.frees is not None

    def _end(self, settled: Settled, ending: Ending, now: int) -> None:
        reply = settled.reply
        retry_count, parts = reply.retry_count, len(reply.receipts)
        if ending.status is Status.SENT:
            self._folder.remove(reply.id)
        else:
            found = self._folder.current(reply.id)
            if found is None:
                return  # somebody took it out meanwhile
            found.end(ending, was_in_doubt=reply.in_doubt, now_us=now)
            retry_count, parts = found.delivery.retry_count, len(found.details.receipts)
            if ending.is_end:
                self._folder.give_up(found)
            else:
                self._folder.write(found, ended=True)
                self._folder.rings = self._folder.rings or ending.is_due
        row = Ended(reply.tenant_id, "", reply.task_id or "", None, retry_count, parts)
        self.entries += parcels.events_of(settled, row)

    # -- recover ----------------------------------------------------------------------------------

    def recover(self, worker_id: int) -> int:
        self._folder.look()
        now = self._now()
        gone = {
            name: sending
            for name, sending in self._folder.shelf.sending.items()
            if sending.worker_id != worker_id and sending.worker_id not in self.alive
        }
        for name, sending in gone.items():
            found = self._folder.current(name)
            if found is not None:
                if found.is_cut_off:  # else somebody edited it meanwhile
                    found.cut_off()
                self._folder.write(found, ended=True)
                self.entries += parcels.orphan_events(_orphan(found, sending))
        if gone:
            calls = {call_name(name, each.call): each.begun_us for name, each in gone.items()}
            self._save_windows(parcels.give_up_calls(self._windows.all, calls, now), now)
            self._folder.rings = True
        return len(gone)

    def _require_alive(self, worker_id: int) -> None:
        """What a number that left takes would be given to another at once."""
        if worker_id not in self.alive:
            raise StoreUnavailable(f"worker {worker_id} has left this folder; nothing taken")

    # -- the folder -------------------------------------------------------------------------------

    def collect(self) -> tuple[list[Entry], bool]:
        """What jobs have to tell, and whether to ring. What they changed is no reason to look."""
        self._folder.has_written()
        if self._is_open:
            with contextlib.suppress(StoreError):  # read next time
                self.entries += self._folder.acts.news()
        found = self.entries, self._folder.rings
        self.entries, self._folder.rings = [], False
        return found

    def _now(self) -> int:
        now = self._clock.now_us()
        offset = now - int(self._clock.monotonic() * 1e6)
        if self._offset_us is not None and abs(offset - self._offset_us) > CLOCK_US:
            self._windows.move(offset - self._offset_us)
        self._offset_us = offset
        return now

    def _save_windows(self, keys: Collection[str], now: int) -> None:
        if keys:
            self._windows.write(now)
            self._folder.changed.add(self._folder.queue.queue_dir)


def _orphan(found: Filed, sending: Sending) -> Orphan:
    reply = found.parcel().reply
    return Orphan(
        id=reply.id,
        call=sending.call,
        begun_us=sending.begun_us,
        in_doubt=int(sending.in_doubt),
        channel=reply.channel,
        tenant_id=reply.tenant_id,
        subscription="",
        task_id=reply.task_id or "",
    )
