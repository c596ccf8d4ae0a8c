"""Other queues on Redis, at their best settings: how each is filled, started and measured."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import processes, workload
from .measure import Bench
from .redis_server import RedisServer

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


PEERS = (
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


def drain(bench: Bench, python: Path, peer: Peer) -> float:
    """Messages a second, from the first task's run to the last one's."""
    count = bench.size(peer.count, least=50)
    with bench.home() as home, RedisServer(home) as server:
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
