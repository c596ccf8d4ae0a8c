"""Checks of a deployment. Each finding has a detail and, where it helps, advice."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ackbone.core.broker import Capabilities, Identity
from ackbone.core.clock import from_us
from ackbone.core.findings import Check, Finding, ok, refused, warning
from ackbone.core.records import QueueState, WorkerState
from ackbone.core.serving import how_to_carry
from ackbone.core.text import counted

LOW_BYTES = 500 * 1024 * 1024
NO_BYTES = 20 * 1024 * 1024
LOW_SHARE = 0.05
_OWN_FILES = "only the owner can read them"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_SANE_US = 1_700_000_000_000_000
"""A wall clock before November 2023 was never set."""
_LEAP_US = 1_000_000


def check_home(home: Path) -> list[Check]:
    """Check that only the owner can read the data."""
    if not home.exists():
        return [ok("home", f"{home} does not exist yet; the first start creates it")]
    mode = stat.S_IMODE(home.stat().st_mode)
    loose = [
        path
        for path in sorted(home.iterdir())
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) & _OTHERS
    ]
    if not mode & _OTHERS:
        # Other users cannot reach a readable file in a closed folder.
        reach = "in a folder that only the owner can open" if loose else _OWN_FILES
        return [ok("home", f"only the owner can read {home}"), ok("files", reach)]
    files = ok("files", _OWN_FILES)
    if loose:
        names = " ".join(str(path) for path in loose)
        what = f"other users can read {', '.join(path.name for path in loose)}"
        files = refused("files", what, f"chmod 600 {names}")
    what = f"other users can read {home} ({mode:04o})"
    return [warning("home", what, f"chmod 700 {home}"), files]


def check_space(folder: Path) -> Check:
    """Check the free disk space; `send` is refused when the disk is full."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    share = usage.free / usage.total if usage.total else 0.0
    detail = f"{usage.free / 2**20:,.0f} MB free ({share:.0%}) for {folder}"
    if usage.free < NO_BYTES:
        return refused("disk space", detail, "free some space: messages are refused now")
    if usage.free < LOW_BYTES or share < LOW_SHARE:
        return warning("disk space", detail, "free some space before messages are refused")
    return ok("disk space", detail)


def check_clock(now_us: int, last_event_us: int | None) -> Check:
    """Check the wall clock, by which messages become due and expire."""
    if now_us < _SANE_US:
        return refused("clock", f"it shows {from_us(now_us):%Y-%m-%d %H:%M}: it was never set")
    if last_event_us is not None and last_event_us > now_us + _LEAP_US:
        ahead = (last_event_us - now_us) / 1e6
        return warning(
            "clock",
            f"the last event of the ledger is {ahead:,.0f} s in the future: the clock was set back",
            "messages may become due late; keep the clock right with a time service",
        )
    return ok("clock", f"{from_us(now_us):%Y-%m-%d %H:%M:%S} UTC")


def check_workers(workers: Sequence[WorkerState]) -> Check:
    """Check for messages of dead workers, which wait until a living worker reclaims them."""
    dead = [worker for worker in workers if not worker.alive]
    living = len(workers) - len(dead)
    stuck = sum(worker.running for worker in dead)
    if dead and not living:
        return warning(
            "workers",
            f"{len(dead)} died and none is alive; {stuck} of their messages wait to be reclaimed",
            "start one: ackbone run MODULE:APP",
        )
    if dead:
        return warning(
            "workers",
            f"{living} alive, {len(dead)} dead with {counted(stuck, 'message')}",
            "living workers reclaim these within a second; run doctor again",
        )
    return ok("workers", f"{living} alive" if living else "none is running")


