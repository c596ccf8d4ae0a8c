"""The role `TaskBroker` both ways: a broker that has it does all of it, one without none of it."""

from __future__ import annotations

from typing import Any

import msgspec

from ackbone.core.broker import Delivery, Outgoing, Settlement, Verb
from ackbone.core.ids import new_id
from ackbone.core.task_protocol import (
    FLAT_HEADERS,
    ONCE,
    AckWithNotices,
    FlatDelivery,
    FlatOutgoing,
    TaskBroker,
)
from ackbone.testing.harness import Trial, bodies, expect, expect_same, outgoing


async def once(trial: Trial) -> None:
    """One of several messages with the same mark is published. Without the role, all of them."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    first, again = [_marked(b"first", "a"), _marked(b"other", "b")], _marked(b"again", "a")
    await trial.publish(broker, sub, [*first, again])
    await trial.publish(broker, sub, [again])
    if not isinstance(broker, TaskBroker):
        came = await trial.receive(broker, sub, 4, ack=True)
        wanted = [b"first", b"other", b"again", b"again"]
        expect_same(wanted, bodies(came), "no role `TaskBroker`: a mark has no effect")
        return
    came = await trial.receive(broker, sub, 2, ack=True)
    expect_same([b"first", b"other"], bodies(came), "one message for each mark")
    await trial.expect_silence(broker, sub, "what is marked alike was published before")


async def notices(trial: Trial) -> None:
    """Notices are published with their ACK, each once. Without the role, they are ignored."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    told = await trial.queue(broker, "told")
    await trial.publish(broker, sub, outgoing(2))
    came = await trial.receive(broker, sub, 2)
    ends = [
        AckWithNotices(
            delivery=delivery,
            verb=Verb.ACK,
            notices=[(told.queue, _marked(b"of " + delivery.body, delivery.body.decode()))],
        )
        for delivery in came
    ]
    for _ in range(2):  # repeated, as after a lost answer
        results = await (await trial.source(broker, sub)).settle(ends)
        expect(all(result.ok for result in results), "an ACK with a notice was refused")
    if isinstance(broker, TaskBroker):
        published = await trial.receive(broker, told, 2, ack=True)
        wanted = [b"of " + delivery.body for delivery in came]
        expect_same(wanted, bodies(published), "one notice for each ACK")
    await trial.expect_silence(broker, told, "there is nothing more to publish")
    await trial.expect_silence(broker, sub, "everything is acknowledged")


async def beside(trial: Trial) -> None:
    """What a reader beside others has acknowledged is there for the next group."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    if not isinstance(broker, TaskBroker):
        return
    batch = outgoing(3)
    await trial.publish(broker, sub, batch)
    for group in ("first", "second"):
        reader = msgspec.structs.replace(sub, name=f"{sub.name}-{group}", group=group)
        source = await broker.subscribe_beside(reader, room=len(batch))
        came: list[Delivery] = []
        while found := await source.receive(limit=len(batch), wait=trial.harness.quiet_s):
            came += found
            await source.settle([Settlement(delivery=each, verb=Verb.ACK) for each in found])
        expect_same([each.body for each in batch], bodies(came), f"the {group} group reads all")


async def fields(trial: Trial) -> None:
    """A message of fields arrives with its fields. Without the role, as its body and headers."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    written = {"task_id": "t-1", "payload": '{"q": "kelp", "n": 1}', "empty": "", "ab": "x\0é"}
    form: dict[str, Any] = {"body": msgspec.json.encode(written), "headers": FLAT_HEADERS}
    sent: list[Outgoing] = [
        FlatOutgoing(id=new_id(), fields=written, **form),
        Outgoing(id=new_id(), **form),
    ]
    await trial.publish(broker, sub, sent)
    for came in await trial.receive(broker, sub, 2, ack=True):
        expect(came.headers == FLAT_HEADERS, f"the headers are {dict(came.headers)}")
        expect(msgspec.json.decode(came.body) == written, f"the body is {came.body!r}")
        if isinstance(broker, TaskBroker):
            expect(
                isinstance(came, FlatDelivery) and came.fields == written,
                f"the fields are {getattr(came, 'fields', None)}",
            )


def _marked(body: bytes, mark: str) -> Outgoing:
    return Outgoing(id=new_id(), body=body, headers={ONCE: mark})
