"""The conformance suite is worth what it finds: each planted fault must fail the check named."""

import asyncio
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any
from unittest import SkipTest

import msgspec
import pytest

from ackbone.brokers.memory import MemoryBroker
from ackbone.core.broker import (
    Broker,
    Delivery,
    Health,
    Identity,
    Outgoing,
    QueueStats,
    Result,
    Settlement,
    Source,
    Subscription,
    Verb,
)
from ackbone.core.errors import BrokerUnavailable, MessageTooLarge
from ackbone.core.task_protocol import ONCE
from ackbone.testing import (
    BrokerConformance,
    BrokerHarness,
    Check,
    FakeClock,
    PretendingBroker,
    run_check,
)
from ackbone.testing.checks import (
    capabilities,
    lifecycle,
    parts,
    restarts,
    settling,
    tasks,
    transport,
)

GROUPS: tuple[ModuleType, ...] = (
    transport,
    lifecycle,
    settling,
    capabilities,
    parts,
    tasks,
    restarts,
)


class Harness(BrokerHarness):
    quiet_s = 0.01
    tolerance_s = 5.0
    delay_s = 60.0

    def __init__(self, kind: type[MemoryBroker], **claims: Any) -> None:
        self.kind = kind
        self.claims = claims
        self.clock = FakeClock()

    async def make_broker(self) -> Broker:
        broker = self.kind(clock=self.clock)
        broker.capabilities = msgspec.structs.replace(broker.capabilities, **self.claims)
        return broker

    async def second_client(self, first: Broker) -> Broker:
        assert isinstance(first, MemoryBroker)
        return first.connect()

    async def restart(self, broker: Broker) -> None:
        await broker.close()
        await broker.open()

    async def dead_letters(self, broker: Broker, queue: str) -> Sequence[bytes]:
        assert isinstance(broker, MemoryBroker)
        return [copy.body for copy in broker.rejected if copy.queue == queue]


def change(batch: Sequence[Outgoing], **fields: Any) -> list[Outgoing]:
    return [msgspec.structs.replace(out, **fields) for out in batch]


class OnPublish(MemoryBroker):
    """Publishes something else than it was given, and says yes."""

    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return batch

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        await super().publish(queue, self.twist(batch))
        return [Result(id=out.id) for out in batch]


class LosesOneInAHundred(OnPublish):
    n = 0

    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        kept = []
        for out in batch:
            self.n += 1
            if self.n % 100:
                kept.append(out)
        return kept


class DoublesOneInAHundred(OnPublish):
    n = 0

    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        out: list[Outgoing] = []
        for item in batch:
            self.n += 1
            out += [item] * (1 if self.n % 100 else 2)
        return out


