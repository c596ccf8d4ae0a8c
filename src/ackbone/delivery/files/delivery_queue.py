"""A queue of deliveries in a folder: one JSON file for each, readable and editable by people.

`<id>.json` waits, `failed/<id>.json` was given up, `broken/` holds files that cannot be read as
deliveries. A file is written under another name, synced, and renamed; it moves between folders by
a rename, too. So every delivery is in exactly one place, with its old content or the new one,
whenever this process is killed. A process holds the folder's lock while it reads a file and writes
it again: a runner and another process that edits, retries or discards deliveries never overwrite
each other's changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ackbone.core.errors import Ambiguous, InvalidMessage, NotFound, StoreError
from ackbone.core.outbound.delivery import DIRECT
from ackbone.core.text import encodable

from . import atomic_files
from .queued_delivery import QueuedDelivery

log = logging.getLogger("ackbone.delivery")

SETTLED_S = 2.0
"""A file that cannot be read is set aside after this many seconds without a change: until then an
editor may be writing it."""
LONGEST_ID = 200
"""Largest size of a delivery's id in bytes: the id is also the name of the file."""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of this process, which say nothing about the file."""


class DeliveryQueue:
    """The folder. Any number of threads and processes may add deliveries; one runner sends them.

    People may edit a waiting file, remove it or add one: the files are the only state.
    """

    def __init__(self, queue_dir: Path | str | None = None) -> None:
        """`queue_dir`: `workspace/delivery-queue` below `ACKBONE_HOME` unless given."""
        self.queue_dir = _usual_dir() if queue_dir is None else Path(queue_dir)
        self.failed_dir = self.queue_dir / "failed"
        self.broken_dir = self.queue_dir / "broken"
        for folder in (self.queue_dir, self.failed_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.added = threading.Event()
        """Set when this process adds a delivery, so that its runner looks at once."""
        self._putting = threading.Lock()
        self._put_at = 0.0
        self._read_before: dict[str, tuple[tuple[int, int, int], QueuedDelivery]] = {}
        for folder in (self.queue_dir, self.failed_dir):
            atomic_files.sweep(folder)

    # -- the life of a delivery -------------------------------------------------------------------

    def enqueue(
        self, channel: str, recipient: str, content: str, *, priority: int = DIRECT
    ) -> QueuedDelivery:
        """Return when the delivery is on the disk. If this raises, nothing was added."""
        for name, value in (("channel", channel), ("recipient", recipient), ("content", content)):
            if not isinstance(value, str):
                raise InvalidMessage(f"{name} is text, not {type(value).__name__}")
        delivery = QueuedDelivery(
            id=str(uuid.uuid4()),
            channel=channel,
            recipient=recipient,
            content=content,
            created_at=self.now(),
            priority=priority,
        )
        self.put(delivery)
        log.info("[delivery] enqueued: %s -> %s", delivery.short_id, channel)
        return delivery

    def put(self, delivery: QueuedDelivery) -> None:
        """Add a delivery whose id the caller chose; it is on the disk when this returns.

        A delivery that waits or was given up is left as it is, so a call may be repeated. If this
        raises, nothing was added: InvalidMessage for an id or a text that no file can hold.
        """
        path = self._path(_checked_id(delivery.id))
        if self.holds(delivery.id):
            return
        wrote = atomic_files.write(path, delivery.to_bytes(), new=True)
        try:
            atomic_files.sync(self.queue_dir)
        except BaseException:
            if wrote:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        self.added.set()

    def holds(self, delivery_id: str) -> bool:
        """Return True if the delivery waits or was given up, and is on the disk."""
        name = self._path(delivery_id).name
        # The runner moves files in this direction, so one that moves meanwhile is found.
        if not any((folder / name).exists() for folder in (self.queue_dir, self.failed_dir)):
            return False
        # The process that wrote the file may have been killed before it synced the folder.
        atomic_files.sync(self.queue_dir, self.failed_dir)
        return True

    def now(self) -> float:
        """Return a `created_at` that is later than any before it, even if the clock was set back:
        it is the order of a conversation."""
        with self._putting:
            self._put_at = max(time.time(), self._put_at + 1e-6)
            return self._put_at

    def begin(self, delivery_id: str) -> QueuedDelivery | None:
        """Read the file again and record that an attempt begins; None if it was removed."""
        with atomic_files.alone(self.queue_dir):
            delivery = self.read(delivery_id)
            if delivery is None:
                return None
            delivery.resent += delivery.sending_since > 0
            delivery.sending_since = time.time()
            self._write_atomic(delivery)
        return delivery

    def ack(self, delivery_id: str) -> None:
        """Remove a delivery that arrived."""
        with atomic_files.alone(self.queue_dir):
            atomic_files.remove(self._path(delivery_id))

    def fail(
        self,
        delivery: QueuedDelivery,
        error: str,
        *,
        unknown: bool = False,
        not_before: float = 0.0,
    ) -> None:
        """Record a failed attempt: wait for the next one, or give up after the last.

        The numbers in the file decide: somebody may have edited them during the attempt.
        `unknown`: it may have arrived; the next attempt is marked as a repeat. `not_before`: when
        the next attempt is due, if not by the table of waits.
        """

        with atomic_files.alone(self.queue_dir):
            now = self._end_attempt(
                delivery, error, unknown=unknown, retries=1, not_before=not_before
            )
            if now is None:
                return
            delivery.retry_count, delivery.max_retries = now.retry_count, now.max_retries
            if now.retry_count > now.max_retries:
                self._give_up(delivery.id)

    def fail_for_good(self, delivery: QueuedDelivery, error: str, *, unknown: bool = False) -> None:
        """Give up at once: no further attempt could help. `unknown` as in `fail`."""
        with atomic_files.alone(self.queue_dir):
            self._end_attempt(delivery, error, unknown=unknown, expires_at=0.0)
            self._give_up(delivery.id)

    def put_off(
        self, delivery: QueuedDelivery, until: float, error: str, *, unknown: bool = False
    ) -> None:
        """Wait until this time without using a retry: the channel asked for it. `unknown` as in
        `fail`."""
        with atomic_files.alone(self.queue_dir):
            self._end_attempt(delivery, error, unknown=unknown, not_before=until)

    # -- looking ----------------------------------------------------------------------------------

    def load_pending(self) -> list[QueuedDelivery]:
        """Return the waiting deliveries, the oldest first. Files that cannot be read are set aside
        with an error in the log."""
        found: list[QueuedDelivery] = []
        seen = dict(self._read_before)
        self._read_before = {}
        for name, stamp in atomic_files.listed(self.queue_dir):
            known = seen.get(name)
            delivery = known[1] if known and known[0] == stamp else self._load(name)
            if delivery is None:
                continue
            self._read_before[name] = (stamp, delivery)
            found.append(replace(delivery, extra=dict(delivery.extra)))
        found.sort(key=lambda delivery: delivery.created_at)
        return found

    def load_failed(self) -> list[QueuedDelivery]:
        """Return the deliveries that were given up, the oldest first."""
        found = []
        for name, _ in atomic_files.listed(self.failed_dir):
            delivery = parsed(self.failed_dir / name)
            if isinstance(delivery, QueuedDelivery):
                found.append(delivery)
            elif delivery is not None:
                self._set_aside(self.failed_dir / name, delivery)
        return sorted(found, key=lambda delivery: delivery.created_at)

    def broken(self) -> list[str]:
        """Return the names of the files that were set aside."""
        return sorted(name for name, _ in atomic_files.listed(self.broken_dir, ending=""))

    def read(self, delivery_id: str) -> QueuedDelivery | None:
        """Return a waiting delivery as its file is now."""
        return self._load(self._path(delivery_id).name)

    # -- operators --------------------------------------------------------------------------------

    def retry(self, prefix: str) -> QueuedDelivery:
        """Let a delivery that was given up wait again, with all its attempts."""
        with atomic_files.alone(self.queue_dir):
            delivery = _one(self.load_failed(), prefix, "failed")
            delivery.retry_count = 0
            delivery.last_attempt_at = delivery.not_before = delivery.expires_at = 0.0
            # Written in its folder before it moves: after a crash in between it is in one place.
            self._write_atomic(delivery, self.failed_dir)
            atomic_files.move(self.failed_dir / f"{delivery.id}.json", self.queue_dir)
        self.added.set()
        return delivery

    def edit(self, prefix: str, content: str) -> QueuedDelivery:
        """Change the text of a delivery that waits or was given up."""
        with atomic_files.alone(self.queue_dir):
            delivery, folder = self._found(prefix)
            delivery.content = content
            self._write_atomic(delivery, folder)
        return delivery

    def discard(self, prefix: str) -> QueuedDelivery:
        """Remove a delivery that waits or was given up."""
        with atomic_files.alone(self.queue_dir):
            delivery, folder = self._found(prefix)
            atomic_files.remove(folder / f"{delivery.id}.json")
        return delivery

    def _found(self, prefix: str) -> tuple[QueuedDelivery, Path]:
        waiting, given_up = self.load_pending(), self.load_failed()
        found = _one([*waiting, *given_up], prefix, "waiting or failed")
        return found, self.queue_dir if found in waiting else self.failed_dir

    # -- one runner -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def only_runner(self) -> Iterator[None]:
        """Hold the lock of the one runner. Raises StoreError if another process has it: two runners
        would send everything twice."""
        path = self.queue_dir / ".runner.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"another process delivers from {self.queue_dir} already; stop it first, or "
                    "give this one a folder of its own"
                ) from None
            yield
        finally:
            os.close(fd)

    # -- files ------------------------------------------------------------------------------------

    def _path(self, delivery_id: str) -> Path:
        if "/" in delivery_id:
            raise NotFound(f"{delivery_id!r:.60} is not the id of a delivery")
        return self.queue_dir / f"{delivery_id}.json"

    def _write_atomic(self, delivery: QueuedDelivery, folder: Path | None = None) -> None:
        """Write a delivery; it is on the disk when this returns."""
        folder = folder or self.queue_dir
        atomic_files.write(folder / f"{delivery.id}.json", delivery.to_bytes())
        atomic_files.sync(folder)

    def _end_attempt(
        self,
        delivery: QueuedDelivery,
        error: str,
        *,
        unknown: bool,
        retries: int = 0,
        not_before: float = 0.0,
        expires_at: float | None = None,
    ) -> QueuedDelivery | None:
        """Change the delivery, and its file as it is now: somebody may have edited it meanwhile.

        Returns the content of the file then, or None if it was removed: it is not written again.
        """
        now = self.read(delivery.id)
        for each in (delivery, now):
            if each is None:
                continue
            each.retry_count += retries
            each.not_before = not_before
            each.expires_at = each.expires_at if expires_at is None else expires_at
            each.last_attempt_at = time.time()
            each.last_error = encodable(str(error))
            # A delivery that may have arrived before keeps this: its next attempt is marked.
            if not unknown and not each.resent:
                each.sending_since = 0.0
        if now is not None:
            self._write_atomic(now)
        return now

    def _give_up(self, delivery_id: str) -> None:
        atomic_files.move(self._path(delivery_id), self.failed_dir)

    def _load(self, name: str) -> QueuedDelivery | None:
        path = self.queue_dir / name
        found = parsed(path)
        if isinstance(found, QueuedDelivery):
            if found.retry_count > found.max_retries:  # the runner was killed before it moved this
                self._give_up(found.id)
                return None
            return found
        if found is not None:
            self._set_aside(path, found)
        return None

    def _set_aside(self, path: Path, why: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            # A time in the future does not come from an editor: a clock was set, or it is a copy.
            if abs(time.time() - path.stat().st_mtime) < SETTLED_S:
                return
            self.broken_dir.mkdir(exist_ok=True, mode=0o700)
            target = self.broken_dir / path.name
            while target.exists():
                target = target.with_name(f"{target.name}.{uuid.uuid4().hex[:4]}")
            os.replace(path, target)
            log.error(
                "%s cannot be read as a delivery (%s) and was set aside as %s; fix it and move it"
                " back",
                path.name,
                why,
                target,
            )
            atomic_files.sync(self.broken_dir, path.parent)


def _usual_dir() -> Path:
    home = os.environ.get("ACKBONE_HOME") or ".ackbone"
    return Path(home) / "workspace" / "delivery-queue"


def parsed(path: Path) -> QueuedDelivery | str | None:
    """Return the delivery, the reason why it cannot be read, or None if the file is gone.

    Raises StoreError if this process cannot read any file.
    """
    try:
        found: Any = json.loads(path.read_bytes())
        delivery = QueuedDelivery.from_dict(found)
        json.dumps(found, ensure_ascii=False).encode()  # half an emoji cannot be written again
    except FileNotFoundError:
        return None
    except KeyError as error:
        return f"it has no {error.args[0]}"
    except (ValueError, TypeError, RecursionError) as error:
        return str(error) or type(error).__name__
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise atomic_files.unreadable(error, path) from error
        return f"it cannot be read: {error.strerror}"
    if f"{delivery.id}.json" != path.name:
        return f"its id is {delivery.id!r:.60}, which is not the name of the file"
    return delivery


def _checked_id(delivery_id: str) -> str:
    """Return the id. Raises InvalidMessage if it cannot be the name of a file."""
    size = len(delivery_id.encode("utf-8", "replace"))
    is_name = delivery_id.isprintable() and "/" not in delivery_id and delivery_id[:1] != "."
    if not is_name or not 0 < size <= LONGEST_ID:
        raise InvalidMessage(
            f"{delivery_id!r:.60} cannot be a file's name: an id has 1 to {LONGEST_ID} printable"
            " characters, no slash, and no dot in front"
        )
    return delivery_id


def _one(found: list[QueuedDelivery], prefix: str, what: str) -> QueuedDelivery:
    matches = [delivery for delivery in found if prefix and delivery.id.startswith(prefix)]
    if not matches:
        raise NotFound(f"there is no {what} delivery {prefix!r:.60}")
    if len(matches) > 1:
        names = [delivery.id for delivery in matches]
        raise Ambiguous(f"{prefix!r} matches {len(names)} deliveries; use more of the id", names)
    return matches[0]
