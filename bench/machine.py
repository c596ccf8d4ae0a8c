"""The machine: what it is, how steady it was, and who else used it meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNSTEADY = 1.2
"""Before and after differ by more than this: the figures between them are doubtful."""
_LOOP = 1_000_000
_SYNCS = 200
_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Pulse:
    """How fast the machine was at one moment."""

    loops_s: float
    """Turns of a plain Python loop, millions a second."""
    syncs_s: float
    """4 KiB written in place and synced, times a second."""
    busy_s: float
    """CPU seconds that all processes had used since the machine started."""
    ours_s: float
    """CPU seconds of this process and the children that it has waited for."""
    at: float


def feel_pulse(folder: Path) -> Pulse:
    """Measure now; about half a second."""
    return Pulse(
        loops_s=max(_loops() for _ in range(3)) / 1e6,
        syncs_s=max(_syncs(folder) for _ in range(3)),
        busy_s=_machine_cpu_s(),
        ours_s=_own_cpu_s(),
        at=time.monotonic(),
    )


@dataclass(frozen=True)
class Noise:
    """Two pulses, and what to think of the figures between them."""

    before: Pulse
    after: Pulse

    @property
    def loops(self) -> float:
        return _apart(self.before.loops_s, self.after.loops_s)

    @property
    def syncs(self) -> float:
        return _apart(self.before.syncs_s, self.after.syncs_s)

    @property
    def others(self) -> float:
        """Cores that other processes used meanwhile, on average."""
        span = max(1e-9, self.after.at - self.before.at)
        ours = self.after.ours_s - self.before.ours_s
        return max(0.0, (self.after.busy_s - self.before.busy_s - ours) / span)

    @property
    def unsteady(self) -> bool:
        return self.loops > UNSTEADY or self.syncs > UNSTEADY

    def text(self) -> str:
        first, last = self.before, self.after
        lines = [
            f"noise: Python loop {first.loops_s:.1f} → {last.loops_s:.1f} M/s, "
            f"4 KiB + fdatasync {first.syncs_s:,.0f} → {last.syncs_s:,.0f} /s, "
            f"other processes used {self.others:.2f} cores"
        ]
        if self.unsteady:
            lines.append(
                f"WARNING: the machine was not steady (CPU {self.loops:.2f} ×, disk "
                f"{self.syncs:.2f} × apart): trust ratios within a section only, or run again"
            )
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        return {
            "loops_m_s": [self.before.loops_s, self.after.loops_s],
            "fdatasync_s": [self.before.syncs_s, self.after.syncs_s],
            "other_cores": self.others,
            "unsteady": self.unsteady,
        }


def describe(folder: Path) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu_name(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "disk": _mount(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "commit": _commit(),
    }


def describe_line(facts: dict[str, Any]) -> str:
    """`describe` for people."""
    return (
        f"machine: {facts['cores']} cores ({facts['cpu']}), {facts['memory_gb']} GB, disk "
        f"{facts['disk']}; Python {facts['python']}, SQLite {facts['sqlite']}, commit "
        f"{facts['commit']}"
    )


def is_memory(folder: Path) -> bool:
    """A file system without a disk: a sync costs nothing there, and proves nothing."""
    return _mount(folder).startswith(("tmpfs", "ramfs"))


def _apart(first: float, second: float) -> float:
    return max(first, second) / max(1e-9, min(first, second))


def _loops() -> float:
    begin = time.perf_counter()
    total = 0
    for n in range(_LOOP):
        total += n & 7
    return _LOOP / (time.perf_counter() - begin)


def _syncs(folder: Path) -> float:
    path = folder / "pulse"
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    page = b"x" * 4096
    try:
        os.pwrite(handle, page * 16, 0)
        os.fsync(handle)
        begin = time.perf_counter()
        for _ in range(_SYNCS):
            os.pwrite(handle, page, 0)
            os.fdatasync(handle)
        return _SYNCS / (time.perf_counter() - begin)
    finally:
        os.close(handle)
        path.unlink()


def _machine_cpu_s() -> float:
    """User, nice, system, interrupts; not what a host beneath took away (steal)."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (fields[0] + fields[1] + fields[2] + fields[5] + fields[6]) / _HZ


def _own_cpu_s() -> float:
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    return used


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _mount(folder: Path) -> str:
    """Kind of the file system and its device."""
    best, found = "", "unknown"
    target = str(folder.resolve())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            kind, device = right.split()[:2]
            best, found = point, f"{kind} on {device}"
    return found


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=8"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return f"unknown ({sys.prefix})"
    return done.stdout.strip()
