"""RabbitMQ: quorum queues, beside aio-pika itself and other queues on RabbitMQ."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from bench import processes, server_peers, workload
from bench.figures import Goal, Row, at_least
from bench.measure import Bench
from bench.rabbitmq_server import rabbitmq_server
from tests.servers.rabbitmq import RabbitServer

from .drain import MANY_SLOTS, drain
from .sends import TASKS

_RAW = server_peers.HERE / "rabbitmq_raw.py"
_CHUNK = 500
_TURNS = 2
"""In each round: every contender meets another moment of the machine."""


def section(bench: Bench) -> list[Row]:
    """Claim, ledger, final event and acknowledgement for each message; peers at their best."""
    with rabbitmq_server() as server:
        bench.say(f"RabbitMQ {server.version}")
        return _rows(bench, server)


def _rows(bench: Bench, server: RabbitServer) -> list[Row]:
    count, several = bench.size(20_000, least=600), bench.size(20_000, least=1000)

    @contextlib.contextmanager
    def emptied(home: Path) -> Iterator[RabbitServer]:
        server.forget(*server.queues())
        yield server

    def ours(name: str, slots: int | None) -> dict[str, float]:
        with bench.home() as home, emptied(home):
            asyncio.run(_fill(home, server.url, count))
            return {name: drain(home, count, slots=slots, broker=server.url).rate}

    def sent(what: str) -> dict[str, float]:
        with bench.home() as home, emptied(home):
            command = [sys.executable, "-m", "bench.server_send", what, str(home), server.url]
            return {what: processes.rate_of([*command, str(several)], home)}

    def raw(what: str) -> dict[str, float]:
        with bench.home() as home, emptied(home):
            messages = workload.write_messages(home, several)
            command = [str(bench.peers), str(_RAW), what, str(messages)]
            return {what: processes.rate_of(command, home, BENCH_URL=server.url)}

    peers = server_peers.installed(bench, server_peers.ON_RABBITMQ)
    contenders: dict[str, Callable[[], dict[str, float]]] = {}
    for label, peer in peers.items():
        contenders[label] = server_peers.contender(bench, label, peer, emptied)
    if bench.peers is not None:
        contenders["aio-pika, publish"] = lambda: raw("publish")
    contenders[f"{TASKS} tasks send"] = lambda: sent("each")
    contenders["batches are sent"] = lambda: sent("batches")
    if bench.peers is not None:
        contenders["aio-pika, drain"] = lambda: raw("drain")
    contenders["ackbone, drain"] = lambda: ours("ours", MANY_SLOTS)
    contenders["ackbone, drain, the default slots"] = lambda: ours("ours default", None)
    seen = bench.take_turns(contenders, times=_TURNS)

    fastest = bare = confirmed = None
    rows = [_row(label, seen[label]) for label in peers]
    if peers:
        each_turn = zip(*(seen[label] for label in peers), strict=True)
        fastest = _row("the fastest of these in each turn", tuple(map(max, each_turn)))
        rows.append(fastest)
    if bench.peers is not None:
        bare = _row("aio-pika, prefetch 500, an ack for each", seen["drain"])
        confirmed = _row(f"aio-pika, {_CHUNK} confirmed at a time", seen["publish"])
        rows.append(bare)
    name = f"ackbone, SQLite store, {MANY_SLOTS} slots"
    rows += [
        _row(name, seen["ours"], beside=bare, goal=at_least(0.7)),
        *([_row(f"{name}, beside peers", seen["ours"], fastest, at_least(1))] if fastest else []),
        _row("ackbone, SQLite store, the default slots", seen["ours default"], bare),
        *([confirmed] if confirmed else []),
        _row(f"ackbone, send_many of {_CHUNK}", seen["batches"], confirmed),
        _row(f"ackbone, {TASKS} tasks send", seen["each"], confirmed),
    ]
    return rows


async def _fill(home: Path, url: str, count: int) -> None:
    async with workload.open_app(home, url) as app:
        await workload.publish(app, workload.QUEUE, range(count), _CHUNK)


def _row(
    name: str, values: tuple[float, ...], beside: Row | None = None, goal: Goal | None = None
) -> Row:
    row = Row(section="rabbitmq", name=name, unit="msg/s", values=values, beside=beside)
    return row if beside is None else replace(row, goal=goal, paired=True, note="turn by turn")
