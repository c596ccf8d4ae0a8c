"""Bytes and headers arrive as they were sent, one by one and in bulk."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ackbone.core.broker import Broker, Delivery, Outgoing, Subscription, Verb
from ackbone.core.errors import MessageTooLarge
from ackbone.core.ids import new_id
from ackbone.testing.harness import Trial, bodies, expect, expect_same, outgoing

_TEN_MINUTES_US = 600 * 1_000_000
_LARGE = 256 * 1024


async def round_trip(trial: Trial) -> None:
    """A message arrives once and unchanged, with the broker's data about it."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    before = trial.harness.now_us()
    sent = Outgoing(id=new_id(), body=b'{"text": "hello"}', headers={"x-a": "1"}, key="chat-1")
    await trial.publish(broker, sub, [sent])
    (came,) = await trial.receive(broker, sub, 1)
    expect(came.body == sent.body, f"sent {sent.body!r}, got {came.body!r}")
    expect(came.headers.get("x-a") == "1", f"header x-a is {came.headers.get('x-a')!r}")
    expect(came.key in (None, "chat-1"), f"the ordering key came back as {came.key!r}")
    expect(came.count >= 1, f"a first delivery has count {came.count}")
    if came.sent_at_us is not None:
        apart = abs(came.sent_at_us - before)
        expect(
            apart < _TEN_MINUTES_US, f"sent_at_us is {apart / 1e6:.0f} s from the time of sending"
        )
    await trial.settle(broker, sub, [came], Verb.ACK)
    await trial.expect_silence(broker, sub, "the only message was acknowledged")


