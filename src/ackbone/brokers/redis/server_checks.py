"""Checks of a Redis server: would it lose messages? The server is asked once, then pure functions
judge its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from ackbone.core.broker import Durability
from ackbone.core.findings import Check, Finding, ok, refused, warning

from .wire import Wire

OLDEST = (5, 0)
"""The first version with streams."""
SETTINGS = (
    "appendonly", "appendfsync", "no-appendfsync-on-rewrite", "maxmemory", "maxmemory-policy",
)  # fmt: skip
_SAFE_POLICY = "noeviction"
_UNSAFE = "allow_unsafe is set: "
_FORGOES = "or accept the loss: allow_unsafe=1 in the broker's URL"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The server's own report about its settings. None: it does not report the value."""

    version: tuple[int, int] | None = None
    role: str | None = None
    log: bool | None = None
    """Whether each write goes to the append-only file (AOF)."""
    sync: str | None = None
    """`appendfsync`: always, everysec or no."""
    sync_pauses: bool | None = None
    """`no-appendfsync-on-rewrite`: no syncs while the file is rewritten."""
    policy: str | None = None
    """`maxmemory-policy`."""
    limit: int | None = None
    """`maxmemory`, in bytes; 0: no limit."""
    config: str | None = None
    """Why CONFIG was refused; None: it was answered."""


async def look(wire: Wire) -> Seen:
    """Ask the server, in one round trip. Raises BrokerUnavailable if it does not answer."""
    info, *settings = await wire.ask(("INFO",), *(("CONFIG", "GET", name) for name in SETTINGS))
    told: dict[str, str] = {}
    refusal = None
    for answer in settings:
        if isinstance(answer, ResponseError):
            refusal = str(answer)
        else:
            told.update(_pairs(answer))
    return seen_in(b"" if isinstance(info, ResponseError) else info, told, refusal)


def seen_in(info: bytes, config: Mapping[str, str], refusal: str | None = None) -> Seen:
    """Read the answers to INFO and CONFIG GET. CONFIG decides where both report a value."""
    written = info.decode("utf-8", "replace").splitlines()
    lines = {name: value for name, _, value in (line.partition(":") for line in written)}
    log = config.get("appendonly") or lines.get("aof_enabled")
    pauses = config.get("no-appendfsync-on-rewrite")
    limit = config.get("maxmemory") or lines.get("maxmemory", "")
    return Seen(
        version=_version(lines.get("redis_version", "")),
        role=lines.get("role"),
        log=None if log is None else log in ("yes", "1"),
        sync=config.get("appendfsync"),
        sync_pauses=None if pauses is None else pauses == "yes",
        policy=config.get("maxmemory-policy") or lines.get("maxmemory_policy"),
        limit=int(limit) if limit.isdigit() else None,
        config=refusal,
    )


def durability(seen: Seen) -> Durability:
    """Return the durability of a message that this server has confirmed (P1)."""
    if not seen.log:
        return Durability.NONE
    if seen.sync == "always" and seen.sync_pauses is False:
        return Durability.FSYNC
    return Durability.PROCESS


def judge(seen: Seen, where: str, *, allow_unsafe: bool = False) -> list[Check]:
    """Return the findings. `allow_unsafe` turns settings that lose messages into warnings. A server
    that cannot work at all stays refused."""
    losses = [check_log(seen), check_memory(seen)]
    if allow_unsafe:
        losses = [_allowed(check) for check in losses]
    found = [check_version(seen, where), check_role(seen), *losses]
    if seen.config is not None:
        found.append(check_sight(seen))
    return found


def check_version(seen: Seen, where: str) -> Check:
    if seen.version is None:
        return warning("redis", f"{where} answers; it does not say which version it is")
    version = ".".join(map(str, seen.version))
    if seen.version < OLDEST:
        return refused("redis", f"{where} is Redis {version}: it has no streams", "5.0 or newer")
    return ok("redis", f"{where} answers, version {version}")


