"""The command: choose sections, run them, print one table."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import machine, profile
from .figures import Row, table
from .measure import Bench, Section, Unavailable
from .redis_drain import MANY_SLOTS
from .sections import (
    backlog,
    both_ways,
    delivery,
    drain,
    latency,
    peers,
    postgres,
    rabbitmq,
    redis,
    sends,
    start,
)

SECTIONS: dict[str, Section] = {
    "drain": drain.section,
    "sends": sends.section,
    "latency": latency.section,
    "backlog": backlog.section,
    "peers": peers.section,
    "redis": redis.section,
    "postgres": postgres.section,
    "rabbitmq": rabbitmq.section,
    "both-ways": both_ways.section,
    "delivery": delivery.section,
    "start": start.section,
}
QUICK_SCALE = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """0: measured (whatever the figures say); 1: a section could not be measured."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _interrupted)
    folder = Path(tempfile.mkdtemp(prefix="ab-bench-", dir=options.dir))
    try:
        return _run(options, folder)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(options: argparse.Namespace, folder: Path) -> int:
    quick = options.quick
    bench = Bench(
        folder=folder,
        rounds=options.rounds or (1 if quick else 3),
        scale=options.scale or (QUICK_SCALE if quick else 1.0),
        peers=_peers(),
        quiet=options.json,
    )
    facts = machine.describe(folder)
    if not options.json:
        print(machine.describe_line(facts), flush=True)
    before = machine.feel_pulse(folder)
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    profiles: list[str] = []
    if options.profile is not None:
        profiles = _profiles(bench)
    else:
        for name in options.sections or SECTIONS:
            bench.say(f"section {name}")
            try:
                rows += SECTIONS[name](bench)
            except Unavailable as error:
                skipped[name] = str(error)
            except Exception:  # the other sections are worth having
                failed[name] = traceback.format_exc()
    noise = machine.Noise(before, machine.feel_pulse(folder))
    if options.json:
        found = _plain(bench, facts, noise, rows, skipped, failed)
        print(json.dumps({**found, "profile": "\n\n".join(profiles) or None}, indent=2))
    else:
        _show(bench, noise, rows, skipped, failed, profiles)
    if options.profile:
        Path(options.profile).write_text("\n\n".join(profiles) + "\n")
    return 1 if failed else 0


def _profiles(bench: Bench) -> list[str]:
    found = []
    for keyed in (False, True):
        bench.say(f"profile, {'with' if keyed else 'without'} idempotency keys")
        title = f"### {'With' if keyed else 'Without'} an idempotency key"
        found += [title, profile.text(profile.measure(bench, keyed=keyed))]
    bench.say("profile, tasks on Redis")
    try:
        tasks = profile.text(profile.measure_tasks(bench))
    except Unavailable as error:
        bench.say(f"skipped: {error}")
    else:
        found += [f"### Tasks on Redis, {MANY_SLOTS} slots", tasks]
    return found


def _show(
    bench: Bench,
    noise: machine.Noise,
    rows: Sequence[Row],
    skipped: dict[str, str],
    failed: dict[str, str],
    profiles: Sequence[str],
) -> None:
    if rows:
        print(f"\n{table(rows)}\n")
        print(
            f"best of {bench.rounds}; a ratio is best against best, both of this run, or the middle"
            " one of all turns where it says so"
        )
    for text in profiles:
        print(f"\n{text}")
    if bench.scale < 1:
        print(f"sizes × {bench.scale:g}: a smoke test, no figures to quote")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    for name, reason in failed.items():
        print(f"FAILED {name}:\n{reason}")
    print(noise.text())
    if machine.is_memory(bench.folder):
        print(f"WARNING: {bench.folder} is memory: syncs cost nothing there; use --dir")


def _plain(
    bench: Bench,
    facts: dict[str, Any],
    noise: machine.Noise,
    rows: Sequence[Row],
    skipped: dict[str, str],
    failed: dict[str, str],
) -> dict[str, Any]:
    return {
        "machine": facts,
        "rounds": bench.rounds,
        "scale": bench.scale,
        "noise": noise.plain(),
        "rows": [row.plain() for row in rows],
        "skipped": skipped,
        "failed": failed,
    }


def _peers() -> Path | None:
    named = os.environ.get("ACKBONE_BENCH_PEERS")
    # Absolute, not resolved: an environment's python is a link out of it.
    return Path(os.path.abspath(named)) if named else None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure ackbone beside raw limits and peers; print one table with ratios.",
        epilog=f"sections: {', '.join(SECTIONS)}",
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: a smoke test")
    parser.add_argument("--rounds", type=_positive(int), help="rounds of each contender (3)")
    parser.add_argument("--scale", type=_positive(float), help="multiply every size by this")
    parser.add_argument("--json", action="store_true", help="print JSON, with every round's value")
    parser.add_argument("--dir", help="where databases are made (default: the temporary folder)")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FILE",
        help="instead of the sections, show (and write to FILE) where the time of a message goes",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    return options


def _positive(kind: type[int] | type[float]) -> Any:
    def read(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return read


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt
