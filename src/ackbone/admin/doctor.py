"""What is wrong with a deployment, or soon will be: findings, each with what to do about it."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ackbone.core.checks import Check, Finding, ok, refused, warning
from ackbone.core.clock import from_us
from ackbone.core.records import QueueState, WorkerState
from ackbone.core.serving import how_to_carry

LOW_BYTES = 500 * 1024 * 1024
NO_BYTES = 20 * 1024 * 1024
LOW_SHARE = 0.05
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_SANE_US = 1_700_000_000_000_000
"""A wall clock before the end of 2023 was never set."""
_LEAP_US = 1_000_000


def check_home(home: Path) -> list[Check]:
    """Nobody else may read what users wrote."""
    if not home.exists():
        return [ok("home", f"{home} does not exist yet; it is made at the first start")]
    mode = stat.S_IMODE(home.stat().st_mode)
    findings: list[Check] = []
    if mode & _OTHERS:
        findings.append(
            warning("home", f"{home} can be read by others ({mode:04o})", f"chmod 700 {home}")
        )
    else:
        findings.append(ok("home", f"{home} is readable by its owner alone"))
    loose = [
        path
        for path in sorted(home.iterdir())
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) & _OTHERS
    ]
    # Behind a closed door an open file harms nobody.
    if loose and mode & _OTHERS:
        names = " ".join(str(path) for path in loose)
        findings.append(
            refused(
                "files", f"others can read {', '.join(p.name for p in loose)}", f"chmod 600 {names}"
            )
        )
    elif not loose:
        findings.append(ok("files", "readable by their owner alone"))
    else:
        findings.append(ok("files", "behind a folder that only their owner can enter"))
    return findings


def check_space(folder: Path) -> Check:
    """`send` refuses when there is no room; know it before."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    share = usage.free / usage.total if usage.total else 0.0
    detail = f"{usage.free / 2**20:,.0f} MB free ({share:.0%}) for {folder}"
    if usage.free < NO_BYTES:
        return refused("disk space", detail, "free some: messages are refused without room")
    if usage.free < LOW_BYTES or share < LOW_SHARE:
        return warning("disk space", detail, "free some before messages are refused")
    return ok("disk space", detail)


def check_clock(now_us: int, last_event_us: int | None) -> Check:
    """Due times and times to live go by the wall clock."""
    if now_us < _SANE_US:
        return refused("clock", f"it is {from_us(now_us):%Y-%m-%d %H:%M} here: it was never set")
    if last_event_us is not None and last_event_us > now_us + _LEAP_US:
        ahead = (last_event_us - now_us) / 1e6
        return warning(
            "clock",
            f"the ledger's last event lies {ahead:,.0f} s in the future: the clock was set back",
            "due times may come late; let the clock be kept by a time service",
        )
    return ok("clock", f"{from_us(now_us):%Y-%m-%d %H:%M:%S} UTC")


def check_workers(workers: Sequence[WorkerState]) -> Check:
    """Work of a dead worker waits for a living one to notice."""
    dead = [worker for worker in workers if not worker.alive]
    living = len(workers) - len(dead)
    stuck = sum(worker.running for worker in dead)
    if dead and not living:
        return warning(
            "workers",
            f"{len(dead)} died and none is alive; {stuck} of their messages wait to be taken back",
            "start one: ackbone run MODULE:APP",
        )
    if dead:
        return warning(
            "workers",
            f"{living} alive, {len(dead)} dead with {stuck} messages",
            "the living ones take them back within a second; look again",
        )
    return ok("workers", f"{living} alive" if living else "none is running")


def check_queues(queues: Sequence[QueueState]) -> list[Check]:
    """What stands still, and what waits for a person."""
    findings = []
    paused = [state.queue for state in queues if state.paused_at_us is not None]
    if paused:
        findings.append(
            warning("queues", f"paused: {', '.join(paused)}", f"ackbone queues resume {paused[0]}")
        )
    else:
        findings.append(ok("queues", f"{len(queues)} known, none is paused"))
    dead = sum(state.dead for state in queues)
    if dead:
        findings.append(
            warning("dead letters", f"{dead} wait for a person", "look: ackbone dlq list")
        )
    parked = sum(state.parked for state in queues)
    if parked:
        findings.append(warning("parked", f"{parked} are set aside", "look: ackbone parked list"))
    return findings


def check_serving(uncarried: Mapping[str, int], unserved: Mapping[str, int]) -> list[Check]:
    """Messages and replies that wait for something that no living worker has."""
    findings = [
        warning(
            "queues",
            f"{count} messages wait in {queue}, which no living worker reads",
            f"start a worker whose app has a handler for it: @app.on(…, queue={queue!r})",
        )
        for queue, count in unserved.items()
    ]
    findings += [
        warning(
            "channels",
            f"{count} replies wait for {channel}, a channel that no living worker has",
            how_to_carry(channel),
        )
        for channel, count in uncarried.items()
    ]
    return findings


def check_settings(*, in_memory: bool, dedup_may_stop: bool) -> list[Check]:
    """Settings that give up a promise."""
    findings = []
    if in_memory:
        findings.append(
            refused(
                "broker",
                "memory:// loses every waiting message with its process (P1)",
                "write broker: sqlite",
            )
        )
    if dedup_may_stop:
        findings.append(
            warning(
                "dedup",
                "on_dedup_unavailable: continue switches 'once in effect' off (P4 off)",
                "write on_dedup_unavailable: stop",
            )
        )
    return findings or [ok("settings", "none gives up a promise")]


def check_subscribers(channel_of: Mapping[str, str], channels: Collection[str]) -> list[Check]:
    """By name, the channel that tells each; a telling without one waits for ever, in silence."""
    findings = [
        warning(
            "subscribers",
            f"{name} is told by {channel}, and the configuration has no such channel",
            f"write channels.{channel}; nothing is wrong if the program has it (App.channel)",
        )
        for name, channel in channel_of.items()
        if channel not in channels
    ]
    if channel_of and not findings:
        findings.append(ok("subscribers", f"{len(channel_of)}, each with its channel"))
    return findings


def check_problems(problems: Iterable[str]) -> list[Check]:
    """Mistakes in the configuration."""
    return [refused("config", problem) for problem in problems]


def healthy(findings: Iterable[Check]) -> bool:
    return all(check.finding is not Finding.REFUSED for check in findings)
