"""A folder of replies and what one process remembers of it, kept together.

The files are the truth, and are read again before they count. In memory is who stands where and
which attempts are under way: a file that says it is being sent, while nobody here sends it, was
left by a process that died.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from holdfast.core.clock import Clock
from holdfast.core.errors import StoreError

from . import whole_files
from .acts_log import ActsLog
from .file_queue import DeliveryQueue
from .filed import Filed, filed, to_us
from .sent_log import SentLog
from .shelf import Place, Sending, Shelf

LOOK_S = 2.0
"""How often all files are looked at, for what people changed in them."""
NOBODY = 0
"""The number of no worker."""


class WatchedFolder:
    """Reads and writes one reply at a time; its folders are synced by whoever takes `changed`."""

    def __init__(self, queue: DeliveryQueue, clock: Clock) -> None:
        self.queue = queue
        self.shelf = Shelf()
        self.sent = SentLog(queue.queue_dir / ".sent")
        self.acts = ActsLog(queue.queue_dir / "acts.log")
        self.changed: set[Path] = set()
        self.rings = False
        """Somebody's turn may have come."""
        self._clock = clock
        self._looked_at = float("-inf")
        self._listed = 0

    def open(self) -> None:
        """This process sends from it now."""
        self.sent.shorten()
        self.acts.skip()
        self.shelf = Shelf()
        self._looked_at = float("-inf")
        self.look()

    def holds(self, delivery_id: str) -> bool:
        """It waits, was given up, by a person, too, or arrived lately. Asked in the order in which
        files move."""
        name = f"{delivery_id}.json"
        queue = self.queue
        waits, failed = queue.queue_dir / name, queue.failed_dir / name
        here = waits.exists() or failed.exists() or delivery_id in self.sent
        return here or (queue.discarded_dir / name).exists()

    def look(self) -> None:
        """Whatever others put in, changed or took out; now and then, and when the list changed."""
        now_s = self._clock.monotonic()
        listed = whole_files.listed_at(self.queue.queue_dir)
        if listed == self._listed and now_s - self._looked_at < LOOK_S:
            return
        self._listed, self._looked_at = listed, now_s
        here = whole_files.listed(self.queue.queue_dir)
        names = {name.removesuffix(".json"): stamp for name, stamp in here}
        for name in [each for each in self.shelf.places if each not in names]:
            if name not in self.shelf.sending:
                self.drop(name)
        for name, stamp in names.items():
            place = self.shelf.places.get(name)
            if name not in self.shelf.sending and (place is None or place.stamp != stamp):
                self.read(name)

    def look_anew(self) -> None:
        """Somebody who works beside the sender in this process changed something."""
        self._looked_at = float("-inf")
        self.rings = True

    def refresh(self, place: Place) -> bool:
        """True: it was changed or taken out since it was read."""
        if whole_files.stamp_of(self.path(place.id)) == place.stamp:
            return False
        self.read(place.id)
        return True

    def read(self, delivery_id: str) -> None:
        stamp, found = whole_files.stamp_of(self.path(delivery_id)), self.current(delivery_id)
        if found is None:
            return
        place = self.shelf.set(found, stamp)
        if not place.cut_off:
            return
        if delivery_id in self.sent:  # killed between the two steps of its end
            self.remove(delivery_id)
        else:
            begun = to_us(found.delivery.sending_since)
            again = found.delivery.resent > 0
            self.shelf.begun(delivery_id, Sending(NOBODY, found.details.calls, begun, again))

    def current(self, delivery_id: str) -> Filed | None:
        """As its file has it now; None: there is none any more, or it is no delivery."""
        delivery = self.queue.read(delivery_id)
        if delivery is not None:
            try:
                return filed(delivery)
            except ValueError as error:
                self.queue.set_aside(delivery_id, str(error))
        self.drop(delivery_id)
        return None

    def write(self, found: Filed, *, ended: bool = False) -> None:
        path = self.path(found.delivery.id)
        whole_files.write(path, found.to_bytes())
        self.changed.add(path.parent)
        if ended:
            self.shelf.ended(found.delivery.id)
        self.shelf.set(found, whole_files.stamp_of(path))

    def give_up(self, found: Filed) -> None:
        """Into `failed/`: in its own folder first, so that it is in one place all the time."""
        path = self.path(found.delivery.id)
        whole_files.write(path, found.to_bytes())
        whole_files.move(path, self.queue.failed_dir)
        self.changed |= {path.parent, self.queue.failed_dir}
        self.drop(found.delivery.id)

    def remove(self, delivery_id: str) -> None:
        """It arrived, or nobody was promised that it would."""
        whole_files.remove(self.path(delivery_id))
        self.changed.add(self.queue.queue_dir)
        self.drop(delivery_id)

    def drop(self, delivery_id: str) -> None:
        """Its file is not here any more."""
        self.rings = self.shelf.drop(delivery_id) or self.rings

    def path(self, delivery_id: str) -> Path:
        return self.queue.queue_dir / f"{delivery_id}.json"

    def has_written(self) -> None:
        """What was changed just now was changed by us: no reason to look."""
        with contextlib.suppress(StoreError):  # the next look meets it
            self._listed = whole_files.listed_at(self.queue.queue_dir)