def check_queues(queues: Sequence[QueueState]) -> list[Check]:
    """Check for paused queues, dead letters and parked messages."""
    findings = [ok("queues", f"{len(queues)} known, none is paused")]
    paused = [state.queue for state in queues if state.paused_at_us is not None]
    if paused:
        resume = f"ackbone queues resume {paused[0]}"
        findings = [warning("queues", f"paused: {', '.join(paused)}", resume)]
    dead = sum(state.dead for state in queues)
    if dead:
        findings.append(
            warning(
                "dead letters",
                f"{dead} wait{'s' if dead == 1 else ''} for an operator",
                "list them: ackbone dlq list",
            )
        )
    parked = sum(state.parked for state in queues)
    if parked:
        findings.append(
            warning(
                "parked", f"{counted(parked, 'message')} parked", "list them: ackbone parked list"
            )
        )
    return findings


def check_serving(uncarried: Mapping[str, int], unserved: Mapping[str, int]) -> list[Check]:
    """Check for messages in queues, and replies to channels, that no living worker serves."""
    findings = [
        warning(
            "queues",
            f"{counted(count, 'message', 'wait')} in {queue}, which no living worker reads",
            f"start a worker whose app has a handler for it: @app.on(…, queue={queue!r})",
        )
        for queue, count in unserved.items()
    ]
    findings += [
        warning(
            "channels",
            f"{'1 reply waits' if count == 1 else f'{count} replies wait'} for {channel}, "
            "a channel that no living worker has",
            how_to_carry(channel),
        )
        for channel, count in uncarried.items()
    ]
    return findings


def check_settings(*, in_memory: bool, dedup_may_stop: bool) -> list[Check]:
    """Check for settings that give up a promise."""
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
                "on_dedup_unavailable: continue switches off 'once in effect' (P4 off)",
                "write on_dedup_unavailable: stop",
            )
        )
    return findings or [ok("settings", "no setting gives up a promise")]


def check_capabilities(
    able: Capabilities, *, ordered: Collection[str], with_ttl: Collection[str], max_bytes: int
) -> list[Check]:
    """Check what the queues of a broker ask for that it cannot do, or does in another way.

    `ordered` and `with_ttl` are the queues whose messages have an order and a time to live.
    """
    findings = []
    if ordered and not (able.ordered or able.parts):
        findings.append(
            warning(
                "order",
                f"the broker may deliver messages of {', '.join(ordered)} in any order: those with"
                " the same ordering key run one after another, in the order in which they come",
                f"write queues.{min(ordered)}.ordered: false, or use a broker that keeps the order",
            )
        )
    if able.max_body is not None and able.max_body < max_bytes:
        findings.append(
            warning(
                "size",
                f"the broker takes messages up to {able.max_body:,} bytes, and max_message_bytes is"
                f" {max_bytes:,}: larger ones are refused when they are sent",
                f"write max_message_bytes: {able.max_body}",
            )
        )
    if able.identity is Identity.NONE:
        detail = (
            "messages that come without an id get one when they are received; let their senders set"
            " an id: without one, a crash before the acknowledgement makes a second task"
        )
        findings.append(ok("identity", detail))
    if with_ttl and not able.ttl:
        detail = f"messages of {', '.join(with_ttl)} expire by the clock of their senders"
        findings.append(ok("time to live", detail))
    if not able.priority:
        findings.append(ok("priority", "messages are received without regard to their priority"))
    return findings


def check_subscribers(channel_of: Mapping[str, str], channels: Collection[str]) -> list[Check]:
    """Check that the channel of each subscriber exists; otherwise its notifications wait for ever.

    `channel_of` maps the name of a subscriber to its channel.
    """
    findings = [
        warning(
            "subscribers",
            f"{name} is notified by {channel}, and the configuration has no such channel",
            f"write channels.{channel}, or ignore this if your program registers it (App.channel)",
        )
        for name, channel in channel_of.items()
        if channel not in channels
    ]
    if channel_of and not findings:
        findings.append(ok("subscribers", f"{len(channel_of)}, each with its channel"))
    return findings


def check_problems(problems: Iterable[str]) -> list[Check]:
    """Return the mistakes in the configuration as findings."""
    return [refused("config", problem) for problem in problems]


def healthy(findings: Iterable[Check]) -> bool:
    return all(check.finding is not Finding.REFUSED for check in findings)
