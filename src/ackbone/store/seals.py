"""The two kinds of events that the ledger's key signs: anchors (where the chains ended) and
checkpoints (up to where events were pruned).

Both are events of the ledger itself, in chains of the tenant `_ledger`, a name that no tenant can
have. Anybody who can write the database can compute a chain again, but cannot sign it without the
key.
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
    """The ends of the chains that moved since the previous anchor."""

    n: int
    at: int
    """Microseconds since 1970."""
    chains: tuple[Head, ...]
    previous: str
    """MAC of the previous anchor; empty for the first one."""
    key_id: str
    mac: str = ""

    def sealed(self, key: bytes) -> Anchor:
        return msgspec.structs.replace(self, mac=_mac(key, b"anchor", self))

    def is_sealed_by(self, key: bytes) -> bool:
        return hmac.compare_digest(self.mac, _mac(key, b"anchor", self))

    def entry(self) -> Entry:
        return TENANT, "", ANCHOR_TASK, events.ANCHOR, msgspec.to_builtins(self)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Events before anchor `anchor` may be deleted; `chains` says where the chains ended there."""

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
    """The anchor after `previous`, signed. `filed` is the last number in the anchor file.

    A number that is in the file is not used again, even if the table lost its anchor.
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
    """A name for a key that reveals nothing about it."""
    return hashlib.sha256(b"ackbone ledger key\0" + key).hexdigest()[:16]


def _mac(key: bytes, kind: bytes, seal: Anchor | Checkpoint) -> str:
    unsealed = msgspec.structs.replace(seal, mac="")
    content = b"ackbone ledger 1 " + kind + b"\0" + msgspec.json.encode(unsealed)
    return hmac.digest(key, content, "sha256").hex()


def readable(read: Callable[[str], Seal], data: str, task: str) -> Seal:
    """Decode an anchor or a checkpoint. Raises StoreCorrupt if ackbone did not write it."""
    try:
        return read(data)
    except (msgspec.MsgspecError, TypeError) as error:
        raise StoreCorrupt(
            f"the ledger's last event {task!r} is not one that ackbone wrote ({error}): "
            "see 'ackbone ledger verify'"
        ) from None


class Tip(msgspec.Struct, frozen=True):
    """The last event of a chain within the rows that were read."""

    seq: int
    hash: bytes
    rowid: int


def heads_of(found: Mapping[Chain, Tip]) -> tuple[Head, ...]:
    """The ends of chains, sorted, so that equal contents are equal bytes."""
    return tuple(
        (tenant_id, worker_id, tip.seq, tip.hash.hex())
        for (tenant_id, worker_id), tip in sorted(found.items())
    )
