"""What waits in a folder, as one process remembers it: who stands in front, and who is due."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from holdfast.core.parcels import Parcel, PutOff

from .filed import Filed, to_us
from .whole_files import Stamp

CLOCK_US = 1_000_000
"""An attempt of the future by more than this shows that the clock was set back."""


@dataclass(slots=True)
class Place:
    """One reply that waits or is under way; its text stays in its file."""

    parcel: Parcel
    order: tuple[float, str]
    level: tuple[str, int]
    """Its channel and its priority."""
    due_us: int
    attempted_us: int
    cut_off: bool
    stamp: Stamp | None
    put_off_by: str | None = None
    """The window that is blocked: it is due at once when somebody opens that."""

    @property
    def id(self) -> str:
        return self.parcel.reply.id

    def due_at(self, now_us: int) -> int:
        return 0 if self.attempted_us > now_us + CLOCK_US else self.due_us


@dataclass(slots=True)
class Sending:
    """Whose attempt at a reply is under way."""

    worker_id: int
    call: int
    begun_us: int
    in_doubt: bool
    """Before that, as far as is known."""


class Shelf:
    """Replies by their lanes. One of a lane is under way at a time, and what shares its call."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.sending: dict[str, Sending] = {}
        self._levels: dict[tuple[str, int], dict[str, list[tuple[tuple[float, str], str]]]] = {}
        self._busy: dict[str, int] = {}

    def set(self, found: Filed, stamp: Stamp | None) -> Place:
        """As its file has it now; what is under way stays so."""
        parcel = found.parcel()
        delivery = found.delivery
        place = Place(
            parcel=parcel,
            order=found.order,
            level=(delivery.channel, delivery.priority),
            due_us=found.due_us,
            attempted_us=to_us(delivery.last_attempt_at),
            cut_off=found.is_cut_off,
            stamp=stamp,
        )
        before = self.places.get(place.id)
        if before is None or (_lane(before), before.order) != (_lane(place), place.order):
            self._leave_lane(before)
            line = self._levels.setdefault(place.level, {}).setdefault(_lane(place), [])
            insort(line, (place.order, place.id))
        self.places[place.id] = place
        return place

    def drop(self, delivery_id: str) -> bool:
        """It is not here any more. True: it was in the way of another."""
        self.ended(delivery_id)
        place = self.places.pop(delivery_id, None)
        return self._leave_lane(place)

    def begun(self, delivery_id: str, sending: Sending) -> None:
        if delivery_id not in self.sending:
            lane = _lane(self.places[delivery_id])
            self._busy[lane] = self._busy.get(lane, 0) + 1
        self.sending[delivery_id] = sending

    def ended(self, delivery_id: str) -> None:
        if self.sending.pop(delivery_id, None) is not None:
            lane = _lane(self.places[delivery_id])
            self._busy[lane] -= 1
            if not self._busy[lane]:
                del self._busy[lane]

    def is_sent_by(self, delivery_id: str, worker_id: int, call: int) -> bool:
        found = self.sending.get(delivery_id)
        return found is not None and (found.worker_id, found.call) == (worker_id, call)

    # -- who stands in front ----------------------------------------------------------------------

    def levels(self, channels: Collection[str], now_us: int) -> dict[str, dict[int, int]]:
        """By channel: the priorities of what waits, and when the first of each is due."""
        found: dict[str, dict[int, int]] = {channel: {} for channel in channels}
        for channel, priority in self._levels:
            if channel in found:
                dues = [place.due_at(now_us) for place in self._heads((channel, priority))]
                if dues:
                    found[channel][priority] = min(dues)
        return found

    def page(self, level: tuple[str, int], now_us: int, limit: int) -> list[Place]:
        """Those in front that are due, the first due first."""
        due = ((place.due_at(now_us), place.order, place) for place in self._heads(level))
        found = heapq.nsmallest(limit, (each for each in due if each[0] <= now_us))
        return [place for _, _, place in found]

    def put_off(self, found: PutOff) -> None:
        place = self.places[found.parcel.reply.id]
        place.due_us, place.put_off_by = found.until_us, found.by

    def free(self, keys: Collection[str], now_us: int) -> None:
        """What was put off by these windows is due now."""
        for place in self.places.values():
            if place.put_off_by is not None and place.put_off_by in keys:
                place.due_us, place.put_off_by = now_us, None

    def behind(self, delivery_id: str, limit: int) -> list[Place]:
        """Those right behind it in its lane, until one that is under way itself."""
        place = self.places[delivery_id]
        line = self._levels[place.level][_lane(place)]
        begin = bisect_left(line, (place.order, place.id)) + 1
        found: list[Place] = []
        for _, name in line[begin : begin + limit]:
            if name in self.sending:
                break
            found.append(self.places[name])
        return found

    def _heads(self, level: tuple[str, int]) -> Iterable[Place]:
        for lane, line in self._levels.get(level, {}).items():
            if lane not in self._busy:
                yield self.places[line[0][1]]

    def _leave_lane(self, place: Place | None) -> bool:
        if place is None:
            return False
        lanes, lane = self._levels[place.level], _lane(place)
        line = lanes[lane]
        del line[bisect_left(line, (place.order, place.id))]
        if not line:
            del lanes[lane]
            if not lanes:
                del self._levels[place.level]
        return bool(line)


def _lane(place: Place) -> str:
    return place.parcel.lane or ""
