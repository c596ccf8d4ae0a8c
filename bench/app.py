"""The app that the bench's workers run: `python -m ackbone.processes.worker_process bench/app.py`.

Only defaults: dedup by identity, ledger chain, final event, lease, synchronous=FULL.
"""

from __future__ import annotations

import os
import struct
import time

from ackbone import App, Context

SAMPLE = struct.Struct("<qq")
"""Number of the message, and nanoseconds from its send to its handler's first line."""

app = App(name="bench")
if "ACKBONE_BENCH_WEBHOOK" in os.environ:
    from ackbone.delivery.channels.webhook_channel import WebhookChannel

    app.channel(
        WebhookChannel(
            ["whsec_c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IQ=="],
            allow=["127.0.0.0/8"],
            https_only=False,
        )
    )
_samples: int | None = None


@app.on("bench.noop")
async def noop(ctx: Context) -> None:
    """Nothing: what is measured is everything around it."""


@app.on("bench.answer")
async def answer(ctx: Context) -> dict[str, str]:
    """Nothing but a result, which is kept."""
    return {"order": ctx.payload["order"]}


@app.on("bench.latency")
async def latency(ctx: Context) -> None:
    """Write down how long the way here was. CLOCK_MONOTONIC is one clock for all processes."""
    now = time.monotonic_ns()
    global _samples  # noqa: PLW0603 - one file per process, opened at the first message
    if _samples is None:
        path = os.environ["ACKBONE_BENCH_SAMPLES"]
        _samples = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(_samples, SAMPLE.pack(ctx.payload["n"], now - ctx.payload["sent_ns"]))
