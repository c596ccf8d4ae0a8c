"""The ledger: its hash chains, the two kinds of events that its key signs, and that key.

Every dialect hashes the same record to the same value. Anchors sign where the chains ended, and
checkpoints up to where events were pruned. Both are events of the ledger itself, in chains of the
tenant `_ledger`, a name that no tenant can have. Anybody who can write the database can compute a
chain again, but cannot sign it without the key. The key is kept outside the database: somebody who
can write the database should not be able to read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby, repeat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ackbone.core import events
from ackbone.core.errors import ConfigError, StoreCorrupt
from ackbone.core.events import Entry
from ackbone.core.ids import uuid7_block
from ackbone.sqlitefile.faults import translate

Chain = tuple[str, int]
"""tenant_id, worker_id"""
GENESIS = b"\0" * 32
_encode = msgspec.json.Encoder().encode

Record = tuple[int, str, str, str, str, str, int, int]
"""seq, tenant_id, subscription, task_id, event_type, data, created_at, worker_id"""


_EMPTY = hashlib.sha256()
"""Copied for each event: OpenSSL takes longer to look the algorithm up again."""


def link(previous: bytes, record: Record) -> bytes:
    """The hash of one event. It covers its whole row and the previous hash."""
    return hashlib.sha256(previous + _encode(record)).digest()


End = tuple[int, bytes]
"""Number and hash of the last event of a chain."""
NEW_CHAIN: End = (0, GENESIS)


def chained(
    entries: Sequence[Entry], worker_id: int, now_us: int, ends: dict[str, End]
) -> tuple[Sequence[Any], ...]:
    """Chain events of one worker, in order. Returns their columns: number, tenant, subscription,
    task, type, data, id and hash. `ends`: by tenant, where the chains end; it is updated."""
    tenants, subscriptions, tasks, kinds, data = zip(*entries, strict=True)
    texts = [_encode(each).decode() for each in data]
    begin, encode = _EMPTY.copy, _encode
    seqs: list[int] = []
    hashes: list[bytes] = []
    at = 0
    for tenant, alike in groupby(tenants):  # one chain after the other
        part = slice(at, at := at + len(list(alike)))
        seq, digest = ends[tenant]
        numbers = range(seq + 1, seq + 1 + part.stop - part.start)
        seqs += numbers
        for record in zip(
            numbers, tenants[part], subscriptions[part], tasks[part], kinds[part], texts[part],
            repeat(now_us), repeat(worker_id),
        ):  # fmt: skip
            found = begin()
            found.update(digest + encode(record))
            digest = found.digest()
            hashes.append(digest)
        ends[tenant] = (seqs[-1], digest)
    return seqs, tenants, subscriptions, tasks, kinds, texts, uuid7_block(len(entries)), hashes


class Chains:
    """The chains of one process, which has given out the ids of its workers."""

    _given_out: Container[int]
    """Worker ids that this process gave out: they have no chains from before."""
    _begun: Iterable[Chain]

    def is_blank(self, worker_id: int) -> bool:
        """Return True if it is certain that nothing was ever written under this worker id."""
        return worker_id in self._given_out and all(worker_id != each for _, each in self._begun)


log = logging.getLogger("ackbone.ledger")

TENANT = "_ledger"
ANCHOR_TASK = "anchor"
PRUNED_TASK = "pruned"

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


VARIABLE = "ACKBONE_LEDGER_KEY"
LENGTH = 32
SHORTEST = 16


def ledger_key(
    path: Path, *, environ: Mapping[str, str] | None = None, create: bool = False
) -> bytes:
    """`$ACKBONE_LEDGER_KEY`, else the bytes of the file. With `create`, a missing file is made.

    Raises ConfigError if there is no key, or if it is too short.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE)
    if text:
        return _long_enough(text.encode(), VARIABLE)
    if create and not path.exists():
        try:
            _create(path)
        except OSError as error:
            raise translate(error, path) from error
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            [
                f"there is no ledger key: {path} does not exist and {VARIABLE} is not set. "
                "The first worker makes it; ledger.key_file says where it is"
            ]
        ) from None
    except OSError as error:
        raise ConfigError([f"the ledger key {path} cannot be read: {error.strerror}"]) from None
    if path.stat().st_mode & 0o077:
        log.warning("the ledger key %s can be read by others: chmod 600 it", path)
    return _long_enough(key, str(path))


def _long_enough(key: bytes, place: str) -> bytes:
    if len(key) < SHORTEST:
        raise ConfigError([f"{place}: a ledger key has at least {SHORTEST} bytes, not {len(key)}"])
    return key


def _create(path: Path) -> None:
    """Make the file whole or not at all. Of two processes that start together, one makes it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secrets.token_bytes(LENGTH))
        os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(fd)
        draft.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
