"""What the ledger's key signs: anchors (what the chains held) and checkpoints (what was pruned).

Both are events of the ledger itself, in chains of the tenant `_ledger`, a name that no tenant can
have. Whoever can write the database can compute a chain anew; without the key nobody can sign it.
"""

from __future__ import annotations

import hashlib
import hmac
import sqlite3
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from holdfast.core import events
from holdfast.core.errors import StoreCorrupt

from .ledger import Entry

TENANT = "_ledger"
ANCHOR_TASK = "anchor"
PRUNED_TASK = "pruned"
WINDOW = 20_000
"""Rows of the ledger that one statement looks at: a reader must not hold the log for long."""

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


Seal = TypeVar("Seal", Anchor, Checkpoint)

read_anchor = msgspec.json.Decoder(Anchor).decode
read_checkpoint = msgspec.json.Decoder(Checkpoint).decode


def key_id(key: bytes) -> str:
    """Tells keys apart without telling anything about them."""
    return hashlib.sha256(b"holdfast ledger key\0" + key).hexdigest()[:16]


def _mac(key: bytes, kind: bytes, seal: Anchor | Checkpoint) -> str:
    unsealed = msgspec.structs.replace(seal, mac="")
    content = b"holdfast ledger 1 " + kind + b"\0" + msgspec.json.encode(unsealed)
    return hmac.digest(key, content, "sha256").hex()


# ── the ledger's own rows ────────────────────────────────────────────────────────────────────────

_OWN = (
    "SELECT rowid, data, created_at FROM event_log WHERE tenant_id = ? AND task_id = ?"
    " ORDER BY rowid"
)


def last_anchor(conn: sqlite3.Connection) -> tuple[int, Anchor] | None:
    """The newest anchor and its rowid."""
    return _last(conn, ANCHOR_TASK, read_anchor)


def last_checkpoint(conn: sqlite3.Connection) -> tuple[int, Checkpoint] | None:
    """The newest checkpoint and its rowid."""
    return _last(conn, PRUNED_TASK, read_checkpoint)


def _last(
    conn: sqlite3.Connection, task: str, read: Callable[[str], Seal]
) -> tuple[int, Seal] | None:
    found = conn.execute(f"{_OWN} DESC LIMIT 1", (TENANT, task)).fetchone()
    return None if found is None else (found[0], _readable(read, found[1], task))


def _readable(read: Callable[[str], Seal], data: str, task: str) -> Seal:
    try:
        return read(data)
    except (msgspec.MsgspecError, TypeError) as error:
        raise StoreCorrupt(
            f"the ledger's last event {task!r} is not one that holdfast wrote ({error}): "
            "see 'holdfast ledger verify'"
        ) from None


def anchors_since(conn: sqlite3.Connection, n: int) -> list[Anchor]:
    """Anchors after number `n`, oldest first."""
    found: list[Anchor] = []
    for _rowid, data, _at in conn.execute(f"{_OWN} DESC", (TENANT, ANCHOR_TASK)):
        anchor = _readable(read_anchor, data, ANCHOR_TASK)
        if anchor.n <= n:
            break
        found.append(anchor)
    return found[::-1]


def anchor_before(conn: sqlite3.Connection, moment_us: int) -> tuple[int, Anchor] | None:
    """The newest anchor that is not younger than `moment_us`, and its rowid."""
    for rowid, data, at in conn.execute(f"{_OWN} DESC", (TENANT, ANCHOR_TASK)):
        if at <= moment_us:
            return rowid, _readable(read_anchor, data, ANCHOR_TASK)
    return None


def anchor_row(conn: sqlite3.Connection, n: int) -> int | None:
    """The rowid of anchor number `n`."""
    for rowid, data, _at in conn.execute(_OWN, (TENANT, ANCHOR_TASK)):
        try:
            number = read_anchor(data).n
        except (msgspec.MsgspecError, TypeError):
            continue  # a finding of its own, where the row is looked at
        if number == n:
            return int(rowid)
    return None


# ── the ends of the chains ───────────────────────────────────────────────────────────────────────


class Tip(msgspec.Struct, frozen=True):
    """Where a chain ends within the rows that were looked at."""

    seq: int
    hash: bytes
    rowid: int


def tips(
    conn: sqlite3.Connection, after: int, upto: int | None = None
) -> Iterator[tuple[dict[Chain, Tip], int]]:
    """The chains' ends among the rows behind `after`, window by window, each with its last row.

    Without `upto` it follows the writers until it has caught up with them.
    """
    while True:
        (last,) = conn.execute("SELECT max(rowid) FROM event_log").fetchone()
        end = min(last or 0, after + WINDOW, after + WINDOW if upto is None else upto)
        if end <= after:
            return
        # max(rowid) is the only aggregate, so SQLite takes the other columns from that very row.
        yield (
            {
                (tenant_id, worker_id): Tip(seq, digest, rowid)
                for tenant_id, worker_id, seq, digest, rowid in conn.execute(
                    "SELECT tenant_id, worker_id, seq, hash, max(rowid) FROM event_log"
                    " WHERE rowid > ? AND rowid <= ? GROUP BY tenant_id, worker_id",
                    (after, end),
                )
            },
            end,
        )
        after = end


def heads_of(found: dict[Chain, Tip]) -> tuple[Head, ...]:
    """In an order of their own, so that equal contents are equal bytes."""
    return tuple(
        (tenant_id, worker_id, tip.seq, tip.hash.hex())
        for (tenant_id, worker_id), tip in sorted(found.items())
    )