async def headers(trial: Trial) -> None:
    """Headers come back exactly, unicode and empty values included, each with its own message."""
    cases: list[Mapping[str, str]] = [
        {},
        {"x-empty": ""},
        {
            "x-text": "Grüße, 你好, 🦀, \u202eabc",
            "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        },
        {"x-quotes": "a\"b'c\\d\te\nf"},
        {f"x-{i}": str(i) * 20 for i in range(20)},
        {"x-long": "v" * 4000},
    ]
    broker = await trial.broker()
    sub = await trial.queue(broker)
    batch = [Outgoing(id=new_id(), body=b"%d" % i, headers=h) for i, h in enumerate(cases)]
    await trial.publish(broker, sub, batch)
    for came in await trial.receive(broker, sub, len(batch)):
        want = cases[int(came.body)]
        got = {name: came.headers.get(name) for name in want}
        expect(got == dict(want), f"headers sent {dict(want)!r}, got {dict(came.headers)!r}")
        others = {name for case in cases for name in case} - set(want)
        mixed = others & set(came.headers)
        expect(not mixed, f"headers of other messages came with it: {sorted(mixed)}")


async def binary_body(trial: Trial) -> None:
    """Any bytes: NUL, invalid UTF-8, line ends."""
    await _same_bytes(trial, bytes(range(256)) * 3 + b"\xff\xfe\xc3\x28\x00\r\n\x1a")


async def empty_body(trial: Trial) -> None:
    """An empty body is a message like any other."""
    await _same_bytes(trial, b"")


async def large_body(trial: Trial) -> None:
    """A body of 256 KB, or of the broker's limit if that is less."""
    limit = (await trial.harness.make_broker()).capabilities.max_body
    size = _LARGE if limit is None else min(_LARGE, limit)
    await _same_bytes(trial, bytes(i * 31 % 251 for i in range(size)))


async def _same_bytes(trial: Trial, body: bytes) -> None:
    broker = await trial.broker()
    sub = await trial.queue(broker)
    await trial.publish(broker, sub, [Outgoing(id=new_id(), body=body)])
    (came,) = await trial.receive(broker, sub, 1, ack=True)
    expect(
        came.body == body,
        f"{len(body)} bytes sent, {len(came.body)} other ones came: {came.body[:40]!r} ...",
    )


async def too_large_is_refused_alone(trial: Trial) -> None:
    """A body above `max_body` is refused by its own result. The rest of the batch is accepted."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    limit = broker.capabilities.max_body
    if limit is None:
        # "No limit" is a claim, too.
        await trial.publish(broker, sub, [Outgoing(id=new_id(), body=bytes(4 * 1024 * 1024))])
        (came,) = await trial.receive(broker, sub, 1, ack=True)
        expect(len(came.body) == 4 * 1024 * 1024, f"4 MiB sent, {len(came.body)} bytes came")
        return
    batch = [
        Outgoing(id=new_id(), body=b"before"),
        Outgoing(id=new_id(), body=bytes(limit + 1)),
        Outgoing(id=new_id(), body=b"after"),
    ]
    results = await broker.publish(sub.queue, batch)
    answers = [(r.id, type(r.error)) for r in results]
    wanted = [
        (batch[0].id, type(None)),
        (batch[1].id, MessageTooLarge),
        (batch[2].id, type(None)),
    ]
    expect(answers == wanted, f"results are {answers}, not ok, MessageTooLarge, ok")
    came_all = await trial.receive(broker, sub, 2, ack=True)
    expect_same([b"before", b"after"], bodies(came_all), "the neighbours")
    await trial.expect_silence(broker, sub, "the over-long message was refused")


async def results_in_order(trial: Trial) -> None:
    """One result per item, in the order of the batch, with the item's id."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    batch = outgoing(50)
    results = await trial.publish(broker, sub, batch)
    expect([r.id for r in results] == [o.id for o in batch], "results are not in the batch's order")


async def empty_batches(trial: Trial) -> None:
    """Empty batches are accepted."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    expect(list(await broker.publish(sub.queue, [])) == [], "an empty publish has results")
    expect(
        list(await (await trial.source(broker, sub)).settle([])) == [],
        "an empty settle has results",
    )


async def whole_batch(trial: Trial) -> None:
    """A batch of any size is accepted in one call."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    batch = outgoing(trial.harness.bulk)
    await trial.publish(broker, sub, batch)
    came = await trial.receive(broker, sub, len(batch), ack=True)
    expect_same([o.body for o in batch], bodies(came))


async def same_id_twice(trial: Trial) -> None:
    """Publishing an id again does no harm: at least one copy comes, and other messages are not
    affected."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    out = Outgoing(id=new_id(), body=b"twin")
    last = Outgoing(id=new_id(), body=b"last")
    await trial.publish(broker, sub, [out, out])
    await trial.publish(broker, sub, [out])
    await trial.publish(broker, sub, [last])
    came: list[Delivery] = []
    while batch := await trial.look(broker, sub, 10, wait=_settling(trial, came)):
        came += batch
        await trial.settle(broker, sub, batch, Verb.ACK)
    copies = bodies(came).count(b"twin")
    expect(1 <= copies <= 3, f"of three copies of one id {copies} came")
    expect(bodies(came).count(b"last") == 1, "the message behind them did not come once")


def _settling(trial: Trial, came: list[Delivery]) -> float:
    """Receive with patience until the last message, then only for the quiet time."""
    return trial.harness.quiet_s if b"last" in bodies(came) else trial.harness.patience_s


async def limit(trial: Trial) -> None:
    """`receive` never returns more than `limit`, and the rest stays in the queue."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    batch = outgoing(10)
    await trial.publish(broker, sub, batch)
    came: list[Delivery] = []
    for size in (1, 3, 10):
        got = await trial.look(broker, sub, size, wait=trial.harness.patience_s)
        expect(1 <= len(got) <= size, f"limit {size}, {len(got)} came")
        came += got
    if len(came) < len(batch):
        came += await trial.receive(broker, sub, len(batch) - len(came))
    expect_same([o.body for o in batch], bodies(came))


async def queues_do_not_mix(trial: Trial) -> None:
    """Several queues at once: each delivers only its own messages."""
    broker = await trial.broker()
    subs = [await trial.queue(broker, f"mix{i}") for i in range(4)]
    batches = [outgoing(40, prefix=f"queue{i}") for i in range(4)]

    async def one(sub: Subscription, batch: list[Outgoing]) -> list[Delivery]:
        for start in range(0, len(batch), 10):
            await trial.publish(broker, sub, batch[start : start + 10])
        return await trial.receive(broker, sub, len(batch), ack=True)

    came = await asyncio.gather(*(one(s, b) for s, b in zip(subs, batches, strict=True)))
    for sub, batch, got in zip(subs, batches, came, strict=True):
        expect_same([o.body for o in batch], bodies(got), f"queue {sub.queue}")
    for sub in subs:
        await trial.expect_silence(broker, sub, "everything was acknowledged")


async def many_consumers(trial: Trial) -> None:
    """Several consumers share a large batch. Each acknowledged message is received once."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    sent = outgoing(trial.harness.bulk)
    await trial.publish(broker, sub, sent)
    came = await _consume(trial, [broker] * 5, sub, len(sent))
    expect_same([o.body for o in sent], bodies(came))
    await trial.expect_silence(broker, sub, "everything was acknowledged")


async def concurrent_publish(trial: Trial) -> None:
    """Twenty tasks publish at once while others consume; each message comes once."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    shares = [outgoing(25, prefix=f"task{i}") for i in range(20)]

    async def publisher(share: list[Outgoing]) -> None:
        for start in range(0, len(share), 5):
            results = await trial.publish(broker, sub, share[start : start + 5])
            ids = [r.id for r in results]
            expect(ids == [o.id for o in share[start : start + 5]], "results of another caller")

    total = sum(len(share) for share in shares)
    came, _ = await asyncio.gather(
        _consume(trial, [broker] * 3, sub, total),
        asyncio.gather(*(publisher(share) for share in shares)),
    )
    expect_same([o.body for share in shares for o in share], bodies(came))


async def _consume(
    trial: Trial, brokers: list[Broker], sub: Subscription, total: int
) -> list[Delivery]:
    """Run one consumer for each of `brokers`, until `total` deliveries or no more came."""
    came: list[Delivery] = []
    loop = asyncio.get_running_loop()
    moved = loop.time()

    async def consumer(broker: Broker) -> None:
        nonlocal moved
        while len(came) < total and loop.time() - moved < trial.harness.patience_s:
            batch = await trial.look(broker, sub, 17)
            if batch:
                moved = loop.time()
                came.extend(batch)
                await trial.settle(broker, sub, batch, Verb.ACK)

    await asyncio.gather(*(consumer(broker) for broker in brokers))
    return came
