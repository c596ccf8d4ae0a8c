"""Which message types the living workers handle, so that each worker claims only its own.

Every worker announces its handlers in `workers.offers` when it registers. A worker without a
handler for a message leaves it to a worker that has one. If no worker has one, the message is
parked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ackbone.core import events
from ackbone.core.events import Entry
from ackbone.core.outcome import NO_HANDLER, ParkKind
from ackbone.core.store import Offers, Run, Suspects, Worker
from ackbone.core.text import storable

LOOK_S = 1.0
"""How long a process relies on what it last read about the other workers, in seconds."""
SURE_S = 0.05
"""The same, before a message is parked or passed on. One look serves a whole batch."""
GRACE_S = 30.0
"""A worker that ended this recently still counts, in seconds: it is most likely being restarted,
and its messages need not be parked for that."""
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
