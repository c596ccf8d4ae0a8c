"""Parts of a queue: each one has one reader at a time, which gets its messages in order."""

from __future__ import annotations

import asyncio

from ackbone.core.broker import Broker, Delivery, Outgoing, Rereads, Subscription, Verb
from ackbone.core.ids import new_id
from ackbone.testing.harness import Trial, bodies, expect

_KEYS = 8


async def parts_have_one_reader(trial: Trial) -> None:
    """Two clients read: no part is with both, and each key comes in order. Without the flag no
    delivery names a part."""
    first = await trial.broker()
    other = await trial.second(first)
    sub = await trial.queue(first)
    sent = [_keyed(f"k{n % _KEYS}", n) for n in range(10 * _KEYS)]
    clients = (first, other)
    for client in clients:  # both are readers before there is anything to read
        await trial.look(client, sub, 1)
    await trial.publish(first, sub, sent)
    seen: dict[str, list[int]] = {}
    part_of: dict[str, str | None] = {}
    reader_of: dict[str, Broker] = {}
    loop = asyncio.get_running_loop()
    moved = loop.time()
    while sum(map(len, seen.values())) < len(sent):
        silent = loop.time() - moved
        expect(silent < trial.harness.patience_s, f"messages of these keys are lost: {seen}")
        hands: list[tuple[Broker, list[Delivery]]] = []
        for client in clients:
            hands.append((client, list(await trial.look(client, sub, 7))))
        if first.capabilities.parts:
            mine, theirs = ({d.part for d in batch} - {None} for _, batch in hands)
            expect(not mine & theirs, f"two readers have the parts {mine & theirs}")
        for client, batch in hands:
            for delivery in batch:
                moved = loop.time()
                _note(first, client, delivery, seen, part_of, reader_of)
            await trial.settle(client, sub, batch, Verb.ACK)


def _note(
    broker: Broker,
    client: Broker,
    delivery: Delivery,
    seen: dict[str, list[int]],
    part_of: dict[str, str | None],
    reader_of: dict[str, Broker],
) -> None:
    """Check one delivery against those that came before it."""
    key, n = delivery.body.decode().split()
    part = delivery.part
    came = seen.setdefault(key, [])
    if not broker.capabilities.parts:
        expect(part is None, f"`parts` is not claimed, and yet a delivery names part {part!r}")
        expect(not delivery.opens_part, "`parts` is not claimed, and yet a delivery opens one")
        came.append(int(n))
        return
    if part is None:
        raise AssertionError("`parts` is claimed, and a delivery names no part")
    expect(part_of.setdefault(key, part) == part, f"key {key} is in parts {part_of[key]}, {part}")
    if reader_of.get(part) is not client:
        expect(delivery.opens_part, f"the first delivery of part {part} does not open it")
        reader_of[part] = client
    if int(n) not in came:  # a part that moves brings messages again
        came.append(int(n))
    expect(came == sorted(came), f"key {key} came out of order: {came}")


async def parts_move(trial: Trial) -> None:
    """The next reader of a part begins with its first unsettled message, and so does a reader that
    reads it again."""
    first = await trial.broker()
    if not first.capabilities.parts:
        return
    sub = await trial.queue(first)
    sent = [_keyed("k", n) for n in range(6)]
    await trial.publish(first, sub, sent)
    held = await trial.receive(first, sub, 3)
    wanted = [out.body for out in sent]
    expect(bodies(held) == wanted[:3], f"the part came out of order: {bodies(held)}")
    _opens(held)
    await trial.settle(first, sub, held[:1], Verb.ACK)
    source: object = await trial.source(first, sub)
    if isinstance(source, Rereads):
        source.reread({str(held[0].part)})
        again = await trial.receive(first, sub, 3)
        expect(bodies(again) == wanted[1:4], f"read again, the part begins with {bodies(again)}")
        _opens(again)
    other = await trial.second(first)
    await first.close()
    if first.capabilities.lease_s is not None:
        await trial.harness.pass_time(first.capabilities.lease_s)
    await _read_on(trial, other, sub, wanted[1:])


async def _read_on(trial: Trial, reader: Broker, sub: Subscription, wanted: list[bytes]) -> None:
    came: list[Delivery] = []
    while len(came) < len(wanted):
        batch = await trial.receive(reader, sub, min(2, len(wanted) - len(came)))
        if not came:
            _opens(batch)
        came += batch
        await trial.settle(reader, sub, batch, Verb.ACK)
    expect(bodies(came) == wanted, f"the next reader of the part got {bodies(came)}")


def _opens(batch: list[Delivery]) -> None:
    """Check that the first delivery opens the part, and that the next one does not."""
    opened = [delivery.opens_part for delivery in batch[:2]]
    expect(opened[0], "the first delivery of a part does not open it")
    expect(opened == [True, False], "a delivery opens a part that its reader has")


def _keyed(key: str, n: int) -> Outgoing:
    return Outgoing(id=new_id(), body=f"{key} {n}".encode(), key=key)