class DropsHeaders(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return change(batch, headers={})


class SharesHeaders(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        everything = {name: value for out in batch for name, value in out.headers.items()}
        return [msgspec.structs.replace(o, headers={**everything, **o.headers}) for o in batch]


class AsciiHeaders(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        def ascii_only(out: Outgoing) -> dict[str, str]:
            return {k: v.encode("ascii", "replace").decode() for k, v in out.headers.items()}

        return [msgspec.structs.replace(out, headers=ascii_only(out)) for out in batch]


class DropsEmptyHeaders(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return [
            msgspec.structs.replace(out, headers={k: v for k, v in out.headers.items() if v})
            for out in batch
        ]


class TextOnly(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return [
            msgspec.structs.replace(out, body=out.body.decode("utf-8", "replace").encode())
            for out in batch
        ]


class SwallowsEmptyBodies(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return [out for out in batch if out.body]


class CutsAt64K(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return [msgspec.structs.replace(out, body=out.body[:65536]) for out in batch]


class IgnoresPriority(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return change(batch, priority=1)


class IgnoresDelay(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return change(batch, delay_s=0.0)


class DelaysTooShort(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return [msgspec.structs.replace(out, delay_s=out.delay_s / 2) for out in batch]


class NeverDue(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return [msgspec.structs.replace(out, delay_s=out.delay_s * 1e6) for out in batch]


class IgnoresTtl(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return change(batch, ttl_s=None)


class LastInFirstOut(OnPublish):
    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        return list(reversed(batch))


class RefusesWholeBatch(MemoryBroker):
    """One over-long item takes its neighbours down."""

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        limit = self.capabilities.max_body or 0
        if any(len(out.body) > limit for out in batch):
            refused = MessageTooLarge("one of them is too large")
            return [Result(id=out.id, error=refused) for out in batch]
        return await super().publish(queue, batch)


class NeedsItems(MemoryBroker):
    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        if not batch:
            raise BrokerUnavailable("empty batch")
        return await super().publish(queue, batch)


class RefusesKnownIds(MemoryBroker):
    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        if len({out.id for out in batch}) < len(batch):
            return [Result(id=out.id, error=BrokerUnavailable("id exists")) for out in batch]
        return await super().publish(queue, batch)


class TakesAnySize(MemoryBroker):
    def _put(self, queue: Any, out: Outgoing) -> Result:
        limit, self.capabilities = (
            self.capabilities,
            msgspec.structs.replace(self.capabilities, max_body=None),
        )
        try:
            return super()._put(queue, out)
        finally:
            self.capabilities = limit


class ResultsReversed(MemoryBroker):
    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        return list(reversed(await super().publish(queue, batch)))


class MixesQueues(MemoryBroker):
    n = 0

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        self.n += 1
        known = list(self._space.queues)
        target = known[0] if self.n % 7 == 0 and known else queue
        return await super().publish(target, batch)


class OnReceive(MemoryBroker):
    async def _receive(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        return await self.twist(sub, limit, wait)

    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        return await super()._receive(sub, limit, wait)


class IgnoresLimit(OnReceive):
    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        return await super().twist(sub, limit + 4, wait)


class NeverWaits(OnReceive):
    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        return await super().twist(sub, limit, 0.0)


class SleepsItsWait(OnReceive):
    """Polls: looks once, then again when the wait is over."""

    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        got = await super().twist(sub, limit, 0.0)
        if not got and wait:
            await asyncio.sleep(wait)
            got = await super().twist(sub, limit, 0.0)
        return got


class DeafToClose(OnReceive):
    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        got = await super().twist(sub, limit, wait)
        if not got and not self._open:
            await asyncio.Event().wait()
        return got


class LosesOnCancel(OnReceive):
    """Takes the next message with it when a waiting receive is cancelled."""

    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        try:
            return await super().twist(sub, limit, wait)
        except asyncio.CancelledError:
            self.thief = True
            raise

    thief = False

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        stolen, self.thief = self.thief, False
        await super().publish(queue, batch[1:] if stolen else batch)
        return [Result(id=out.id) for out in batch]


class NewNames(OnReceive):
    n = 0

    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        named = []
        for delivery in await super().twist(sub, limit, wait):
            self.n += 1
            named.append(msgspec.structs.replace(delivery, identity=str(self.n)))
        return named


class NeverCounts(OnReceive):
    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        got = await super().twist(sub, limit, wait)
        return [msgspec.structs.replace(delivery, count=1) for delivery in got]


class HandsOutTwice(OnReceive):
    """Does not remember that a message is in somebody's hands."""

    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        got = await super().twist(sub, limit, wait)
        for delivery in got:
            self._space.queue(sub.queue).put(self._held[delivery.tag])
        return got


class DropsExpired(OnReceive):
    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        got = await super().twist(sub, limit, wait)
        now = self._space.clock.now_us()
        return [d for d in got if d.expires_at_us is None or d.expires_at_us > now]


class KeepsWhatItRead(MemoryBroker):
    """It reads more than it was asked for, and a pause does not return the rest."""

    _rest: Sequence[Delivery] = ()

    async def _receive(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        if not self._rest:
            self._rest = await super()._receive(sub, 100, wait)
        taken, self._rest = self._rest[:limit], self._rest[limit:]
        return taken


class OnSettle(MemoryBroker):
    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        return batch

    async def _settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        await super()._settle(self.twist(batch))
        return [Result(id=item.delivery.identity or "") for item in batch]


class AcksDoNotStick(OnSettle):
    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        return [s for s in batch if s.verb is not Verb.ACK]


class AckMeansRelease(OnSettle):
    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        return [msgspec.structs.replace(s, verb=Verb.RELEASE) for s in batch]


class ReleaseMeansAck(OnSettle):
    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        return [msgspec.structs.replace(s, verb=Verb.ACK) for s in batch]


class ReleaseDoesNothing(OnSettle):
    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        return [s for s in batch if s.verb is not Verb.RELEASE]


class ReleasesAtOnce(OnSettle):
    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        return [msgspec.structs.replace(s, delay_s=0.0) for s in batch]


class RejectMeansAck(OnSettle):
    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        return [
            msgspec.structs.replace(s, verb=Verb.ACK) if s.verb is Verb.REJECT else s for s in batch
        ]


class FirstVerbForAll(OnSettle):
    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        return [msgspec.structs.replace(s, verb=batch[0].verb) for s in batch]


class AckUpTo(OnSettle):
    """Acknowledges everything handed out so far, not the one message."""

    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        if any(s.verb is Verb.ACK for s in batch):
            for item in self._held.values():
                item.queue.in_flight -= 1
            self._held.clear()
        return batch


class RaisesOnUnknown(MemoryBroker):
    async def _settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        for item in batch:
            if item.delivery.tag not in self._held:
                raise BrokerUnavailable("PRECONDITION_FAILED - unknown delivery tag")
        return await super()._settle(batch)


class TagsByPosition(OnSettle):
    """A stale tag hits whatever is held at its place now."""

    def twist(self, batch: Sequence[Settlement]) -> Sequence[Settlement]:
        for item in batch:
            if item.delivery.tag not in self._held:
                for queue in self._space.queues.values():
                    for taken in queue.take(1, self._space.clock.monotonic()):
                        taken.queue.in_flight -= 1
        return batch


class ForgetsOnClose(MemoryBroker):
    async def close(self) -> None:
        self._held.clear()
        await super().close()


class ForgetsAllOnClose(MemoryBroker):
    async def close(self) -> None:
        await super().close()
        self._space.queues.clear()


class ReturnsToTheEnd(MemoryBroker):
    async def close(self) -> None:
        for item in self._held.values():
            item.number = next(self._space.numbers)
        await super().close()


class CannotReopen(MemoryBroker):
    async def open(self) -> None:
        if self._openings:
            raise BrokerUnavailable("already used")
        await super().open()


class CloseOnce(MemoryBroker):
    async def close(self) -> None:
        if not self._open:
            raise BrokerUnavailable("not open")
        await super().close()


class AlwaysHealthy(MemoryBroker):
    async def health(self) -> Health:
        return Health(ok=True)


class YesWhileClosed(MemoryBroker):
    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        if not self._open:
            return [Result(id=out.id) for out in batch]
        return await super().publish(queue, batch)


class StatsOfTheDay(MemoryBroker):
    async def stats(self, queues: Collection[str] = ()) -> Sequence[QueueStats]:
        return [QueueStats(queue=name, ready=3) for name in self._space.queues]


class NoAge(MemoryBroker):
    async def stats(self, queues: Collection[str] = ()) -> Sequence[QueueStats]:
        return [msgspec.structs.replace(entry, oldest_age_s=0.0) for entry in await super().stats()]


class NamesPartsUnasked(OnReceive):
    async def twist(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        got = await super().twist(sub, limit, wait)
        return [msgspec.structs.replace(delivery, part="0") for delivery in got]


class Partitioned(PretendingBroker):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"like": "kafka", **options})


class SharesParts(Partitioned):
    """Every client reads every part."""

    def _may_take(self, item: Any) -> bool:
        self._part_of(item)
        return True


class ScattersKeys(Partitioned):
    """A message with a key goes to any part."""

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        scattered = [msgspec.structs.replace(out, key=f"{n}") for n, out in enumerate(batch)]
        return await super().publish(queue, scattered)


class NeverOpens(Partitioned):
    async def _receive(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        got = await super()._receive(sub, limit, wait)
        return [msgspec.structs.replace(delivery, opens_part=False) for delivery in got]


class OpensAlways(Partitioned):
    async def _receive(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        got = await super()._receive(sub, limit, wait)
        return [msgspec.structs.replace(delivery, opens_part=True) for delivery in got]


class PassesOverUnsettled(Partitioned):
    """The next reader begins behind the messages that the last one held."""

    async def close(self) -> None:
        for item in self._held.values():
            item.number = next(self._space.numbers)
        await super().close()


class CannotReread(Partitioned):
    def _reread(self, queue: str, parts: Collection[str]) -> None:
        return


class OnlySaysTaskBroker(MemoryBroker):
    """Has the method of the role, and nothing else of it."""

    async def subscribe_beside(self, sub: Subscription, *, room: int) -> Source:
        return await self.subscribe(sub, room=room)


class ObeysMarks(OnPublish):
    """Publishes once, as the role says that it does not have."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.marks: set[str] = set()

    def twist(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        new = [out for out in batch if out.headers.get(ONCE) not in self.marks]
        self.marks |= {out.headers[ONCE] for out in new if ONCE in out.headers}
        return new


PLANTED: list[tuple[type[MemoryBroker], dict[str, Any], Check, str]] = [
    (LosesOneInAHundred, {}, transport.many_consumers, "lost"),
    (LosesOneInAHundred, {}, transport.whole_batch, "lost"),
    (LosesOneInAHundred, {}, restarts.restart_under_load, "lost"),
    (DoublesOneInAHundred, {}, transport.concurrent_publish, "too many"),
    (DoublesOneInAHundred, {}, transport.many_consumers, "too many|acknowledged"),
    (DropsHeaders, {}, transport.headers, "headers sent"),
    (DropsHeaders, {}, transport.round_trip, "header x-a"),
    (SharesHeaders, {}, transport.headers, "other messages"),
    (AsciiHeaders, {}, transport.headers, "headers sent"),
    (DropsEmptyHeaders, {}, transport.headers, "x-empty"),
    (TextOnly, {}, transport.binary_body, "bytes sent"),
    (SwallowsEmptyBodies, {}, transport.empty_body, "lost"),
    (CutsAt64K, {}, transport.large_body, "bytes sent"),
    (RefusesWholeBatch, {}, transport.too_large_is_refused_alone, "results are"),
    (TakesAnySize, {}, transport.too_large_is_refused_alone, "results are"),
    (CutsAt64K, {"max_body": None}, transport.too_large_is_refused_alone, "4 MiB sent"),
    (NeedsItems, {}, transport.empty_batches, "empty batch"),
    (RefusesKnownIds, {}, transport.same_id_twice, "id exists"),
    (ResultsReversed, {}, transport.results_in_order, "order"),
    (MixesQueues, {}, transport.queues_do_not_mix, "lost|queue"),
    (IgnoresLimit, {}, transport.limit, "limit 1"),
    (NeverWaits, {}, lifecycle.wait_is_bounded, "too early"),
    (SleepsItsWait, {}, lifecycle.publish_wakes_receive, "waiting for it"),
    (DeafToClose, {}, lifecycle.close_ends_receive, "still waits"),
    (LosesOnCancel, {}, lifecycle.cancelled_receive_loses_nothing, "lost"),
    (CannotReopen, {}, lifecycle.open_and_close_again, "already used"),
    (CloseOnce, {}, lifecycle.open_and_close_again, "not open"),
    (AlwaysHealthy, {}, lifecycle.health, "can be used"),
    (YesWhileClosed, {}, lifecycle.closed_broker_never_lies, "lost"),
    (StatsOfTheDay, {}, lifecycle.stats, "stats: "),
    (NoAge, {}, lifecycle.stats, "oldest_age_s"),
    (ForgetsOnClose, {}, lifecycle.second_client, "lost"),
    (HandsOutTwice, {}, lifecycle.second_client, "lost|other client"),
    (KeepsWhatItRead, {}, lifecycle.pause_hands_back, "6 messages were due"),
    (AcksDoNotStick, {}, settling.ack_is_final, "acknowledged before the reopening"),
    (AckMeansRelease, {}, settling.ack_is_final, "everything was acknowledged"),
    (HandsOutTwice, {}, settling.unsettled_comes_back, "lost|in our hands"),
    (ForgetsOnClose, {}, settling.unsettled_comes_back, "lost"),
    (AckUpTo, {}, settling.unsettled_comes_back, "lost"),
    (NeverCounts, {}, settling.unsettled_comes_back, "count was"),
    (NeverCounts, {}, settling.release, "count was"),
    (ReleaseMeansAck, {}, settling.release, "lost"),
    (ReleaseDoesNothing, {}, settling.release, "lost"),
    (MemoryBroker, {"release": False}, settling.release, "not claimed"),
    (ReleasesAtOnce, {}, settling.release_with_delay, "with a delay"),
    (RejectMeansAck, {}, settling.reject, "dead-letter place"),
    (AckMeansRelease, {}, settling.reject, "was rejected"),
    (MemoryBroker, {"reject": False}, settling.reject, "not claimed"),
    (RaisesOnUnknown, {}, settling.settle_twice, "unknown delivery tag"),
    (RaisesOnUnknown, {}, settling.settle_stale, "unknown delivery tag"),
    (RaisesOnUnknown, {}, settling.settle_foreign, "unknown delivery tag"),
    (TagsByPosition, {}, settling.settle_stale, "lost"),
    (FirstVerbForAll, {}, settling.mixed_settlements, "lost"),
    (NewNames, {}, settling.identity, "another name"),
    (NewNames, {"identity": Identity.NONE}, settling.identity, "another name"),
    (IgnoresDelay, {}, capabilities.delay, "came first"),
    (DelaysTooShort, {}, capabilities.delay, "nine tenths"),
    (NeverDue, {}, capabilities.delay, "delay is over"),
    (MemoryBroker, {"delay": False}, capabilities.delay, "lost"),
    (IgnoresPriority, {}, capabilities.priority, "priorities came as"),
    (LastInFirstOut, {}, capabilities.priority, "out of order"),
    (MemoryBroker, {"priority": False}, capabilities.priority, "not claimed"),
    (LastInFirstOut, {}, capabilities.ordered, "out of order"),
    (ReturnsToTheEnd, {}, capabilities.ordered, "after a reopening"),
    (IgnoresTtl, {}, capabilities.ttl, "not set"),
    (DropsExpired, {}, capabilities.ttl, "lost"),
    (MemoryBroker, {"ttl": False}, capabilities.ttl, "not claimed"),
    (MemoryBroker, {"lease_s": 5.0}, capabilities.lease, "lost"),
    (OnlySaysTaskBroker, {}, tasks.once, "was published before"),
    (OnlySaysTaskBroker, {}, tasks.notices, "2 messages were due"),
    (OnlySaysTaskBroker, {}, tasks.beside, "the second group reads all"),
    (OnlySaysTaskBroker, {}, tasks.fields, "the fields are None"),
    (ObeysMarks, {}, tasks.once, "are lost"),
    (HandsOutTwice, {}, capabilities.lease, "no lease is claimed"),
    (NamesPartsUnasked, {}, parts.parts_have_one_reader, "not claimed"),
    (Partitioned, {"parts": False}, parts.parts_have_one_reader, "not claimed"),
    (MemoryBroker, {"parts": True}, parts.parts_have_one_reader, "names no part"),
    (SharesParts, {}, parts.parts_have_one_reader, "two readers"),
    (ScattersKeys, {}, parts.parts_have_one_reader, "is in parts"),
    (NeverOpens, {}, parts.parts_have_one_reader, "does not open it"),
    (NeverOpens, {}, parts.parts_move, "does not open it"),
    (OpensAlways, {}, parts.parts_move, "that its reader has"),
    (PassesOverUnsettled, {}, parts.parts_move, "the next reader"),
    (ForgetsOnClose, {"parts": True}, parts.parts_move, "does not open it"),
    (CannotReread, {}, parts.parts_move, "read again"),
    (ForgetsOnClose, {}, restarts.restart_keeps_messages, "lost with the restart"),
    (ForgetsAllOnClose, {}, restarts.restart_under_load, "accepted messages were lost"),
]


@pytest.mark.parametrize(
    ("kind", "claims", "check", "text"),
    PLANTED,
    ids=[
        f"{kind.__name__}{'-' if claims else ''}{'-'.join(claims)}-{check.__name__}"
        for kind, claims, check, _ in PLANTED
    ],
)
async def test_planted_fault_is_found(
    kind: type[MemoryBroker], claims: dict[str, Any], check: Check, text: str
) -> None:
    harness = Harness(kind, **claims)
    harness.patience_s = 0.05  # what is lost here is lost for good
    harness.tolerance_s = 0.2
    with pytest.raises((AssertionError, BrokerUnavailable), match=text):
        await run_check(harness, check)


CHECKS: list[Check] = [
    getattr(module, name.removeprefix("test_"))
    for name in vars(BrokerConformance)
    if name.startswith("test_")
    for module in GROUPS
    if name.removeprefix("test_") in vars(module)
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_same_harness_passes_a_sound_broker(check: Check) -> None:
    """So that a planted fault is found for itself, not for the harness."""
    await run_check(Harness(MemoryBroker), check)


@pytest.mark.parametrize(
    ("kind", "claims", "check"),
    [
        (IgnoresDelay, {"delay": False}, capabilities.delay),
        (IgnoresPriority, {"priority": False}, capabilities.priority),
        (IgnoresTtl, {"ttl": False}, capabilities.ttl),
        (LastInFirstOut, {"ordered": False}, capabilities.ordered),
        (LastInFirstOut, {"ordered": False}, capabilities.priority),
        (ReleaseDoesNothing, {"release": False}, settling.release),
        (ReleaseDoesNothing, {"release": False}, settling.mixed_settlements),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_an_honest_broker_that_can_do_less_passes(
    kind: type[MemoryBroker], claims: dict[str, Any], check: Check
) -> None:
    await run_check(Harness(kind, **claims), check)


def test_the_class_runs_every_check() -> None:
    public = {
        name
        for module in GROUPS
        for name, value in vars(module).items()
        if asyncio.iscoroutinefunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    tests = {n.removeprefix("test_") for n in vars(BrokerConformance) if n.startswith("test_")}
    assert tests == public
    assert len(CHECKS) == len(public)


def test_every_check_has_a_planted_fault() -> None:
    found = {check.__name__ for _, _, check, _ in PLANTED}
    assert {check.__name__ for check in CHECKS} == found


async def test_what_an_author_left_out_is_named() -> None:
    class Bare(BrokerHarness):
        async def make_broker(self) -> Broker:
            return MemoryBroker()

    with pytest.raises(SkipTest, match="second_client"):
        await run_check(Bare(), lifecycle.second_client)
    with pytest.raises(SkipTest, match="durability `none`"):
        await run_check(Bare(), restarts.restart_under_load)
    with pytest.raises(NotImplementedError, match="make_broker"):
        await run_check(BrokerHarness(), transport.round_trip)