def check_role(seen: Seen) -> Check:
    if seen.role == "slave":
        return refused(
            "redis role",
            "a replica: it takes no writes, or forgets them at its next sync with its primary",
            "name the primary in the broker's URL",
        )
    if seen.role is None:
        return warning("redis role", "it does not say whether it is a replica")
    return ok("redis role", "takes writes")


def check_log(seen: Seen) -> Check:
    """Check the append-only file. Messages that are not in it are gone when the server stops."""
    name = "redis log"
    if seen.log is None:
        return refused(
            name,
            "it does not say whether it keeps an append-only file: messages may be gone when it "
            "stops (P1)",
            f"permit INFO to this user, {_FORGOES}",
        )
    if not seen.log:
        return refused(
            name,
            "appendonly no: every waiting message is gone when this server stops (P1)",
            f"appendonly yes in redis.conf, {_FORGOES}",
        )
    if seen.sync == "always" and not seen.sync_pauses:
        return ok(name, "appendonly yes, appendfsync always: accepted messages are on the disk")
    if seen.sync == "always":
        return warning(
            name,
            "appendfsync always, but no-appendfsync-on-rewrite yes: while the file is "
            "rewritten nothing is synced, and a power cut may take messages accepted meanwhile",
            "no-appendfsync-on-rewrite no",
        )
    taken = {
        "everysec": "appendfsync everysec: a power cut may take about the last second",
        "no": "appendfsync no: a power cut may take what the kernel had not written yet, half a "
        "minute or more",
        None: "appendonly yes, but it does not say how often it is synced: a power cut may take "
        "about the last second, or more",
    }
    detail = taken.get(seen.sync, f"appendfsync {seen.sync}: not known here")
    return warning(
        name,
        f"{detail}. Receipts say 'process': accepted messages survive kills, not power loss",
        "appendfsync always in redis.conf makes it 'fsync', and sending slower",
    )


def check_memory(seen: Seen) -> Check:
    """Check the eviction policy: a full server refuses writes or deletes keys, such as streams."""
    name = "redis memory"
    if seen.policy is None:
        return warning(name, "it does not say what it does when its memory is full")
    limited = f"{seen.limit / 2**20:,.0f} MB" if seen.limit else "no limit"
    if seen.policy == _SAFE_POLICY:
        return ok(name, f"{limited}; when it is full it refuses messages (noeviction)")
    if seen.limit == 0:
        what = "once maxmemory is set, a full server would delete"
    else:
        what = f"at {limited} it deletes" if seen.limit else "a full server deletes"
    if seen.policy.startswith("volatile-"):
        whose = "keys with a time to live, also a queue that has one"
    else:
        whose = "whole queues, read or not"
    return refused(
        name,
        f"maxmemory-policy {seen.policy}: {what} {whose} (P6)",
        f"maxmemory-policy noeviction in redis.conf, {_FORGOES}",
    )


def check_sight(seen: Seen) -> Check:
    """Name the settings that INFO alone does not show."""
    unseen = [
        word
        for word, value in (
            ("appendfsync", seen.sync),
            ("no-appendfsync-on-rewrite", seen.sync_pauses),
            ("appendonly", seen.log),
            ("maxmemory-policy", seen.policy),
        )
        if value is None
    ]
    return warning(
        "redis config",
        f"CONFIG is refused ({seen.config}); not seen: {', '.join(unseen) or 'nothing'}",
        "permit CONFIG GET to this user, or look where the server is managed",
    )


def unsafe(seen: Seen) -> list[str]:
    """Return the details of the findings that lose messages."""
    found = (check_role(seen), check_log(seen), check_memory(seen))
    return [check.detail for check in found if check.finding is Finding.REFUSED]


def _allowed(check: Check) -> Check:
    if check.finding is not Finding.REFUSED:
        return check
    hint = (check.hint or "").removesuffix(f", {_FORGOES}")
    return warning(check.name, _UNSAFE + check.detail, hint)


def _pairs(answer: Sequence[Any]) -> dict[str, str]:
    """Read an answer of names and values in turn, as text."""
    words = [word.decode("utf-8", "replace") for word in answer]
    return dict(zip(words[::2], words[1::2], strict=True))


def _version(text: str) -> tuple[int, int] | None:
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
