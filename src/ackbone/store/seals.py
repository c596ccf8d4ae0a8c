"""What the ledger's key signs: anchors (what the chains held) and checkpoints (what was pruned).

Both are events of the ledger itself, in chains of the tenant `_ledger`, a name that no tenant can
have. Whoever can write the database can compute a chain anew; without the key nobody can sign it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from ackbone.core import events
from ackbone.core.errors import StoreCorrupt
from ackbone.core.events import Entry

log = logging.getLogger("ackbone.ledger")

TENANT = "_ledger"
ANCHOR_TASK = "anchor"
PRUNED_TASK = "pruned"

Chain = tuple[str, int]
"""tenant_id, worker_id"""
Head = tuple[str, int, int, str]
"""tenant_id, worker_id, seq, hash (hex): the end of a chain."""


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """The chains that moved since the anchor before, as they stand where this event stands."""

    n: int
    at: int
    """Microseconds since 1970."""
    chains: tuple[Head, ...]
    previous: str
    """MAC of the anchor before; empty for the first one."""
    key_id: str
    mac: str = ""

    def sealed(self, key: bytes) -> Anchor:
        return msgspec.structs.replace(self, mac=_mac(key, b"anchor", self))

    def is_sealed_by(self, key: bytes) -> bool:
        return hmac.compare_digest(self.mac, _mac(key, b"anchor", self))

    def entry(self) -> Entry:
        return TENANT, "", ANCHOR_TASK, events.ANCHOR, msgspec.to_builtins(self)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything before anchor `anchor` may be gone; `chains` is where they stood there."""

    anchor: int
    at: int
    chains: tuple[Head, ...]
    key_id: str
    mac: str = ""

    def sealed(self, key: bytes) -> Checkpoint:
        return msgspec.structs.replace(self, mac=_mac(key, b"pruned", self))

    def is_sealed_by(self, key: bytes) -> bool:
        return hmac.compare_digest(self.mac, _mac(key, b"pruned", self))

    def entry(self) -> Entry:
        return TENANT, "", PRUNED_TASK, events.PRUNED, msgspec.to_builtins(self)


def next_anchor(
    key: bytes, previous: Anchor | None, *, filed: int, at_us: int, chains: tuple[Head, ...]
) -> Anchor:
    """The anchor behind `previous`, signed. `filed`: the last number in the anchor file.

    A number that the file knows is not given again, whatever became of the table.
    """
    number = 0 if previous is None else previous.n
    if filed > number:
        log.error(
            "the anchor file knows %d anchors, the ledger only %d: the ledger was cut or"
            " restored from a copy; see 'ackbone ledger verify'",
            filed,
            number,
        )
    return Anchor(
        n=max(number, filed) + 1,
        at=at_us,
        chains=chains,
        previous="" if previous is None else previous.mac,
        key_id=key_id(key),
    ).sealed(key)


Seal = TypeVar("Seal", Anchor, Checkpoint)

read_anchor = msgspec.json.Decoder(Anchor).decode
read_checkpoint = msgspec.json.Decoder(Checkpoint).decode


def key_id(key: bytes) -> str:
    """Tells keys apart without telling anything about them."""
    return hashlib.sha256(b"ackbone ledger key\0" + key).hexdigest()[:16]


def _mac(key: bytes, kind: bytes, seal: Anchor | Checkpoint) -> str:
    unsealed = msgspec.structs.replace(seal, mac="")
    content = b"ackbone ledger 1 " + kind + b"\0" + msgspec.json.encode(unsealed)
    return hmac.digest(key, content, "sha256").hex()


def readable(read: Callable[[str], Seal], data: str, task: str) -> Seal:
    """A seal of the ledger's own rows. Raises StoreCorrupt if it is none."""
    try:
        return read(data)
    except (msgspec.MsgspecError, TypeError) as error:
        raise StoreCorrupt(
            f"the ledger's last event {task!r} is not one that ackbone wrote ({error}): "
            "see 'ackbone ledger verify'"
        ) from None


class Tip(msgspec.Struct, frozen=True):
    """Where a chain ends within the rows that were looked at."""

    seq: int
    hash: bytes
    rowid: int


def heads_of(found: Mapping[Chain, Tip]) -> tuple[Head, ...]:
    """In an order of their own, so that equal contents are equal bytes."""
    return tuple(
        (tenant_id, worker_id, tip.seq, tip.hash.hex())
        for (tenant_id, worker_id), tip in sorted(found.items())
    )
