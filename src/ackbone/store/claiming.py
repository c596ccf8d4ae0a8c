"""One claim: its transaction, subscription, worker and times, the message types that the living
workers handle, and its events.

Every worker announces its handlers in `workers.offers` when it registers, and claims only its own
types. A worker without a handler for a message leaves it to a worker that has one. If no worker has
one, the message is parked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ackbone.core import events
from ackbone.core.broker import Delivery, Subscription
from ackbone.core.events import Entry
from ackbone.core.outcome import NO_HANDLER, ParkKind
from ackbone.core.store import Company, Offers, Run, Suspects, Worker
from ackbone.core.text import storable

from .quota_book import PutOff, QuotaBook
from .tasks import Ahead
from .unit import NOTHING_EXPIRES, Change, Tx
from .workers import crashes_of

LOOK_S = 1.0
"""How long a process relies on what it last read about the other workers, in seconds."""
SURE_S = 0.05
"""The same, before a message is parked or passed on. One look serves a whole batch."""
GRACE_S = 30.0
"""A worker that ended this recently still counts, in seconds: it is most likely being restarted,
and its messages need not be parked for that."""
GRACE_US = int(GRACE_S * 1e6)
_ALL = "*"
_decode = msgspec.json.Decoder(Offers).decode


def offers_text(offers: Offers | None) -> str | None:
    """The form of `workers.offers`."""
    if offers is None:
        return None
    types = {name: sorted(types) for name, types in sorted(offers.types.items())}
    return msgspec.json.encode({"types": types, "channels": sorted(offers.channels)}).decode()


def read_offers(text: str | None) -> Offers | None:
    """The offers of a row. None: the worker announced nothing, or a later version wrote the row."""
    if text is None:
        return None
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return None


def handled_by(worker: Worker, subscription: str) -> frozenset[str] | None:
    """The types of one subscription that a worker handles; None: all of them."""
    if worker.offers is None:
        return None
    mine = worker.offers.types.get(subscription, frozenset())
    return None if _ALL in mine else mine


class Choice(NamedTuple):
    """Which messages that the store holds a worker claims, by their types."""

    rule: str = "all"
    """`all`, `only` the named types, or all `but` the named types."""
    types: tuple[str, ...] = ()

    def takes(self, message_type: str) -> bool:
        return self.rule == "all" or (message_type in self.types) is (self.rule == "only")


EVERYTHING = Choice()


class Fleet:
    """The types that living workers offer, as this process last read them."""

    def __init__(self) -> None:
        self._read_at = -math.inf
        self._texts: frozenset[str] = frozenset()
        self._types: dict[str, frozenset[str]] = {}

    @property
    def age_s(self) -> float:
        """Seconds since the offers were last read."""
        return time.monotonic() - self._read_at

    def forget(self) -> None:
        """Workers came or went: read the offers again before they are used."""
        self._read_at = -math.inf

    def update(self, texts: Iterable[str | None]) -> None:
        """Take over the `offers` of all workers that count."""
        read_at = time.monotonic()
        found = frozenset(text for text in texts if text is not None)
        if found != self._texts:
            types: dict[str, frozenset[str]] = {}
            for offers in map(read_offers, found):
                for name, some in (offers.types if offers is not None else {}).items():
                    types[name] = types.get(name, frozenset()) | some
            self._texts, self._types = found, types
        self._read_at = read_at  # last: another thread may ask meanwhile

    def handles(self, subscription: str, message_type: str) -> bool:
        offered = self._types.get(subscription, frozenset())
        return message_type in offered or _ALL in offered

    def suspects(self, worker: Worker, found: Iterable[tuple[str, str, int, int]]) -> Suspects:
        """How many suspects a worker claims, of these numbers by subscription and type."""
        mine = [each for each in found if self.of(worker, each[0]).takes(each[1])]
        return Suspects(few=sum(few for *_, few, _ in mine), none=sum(none for *_, none in mine))

    def of(self, worker: Worker, subscription: str) -> Choice:
        """Return which messages of this subscription a worker claims."""
        return self.choice(subscription, handled_by(worker, subscription))

    def choice(self, subscription: str, mine: frozenset[str] | None) -> Choice:
        """Return which messages a worker claims that handles `mine` (None: all types).

        It leaves out what only others handle. A type that no worker handles is claimed by any of
        them, which then parks the message: so the types of a worker that is gone do not wait
        unseen. While all workers offer the same types, nothing is left out and nothing is compared.
        """
        if mine is None:
            return EVERYTHING
        others = self._types.get(subscription, frozenset()) - mine
        if _ALL in others:
            return Choice("only", tuple(sorted(mine)))
        return Choice("but", tuple(sorted(others))) if others else EVERYTHING


def no_handler(run: Run) -> str:
    """Why a message is parked."""
    return storable(f"{NO_HANDLER} {run.message.type!r} on queue {run.queue!r}")


def parked(run: Run) -> Entry:
    """The event of a message that no living worker handles."""
    data = {"kind": ParkKind.WORKFLOW_PENDING, "reason": no_handler(run)}
    return run.message.tenant_id, run.subscription, run.message.id, events.PARKED, data


class Claiming(msgspec.Struct, frozen=True, kw_only=True):
    """One claim operation."""

    tx: Tx
    change: Change
    sub: Subscription
    worker: Worker
    mine: frozenset[str] | None
    """The types that this worker has handlers for; None: all."""
    fleet: Fleet
    expiry: bool
    """False while the clock is in doubt: nothing expires."""
    ahead: Ahead
    held: str = "store"
    """Who keeps a message that runs: `store` (queue and store in one database) or `broker`."""
    governed: bool = False
    """Runs bring along what people answered about their messages."""
    book: QuotaBook | None = None
    """Where runs are counted, if there are quotas."""
    isolates: bool = True
    """Messages that crashed their workers run in child processes."""

    @property
    def most_crashes(self) -> int:
        """Messages with more crashes than this do not run among others."""
        return crashes_of(Company.ANY, isolates=self.isolates)[1]

    def over_us(self, now_us: int) -> int:
        """Messages that expire up to this moment are expired."""
        return now_us if self.expiry else NOTHING_EXPIRES

    def handles(self, message_type: str) -> bool:
        """True if this worker has a handler for the type."""
        return self.mine is None or message_type in self.mine

    async def choice(self) -> Choice:
        """Which messages that the store holds this worker claims."""
        if self.mine is not None:
            await self._read_offers(LOOK_S)
        return self.fleet.choice(self.sub.name, self.mine)

    async def is_handled(self, message_type: str) -> bool:
        """True if any living worker has a handler for the type."""
        await self._read_offers(SURE_S)
        return self.fleet.handles(self.sub.name, message_type)

    async def _read_offers(self, old_s: float) -> None:
        """Read what the workers offer, unless that was done less than `old_s` seconds ago."""
        if self.fleet.age_s >= old_s:
            tx = self.tx
            found = await tx.rows(tx.sql.workers.offers, GRACE_US, tx.now_us)
            self.fleet.update(text for (text,) in found)


def reclaimed(run: Run, worker: str, delivery: Delivery | None, lost_by: str | None) -> Entry:
    """The event of `worker` claiming a message that another consumer had and lost.

    That consumer is one of our workers that died (`lost_by`), or the one that held the broker's
    copy.
    """
    message = run.message
    taken_from = None if delivery is None else delivery.taken_from
    entry = None if delivery is None else delivery.entry
    data = {
        "original_consumer": taken_from or lost_by or "",
        "new_consumer": worker,
        "task_id": message.id,
        "message_id": entry or message.id,
    }
    return message.tenant_id, run.subscription, message.id, events.RECLAIMED, data


def claimed(run: Run) -> Entry:
    """The event of a run that was granted."""
    message = run.message
    data = {"attempt": run.attempt, "created_at": run.created_at_us}
    return message.tenant_id, run.subscription, message.id, events.CLAIMED, data


def waits_for_quota(run: Run, wait: PutOff) -> Entry:
    """The event of a message that is deferred because a quota is exhausted."""
    data = {
        "attempt": run.attempt,
        "quota": wait.quota,
        "unit": wait.unit,
        "until": wait.until_us,
    }
    return run.message.tenant_id, run.subscription, run.message.id, events.RELEASED, data
