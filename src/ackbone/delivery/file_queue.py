"""A queue of replies in a folder: one JSON file for each, readable and editable by people.

`<id>.json` waits, `failed/<id>.json` was given up, `broken/` holds files that are no deliveries. A
file is written beside its place, synced, and put there in one step; it moves between folders in
one step, too. So whenever this process is killed, every delivery is in exactly one place, old or
new. A process holds the folder's lock while it reads a file and writes it again: a runner and
another process that edits, retries or discards deliveries never overwrite each other's changes.
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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ackbone.core.delivery import DIRECT
from ackbone.core.errors import Ambiguous, InvalidMessage, NotFound, StoreError

from . import whole_files
from .queued import QueuedDelivery

log = logging.getLogger("ackbone.delivery")

SETTLED_S = 2.0
"""A file that cannot be read is set aside when nobody has touched it for so long: before that, an
editor may be writing it."""
LONGEST_ID = 200
"""Largest size of a delivery's id in bytes: the id is also the name of the file."""
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class DeliveryQueue:
    """The folder. Any number of threads and processes may put deliveries in; one runner takes them.

    People may edit a waiting file, remove it or drop one in: what stands in the folder counts.
    """

    def __init__(self, queue_dir: Path | str | None = None) -> None:
        """None: `workspace/delivery-queue` below `ACKBONE_HOME`."""
        self.queue_dir = _usual_dir() if queue_dir is None else Path(queue_dir)
        self.failed_dir = self.queue_dir / "failed"
        self.broken_dir = self.queue_dir / "broken"
        for folder in (self.queue_dir, self.failed_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.added = threading.Event()
        """Set when this process puts something in: its runner need not wait for its next look."""
        self._putting = threading.Lock()
        self._put_at = 0.0
        self._read_before: dict[str, tuple[tuple[int, int, int], QueuedDelivery]] = {}
        for folder in (self.queue_dir, self.failed_dir):
            whole_files.sweep(folder)

    # -- the way of a delivery --------------------------------------------------------------------

    def enqueue(
        self, channel: str, recipient: str, content: str, *, priority: int = DIRECT
    ) -> QueuedDelivery:
        """Returns when the delivery is on the disk. Raises, and has taken nothing, otherwise."""
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

        A delivery that waits or was given up is left as it is, so a call may be repeated. Raises,
        and has taken nothing, otherwise: InvalidMessage for an id or a text that no file can hold.
        """
        path = self._path(_checked_id(delivery.id))
        if self.holds(delivery.id):
            return
        wrote = whole_files.write(path, delivery.to_bytes(), new=True)
        try:
            whole_files.sync(self.queue_dir)
        except BaseException:
            if wrote:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        self.added.set()

    def holds(self, delivery_id: str) -> bool:
        """Return True if the delivery waits or was given up, and is on the disk."""
        name = self._path(delivery_id).name
        # In the order in which a runner moves files: one that moves meanwhile is found.
        if not any((folder / name).exists() for folder in (self.queue_dir, self.failed_dir)):
            return False
        # Whoever wrote the file may have been killed before the sync of the folder.
        whole_files.sync(self.queue_dir, self.failed_dir)
        return True

    def now(self) -> float:
        """Return a `created_at` that is later than any before it, whatever the clock says: it
        orders conversations."""
        with self._putting:
            self._put_at = max(time.time(), self._put_at + 1e-6)
            return self._put_at

    def begin(self, delivery_id: str) -> QueuedDelivery | None:
        """Read it again and mark that an attempt begins; None: somebody took it out meanwhile."""
        with whole_files.alone(self.queue_dir):
            delivery = self.read(delivery_id)
            if delivery is None:
                return None
            delivery.resent += delivery.sending_since > 0
            delivery.sending_since = time.time()
            self._write_atomic(delivery)
        return delivery

    def ack(self, delivery_id: str) -> None:
        """It arrived."""
        with whole_files.alone(self.queue_dir):
            _remove(self._path(delivery_id))

    def fail(
        self,
        delivery: QueuedDelivery,
        error: str,
        *,
        unknown: bool = False,
        not_before: float = 0.0,
    ) -> None:
        """It did not arrive: wait for the next attempt, or give up after the last one.

        The file decides, as it is now: somebody may have edited its numbers during the attempt.
        `unknown`: it may have arrived; the next attempt is marked as a repeat. `not_before`: when
        the next attempt is due, if not by the table of waits.
        """

        def failed(now: QueuedDelivery) -> None:
            now.retry_count += 1
            now.last_attempt_at = time.time()
            now.last_error = _text(error)
            now.not_before = not_before
            if not unknown:
                _end_attempt(now)

        with whole_files.alone(self.queue_dir):
            now = self._change(delivery, failed)
            if now is None:
                return
            delivery.retry_count, delivery.max_retries = now.retry_count, now.max_retries
            if now.retry_count > now.max_retries:
                self._give_up(delivery.id)

    def fail_for_good(self, delivery: QueuedDelivery, error: str, *, unknown: bool = False) -> None:
        """No further attempt could help: it is given up at once. `unknown` as in `fail`."""

        def failed(now: QueuedDelivery) -> None:
            now.last_attempt_at = time.time()
            now.last_error = _text(error)
            now.not_before = now.expires_at = 0.0
            if not unknown:
                _end_attempt(now)

        with whole_files.alone(self.queue_dir):
            self._change(delivery, failed)
            self._give_up(delivery.id)

    def put_off(
        self, delivery: QueuedDelivery, until: float, error: str, *, unknown: bool = False
    ) -> None:
        """The channel takes nothing just now. That is nobody's failure, and costs no retry.
        `unknown` as in `fail`."""

        def waits(now: QueuedDelivery) -> None:
            now.not_before = until
            # By this it shows if somebody sets the clock back meanwhile.
            now.last_attempt_at = time.time()
            now.last_error = _text(error)
            if not unknown:
                _end_attempt(now)

        with whole_files.alone(self.queue_dir):
            self._change(delivery, waits)

    # -- what is there ----------------------------------------------------------------------------

    def load_pending(self) -> list[QueuedDelivery]:
        """All that wait, the oldest first. What is no delivery is set aside, and said so."""
        found: list[QueuedDelivery] = []
        seen = dict(self._read_before)
        self._read_before = {}
        for name, stamp in whole_files.listed(self.queue_dir):
            known = seen.get(name)
            delivery = known[1] if known and known[0] == stamp else self._load(name)
            if delivery is None:
                continue
            self._read_before[name] = (stamp, delivery)
            found.append(replace(delivery, extra=dict(delivery.extra)))
        found.sort(key=lambda delivery: delivery.created_at)
        return found

    def load_failed(self) -> list[QueuedDelivery]:
        """All that were given up, the oldest first."""
        found = []
        for name, _ in whole_files.listed(self.failed_dir):
            delivery = parsed(self.failed_dir / name)
            if isinstance(delivery, QueuedDelivery):
                found.append(delivery)
            elif delivery is not None:
                self._set_aside(self.failed_dir / name, delivery)
        return sorted(found, key=lambda delivery: delivery.created_at)

    def broken(self) -> list[str]:
        """Names of the files that were set aside."""
        return sorted(name for name, _ in whole_files.listed(self.broken_dir, ending=""))

    def read(self, delivery_id: str) -> QueuedDelivery | None:
        """One that waits, as it stands in its file now."""
        return self._load(self._path(delivery_id).name)

    # -- what people do ---------------------------------------------------------------------------

    def retry(self, prefix: str) -> QueuedDelivery:
        """One that was given up waits again, with all its attempts before it."""
        with whole_files.alone(self.queue_dir):
            delivery = _one(self.load_failed(), prefix, "failed")
            delivery.retry_count = 0
            delivery.last_attempt_at = delivery.not_before = delivery.expires_at = 0.0
            # In its own folder first: whatever happens between the two, it is in one place.
            self._write_atomic(delivery, self.failed_dir)
            _move(self.failed_dir / f"{delivery.id}.json", self.queue_dir)
        self.added.set()
        return delivery

    def edit(self, prefix: str, content: str) -> QueuedDelivery:
        """Another text for one that waits or was given up."""
        with whole_files.alone(self.queue_dir):
            delivery, folder = self._found(prefix)
            delivery.content = content
            self._write_atomic(delivery, folder)
        return delivery

    def discard(self, prefix: str) -> QueuedDelivery:
        """One that waits or was given up is removed for good."""
        with whole_files.alone(self.queue_dir):
            delivery, folder = self._found(prefix)
            _remove(folder / f"{delivery.id}.json")
        return delivery

    def _found(self, prefix: str) -> tuple[QueuedDelivery, Path]:
        waiting, given_up = self.load_pending(), self.load_failed()
        found = _one([*waiting, *given_up], prefix, "waiting or failed")
        return found, self.queue_dir if found in waiting else self.failed_dir

    # -- one runner -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def only_runner(self) -> Iterator[None]:
        """Two that send from one folder would send everything twice. Raises StoreError."""
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
            raise NotFound(f"{delivery_id!r:.60} is no delivery's id")
        return self.queue_dir / f"{delivery_id}.json"

    def _write_atomic(self, delivery: QueuedDelivery, folder: Path | None = None) -> None:
        """The file is the old one or the new one, whole, whatever happens; then it is on disk."""
        folder = folder or self.queue_dir
        whole_files.write(folder / f"{delivery.id}.json", delivery.to_bytes())
        whole_files.sync(folder)

    def _change(
        self, delivery: QueuedDelivery, change: Callable[[QueuedDelivery], None]
    ) -> QueuedDelivery | None:
        """Change the delivery, and its file as it is now: somebody may have edited it meanwhile.

        Returns what the file says then. A file that was taken out of the folder does not come back.
        """
        change(delivery)
        now = self.read(delivery.id)
        if now is not None:
            change(now)
            self._write_atomic(now)
        return now

    def _give_up(self, delivery_id: str) -> None:
        _move(self._path(delivery_id), self.failed_dir)

    def _load(self, name: str) -> QueuedDelivery | None:
        path = self.queue_dir / name
        found = parsed(path)
        if isinstance(found, QueuedDelivery):
            if found.retry_count > found.max_retries:  # killed between its last failure and this
                self._give_up(found.id)
                return None
            return found
        if found is not None:
            self._set_aside(path, found)
        return None

    def _set_aside(self, path: Path, why: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            # A time of the future is none of an editor's: a clock was set, or it was copied here.
            if abs(time.time() - path.stat().st_mtime) < SETTLED_S:
                return
            self.broken_dir.mkdir(exist_ok=True, mode=0o700)
            target = self.broken_dir / path.name
            while target.exists():
                target = target.with_name(f"{target.name}.{uuid.uuid4().hex[:4]}")
            os.replace(path, target)
            log.error(
                "%s is no delivery (%s) and was set aside as %s; mend it and move it back",
                path.name,
                why,
                target,
            )
            whole_files.sync(self.broken_dir, path.parent)


def _usual_dir() -> Path:
    home = os.environ.get("ACKBONE_HOME") or ".ackbone"
    return Path(home) / "workspace" / "delivery-queue"


def _remove(path: Path) -> None:
    """For good; gone already is gone."""
    if whole_files.remove(path):
        whole_files.sync(path.parent)


def _move(path: Path, folder: Path) -> None:
    """Into another folder, in one step; gone already is gone."""
    if whole_files.move(path, folder):
        whole_files.sync(folder, path.parent)


def parsed(path: Path) -> QueuedDelivery | str | None:
    """The delivery; why it is none; or None, if the file is gone. Raises StoreError where this
    process has no room to read any file: that says nothing of this one."""
    try:
        found: Any = json.loads(path.read_bytes())
        delivery = QueuedDelivery.from_dict(found)
        json.dumps(found, ensure_ascii=False).encode()  # half an emoji could not be written again
    except FileNotFoundError:
        return None
    except KeyError as error:
        return f"it has no {error.args[0]}"
    except (ValueError, TypeError, RecursionError) as error:
        return str(error) or type(error).__name__
    except OSError as error:
        if error.errno in _OURS:
            raise whole_files.unreadable(error, path) from error
        return f"it cannot be read: {error.strerror}"
    if f"{delivery.id}.json" != path.name:
        return f"it says that its id is {delivery.id!r:.60}"
    return delivery


def _checked_id(delivery_id: str) -> str:
    """The id, if it can be a file's name. Raises InvalidMessage."""
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
        raise Ambiguous(f"{prefix!r} fits {len(names)} deliveries; say more of the id", names)
    return matches[0]


def _end_attempt(delivery: QueuedDelivery) -> None:
    """It did not arrive this time. That it may have arrived before stays in its file, so that the
    next attempt is marked as a repeat."""
    if not delivery.resent:
        delivery.sending_since = 0.0


def _text(error: str) -> str:
    """An error's text as a file can hold it."""
    return str(error).encode("utf-8", "backslashreplace").decode()
