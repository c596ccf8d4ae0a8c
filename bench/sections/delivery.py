"""Delivery: replies to a receiver on this machine, over the webhook channel, signed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from ackbone.core.outbound.delivery import New
from bench import processes, workload
from bench.figures import Row, at_least, at_most, percentile
from bench.measure import Bench
from bench.receiver import ARRIVAL

COUNT, WAITING = 10_000, 100_000
CONVERSATIONS = 1_000
AT_A_TIME = 200
SPACING_S, SINGLE, WARM_UP = 0.02, 300, 20
_LIMIT_S = 120.0
GOAL = 2_000


class Receiver:
    """A process that takes everything, and what it saw."""

    def __init__(self, home: Path) -> None:
        self.samples = home / "arrivals"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}/hook"
        self.child = processes.Measured(
            [sys.executable, "-m", "bench.receiver", str(self.port), str(self.samples)],
            log=home / "receiver.log",
            cwd=processes.ROOT,
        )

    def ready(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise processes.ProcessFailed(f"the receiver is not there\n{self.child.tail}")

    def count(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.samples.stat().st_size // ARRIVAL.size
        return 0

    def arrivals(self) -> list[tuple[int, int]]:
        return list(ARRIVAL.iter_unpack(self.samples.read_bytes()))

    def wait(self, count: int, sender: processes.Measured | None = None) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while self.count() < count:
            if sender is not None:
                sender.check()
            if time.monotonic() > deadline:
                raise processes.ProcessFailed(f"{self.count()} of {count} arrived")
            time.sleep(0.002)


@contextlib.contextmanager
def receiving(home: Path) -> Iterator[Receiver]:
    receiver = Receiver(home)
    with receiver.child:
        receiver.ready()
        yield receiver


def section(bench: Bench) -> list[Row]:
    count, waiting = bench.size(COUNT, least=200), bench.size(WAITING, least=1000)
    single = bench.size(SINGLE, least=20)

    def raw() -> dict[str, float]:
        with bench.home() as home, receiving(home) as receiver:
            asyncio.run(_post(receiver.url, count))
            return {"raw": _rate(receiver)}

    def carried() -> dict[str, float]:
        with bench.home() as home, receiving(home) as receiver:
            asyncio.run(_put(home, receiver.url, count))
            with _sender(home) as child:
                receiver.wait(count, child)
                child.stop()
            cpu = child.cpu_s / count * 1e6
            return {"carried": _rate(receiver), "cpu": cpu}

    def alone() -> dict[str, float]:
        with bench.home() as home, receiving(home) as receiver:
            return _latency(home, receiver, single)

    def recovered() -> dict[str, float]:
        with bench.home() as home, receiving(home) as receiver:
            asyncio.run(_put(home, receiver.url, waiting))
            os.sync()
            begun = time.monotonic_ns()
            with _sender(home) as child:
                receiver.wait(min(waiting, 5 * COUNT), child)
                peak = child.peak_mb()
            return {"first": (receiver.arrivals()[0][0] - begun) / 1e9, "peak": peak}

    seen = bench.take_turns(
        {
            "aiohttp alone": raw,
            "ackbone": carried,
            f"{single} replies, {SPACING_S * 1e3:.0f} ms apart": alone,
            f"a start with {waiting:,} waiting": recovered,
        }
    )
    base = Row(
        section="delivery",
        name=f"aiohttp, {AT_A_TIME} posts at a time",
        unit="msg/s",
        values=seen["raw"],
    )
    return [
        base,
        Row(
            section="delivery",
            name="ackbone, webhooks",
            unit="msg/s",
            values=seen["carried"],
            beside=base,
        ),
        Row(
            section="delivery",
            name=f"ackbone, beside {GOAL:,}/s",
            unit="msg/s",
            values=seen["carried"],
            beside=Row(section="delivery", name=f"{GOAL:,}/s", unit="msg/s", values=(GOAL,)),
            goal=at_least(1.0),
        ),
        _lower("CPU a reply, with the start", "µs", seen["cpu"]),
        _lower("put → first byte at the receiver, median", "ms", seen["p50"], 10.0),
        _lower("put → first byte at the receiver, p99", "ms", seen["p99"]),
        _lower(f"start → first byte, {waiting:,} waiting", "s", seen["first"], 2.0),
        _lower("the sender's memory, peak", "MB", seen["peak"], 200.0),
    ]


def _lower(name: str, unit: str, values: tuple[float, ...], goal: float | None = None) -> Row:
    return Row(
        section="delivery",
        name=name,
        unit=unit,
        values=values,
        lower_is_better=True,
        goal=None if goal is None else at_most(goal),
    )


def _sender(home: Path) -> processes.Measured:
    return processes.worker(home, until_idle=False, env={"ACKBONE_BENCH_WEBHOOK": "1"})


def _rate(receiver: Receiver) -> float:
    """From the first arrival to the last."""
    moments = [came for came, _ in receiver.arrivals()]
    return (len(moments) - 1) / ((max(moments) - min(moments)) / 1e9)


async def _put(home: Path, url: str, count: int) -> None:
    async with workload.open_app(home) as app:
        deliveries = app.storage.deliveries(app.store)
        for begin in range(0, count, 1000):
            await deliveries.put(
                [_new(n, url, workload.payload(n)["text"]) for n in range(begin, begin + 1000)]
            )


def _new(n: int, url: str, content: str) -> New:
    return New(
        id=f"{n:036d}",
        channel="webhook",
        recipient=url,
        content=content,
        conversation=f"c{n % CONVERSATIONS}",
    )


async def _post(url: str, count: int) -> None:
    """The same bodies, as fast as the client can."""
    left = iter(range(count))

    async def post() -> None:
        for n in left:
            body = b'{"type":"reply","data":{"id":"%036d","content":"%s"}}' % (
                n,
                workload.payload(n)["text"].encode(),
            )
            async with session.post(url, data=body) as answer:
                await answer.read()

    connector = aiohttp.TCPConnector(limit=AT_A_TIME)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(post() for _ in range(AT_A_TIME)))


def _latency(home: Path, receiver: Receiver, count: int) -> dict[str, float]:
    with _sender(home) as child:
        asyncio.run(_put_one_by_one(home, receiver, count, child))
        child.stop()
    waits = [(came - sent) / 1e6 for came, sent in receiver.arrivals()[WARM_UP:]]
    return {"p50": percentile(waits, 0.5), "p99": percentile(waits, 0.99)}


async def _put_one_by_one(
    home: Path, receiver: Receiver, count: int, child: processes.Measured
) -> None:
    async with workload.open_app(home) as app:
        for n in range(WARM_UP + count):
            due = time.monotonic() + SPACING_S
            await app.deliver("webhook", receiver.url, str(time.monotonic_ns()), id=f"{n:036d}")
            if n < WARM_UP:
                await asyncio.to_thread(receiver.wait, n + 1, child)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.to_thread(receiver.wait, WARM_UP + count, child)
