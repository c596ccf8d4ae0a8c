"""Other queues on Redis and RabbitMQ, at their best settings: how each is filled and measured."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from . import processes, workload
from .measure import Bench, Unavailable

HERE = Path(__file__).parent / "peers"
TICKS = struct.Struct("<qdd")
_LIMIT_S = 180.0


@dataclass(frozen=True)
class Peer:
    """One process of it drains `count` messages."""

    name: str
    package: str
    app: str
    count: int
    command: Callable[[Path, str], list[str]]
    """The worker's command, from the environment's bin folder and the server's URL."""
    own_folder: bool = False
    """Installed apart, in a folder beside bin: it wants another redis-py than the rest."""
    env: dict[str, str] = field(default_factory=dict)


def _celery(bin_: Path, url: str) -> list[str]:
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "WARNING"]
    return [str(bin_ / "celery"), "-A", "celery_app", "worker", "-P", "solo", *quiet]


def _taskiq(bin_: Path, url: str) -> list[str]:
    limits = ["--max-async-tasks", "200", "--max-prefetch", "200", "--no-parse"]
    worker = [str(bin_ / "taskiq"), "worker", "taskiq_app:broker", "--workers", "1"]
    return [*worker, *limits, "--log-level", "WARNING"]


def _rq(bin_: Path, url: str) -> list[str]:
    simple = ["-w", "rq.SimpleWorker", "-S", "rq.serializers.JSONSerializer", "-q", "-P", "."]
    return [str(bin_ / "rq"), "worker", "bench", "-u", url, *simple]


def _arq(bin_: Path, url: str) -> list[str]:
    log = ["--custom-log-dict", "arq_app.QUIET"]
    return [str(bin_ / "python"), "-m", "arq", "arq_app.WorkerSettings", *log]


ON_REDIS = (
    Peer(
        "Dramatiq",
        "dramatiq",
        "dramatiq_app",
        8_000,
        lambda bin_, url: [str(bin_ / "dramatiq"), "dramatiq_app", "-p", "1", "-t", "1"],
        env={"dramatiq_queue_prefetch": "1000"},
    ),
    Peer(
        "FastStream",
        "faststream",
        "faststream_app",
        8_000,
        lambda bin_, url: [str(bin_ / "faststream"), "run", "faststream_app:app"],
    ),
    Peer("Taskiq", "taskiq", "taskiq_app", 6_000, _taskiq),
    Peer(
        "SAQ",
        "saq",
        "saq_app",
        5_000,
        lambda bin_, url: [str(bin_ / "saq"), "saq_app.settings", "--workers", "1"],
    ),
    Peer("arq", "arq", "arq_app", 4_000, _arq, own_folder=True),
    Peer("Celery", "celery", "celery_app", 3_000, _celery),
    Peer("RQ", "rq", "rq_app", 600, _rq),
)


ON_RABBITMQ = (
    Peer(
        "Dramatiq",
        "dramatiq",
        "dramatiq_rabbitmq_app",
        8_000,
        lambda bin_, url: [str(bin_ / "dramatiq"), "dramatiq_rabbitmq_app", "-p", "1", "-t", "1"],
        env={"dramatiq_queue_prefetch": "500"},
    ),
    Peer(
        "FastStream",
        "faststream",
        "faststream_rabbitmq_app",
        8_000,
        lambda bin_, url: [str(bin_ / "faststream"), "run", "faststream_rabbitmq_app:app"],
    ),
)


class Server(Protocol):
    """A server that is running."""

    @property
    def url(self) -> str: ...


Serve = Callable[[Path], AbstractContextManager[Server]]
"""Returns an empty server, which may keep its data in this folder."""


def installed(bench: Bench, peers: Sequence[Peer]) -> dict[str, Peer]:
    """Those that are installed, each under its name and version."""
    if bench.peers is None:
        bench.say("no peers: ACKBONE_BENCH_PEERS names no interpreter; 'make bench' sets it")
        return {}
    versions = versions_of(bench.peers)
    own = bench.peers.parent.parent
    found: dict[str, Peer] = {}
    for peer in peers:
        version = versions.get(peer.package)
        if peer.own_folder:
            there = sorted(own.glob(f"{peer.package}/{peer.package}-*.dist-info"))
            version = there[-1].name.split("-")[1].removesuffix(".dist") if there else None
        if version is None:
            bench.say(f"{peer.name} is not installed")
        else:
            found[f"{peer.name} {version}"] = peer
    return found


def versions_of(python: Path) -> dict[str, str]:
    """By its name, the version of each package that this interpreter has."""
    script = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
    )
    try:
        done = subprocess.run(
            [str(python), "-c", script], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"{python} does not run: {error}") from error
    found: dict[str, str] = json.loads(done.stdout)
    return found


def contender(bench: Bench, label: str, peer: Peer, serve: Serve) -> Callable[[], dict[str, float]]:
    """Its turn in a section."""

    def run() -> dict[str, float]:
        assert bench.peers is not None
        return {label: drain(bench, bench.peers, peer, serve)}

    return run


def drain(bench: Bench, python: Path, peer: Peer, serve: Serve) -> float:
    """Messages a second, from the first task's run to the last one's."""
    count = bench.size(peer.count, least=50)
    with bench.home() as home, serve(home) as server:
        ticks = home / "ticks"
        ticks.write_bytes(bytes(TICKS.size))
        own = f"{python.parent.parent / peer.package}{os.pathsep}" if peer.own_folder else ""
        env = {
            "BENCH_URL": server.url,
            "BENCH_TICKS": str(ticks),
            "PYTHONPATH": f"{own}{HERE}",
            **peer.env,
        }
        fill = [str(python), f"{peer.app}.py", str(workload.write_messages(home, count))]
        with processes.Measured(fill, log=home / "fill.log", cwd=HERE, env=env) as filling:
            filling.wait()
        os.sync()
        command = peer.command(python.parent, server.url)
        with processes.Measured(command, log=home / "peer.log", cwd=HERE, env=env) as child:
            return ticks_rate(ticks, count, child)


def ticks_rate(ticks: Path, count: int, child: processes.Measured) -> float:
    """Waits until so many tasks ran."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        done, first, last = TICKS.unpack(ticks.read_bytes())
        if done >= count:
            return float((count - 1) / (last - first))
        child.check()
        if time.monotonic() > deadline:
            raise processes.ProcessFailed(f"{done} of {count} were drained\n{child.tail}")
        time.sleep(0.02)
