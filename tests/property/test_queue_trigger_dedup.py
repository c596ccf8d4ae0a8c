"""Properties 15 to 17 and 20: idempotency, its window, its count, and tenants."""

from collections import Counter

from hypothesis import strategies as st

from ackbone import RawMessage
from ackbone.testing import FakeClock
from tests.property.trigger_lab import (
    World,
    ids,
    message,
    queue_property,
    tenants,
    words,
)

keyed = st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=14)
"""By header or by the message's own id, and which key."""


def copies(batch: list[tuple[bool, int]]) -> tuple[list[RawMessage], int]:
    """Messages, and how many different ones of them there are."""
    raws, different = [], set()
    for n, (by_header, key) in enumerate(batch):
        if by_header:
            raws.append(message(f"m{n}", b"1", {"x-dedup-key": f"key-{key}"}))
        else:
            raws.append(message(f"id-{key}", b"1"))
        different.add((by_header, key))
    return raws, len(different)


@queue_property(
    15,
    "for any idempotency key (dedup_key or message_id), any number of messages with it start one"
    " agent run; the later ones are skipped and acknowledged",
    batch=keyed,
    concurrency=st.integers(1, 4),
    fails=st.integers(0, 1),
)
async def test_property_15_idempotency(
    batch: list[tuple[bool, int]], concurrency: int, fails: int
) -> None:
    world = World(concurrency=concurrency, retry_backoff_base=0.001)
    raws, different = copies(batch)
    world.runtime.fail(RuntimeError("the key must stay taken over a retry"), times=fails)
    world.put(*raws)
    async with world:
        await world.settled(len(raws))
        # Later, when the first ones are done: still the same.
        world.put(*(message(f"late-{r.message_id}", r.body, r.headers) for r in raws if r.headers))
        late = sum(1 for r in raws if r.headers)
        await world.settled(len(raws) + late)
        statuses = Counter(s for (s,) in world.rows("SELECT status FROM queue_executions"))
    assert len(world.runtime.finished.seen) == statuses["succeeded"] == different
    acked = Counter(world.adapter.get_acked())
    expected = Counter(r.message_id for r in raws)
    expected.update(f"late-{r.message_id}" for r in raws if r.headers)
    assert acked == expected
    assert world.adapter.get_nacked() == []
    assert world.adapter.get_dlq() == []


@queue_property(
    16,
    "for any configured idempotency window, a key is held for that long and may run again after it",
    window=st.integers(1, 7200),
    key=ids,
    rounds=st.integers(1, 3),
)
async def test_property_16_window(window: int, key: str, rounds: int) -> None:
    clock = FakeClock()
    world = World(clock=clock, idempotency_window=window)
    async with world:
        for n in range(rounds):
            world.put(message(f"first-{n}", headers={"x-dedup-key": key}))
            await world.settled(3 * n + 1)
            assert world.runs()[-1] == f"first-{n}", "the window is over: it runs again"
            world.put(message(f"at-once-{n}", headers={"x-dedup-key": key}))
            await world.settled(3 * n + 2)
            clock.advance(window - 0.001)
            world.put(message(f"in-time-{n}", headers={"x-dedup-key": key}))
            await world.settled(3 * n + 3)
            clock.advance(0.002)
    assert world.runs() == [f"first-{n}" for n in range(rounds)]
    assert len(world.adapter.get_acked()) == 3 * rounds


@queue_property(
    17,
    "every message that is deduplicated raises the counter of dedup hits, and asking for it returns"
    " their exact number",
    batch=keyed,
    concurrency=st.integers(1, 4),
    enable_dedup=st.booleans(),
)
async def test_property_17_dedup_count(
    batch: list[tuple[bool, int]], concurrency: int, enable_dedup: bool
) -> None:
    world = World(concurrency=concurrency, enable_dedup=enable_dedup)
    raws, different = copies(batch)
    if not enable_dedup:  # then only the identity of a message is known again
        different = len({raw.message_id for raw in raws})
    world.put(*raws)
    async with world:
        await world.settled(len(raws))
    hits = world.trigger.metrics.read("queue_dedup_hits_total", queue="orders")
    assert hits == len(raws) - different
    assert len(world.runs()) == different
    assert world.trigger.metrics.read("queue_dedup_hits_total", queue="another") == 0


@queue_property(
    20,
    "any message with a tenant_id runs under it, and messages of different tenants are kept apart",
    batch=st.lists(
        st.tuples(st.none() | tenants, words, st.booleans()), max_size=10, unique_by=lambda m: m[:2]
    ),
)
async def test_property_20_tenants(batch: list[tuple[str | None, str, bool]]) -> None:
    world = World()
    for n, (tenant, key, by_header) in enumerate(batch):
        headers = {} if tenant is None else {"x-tenant-id": tenant}
        if by_header:
            world.put(message(f"m{n}", headers={**headers, "x-dedup-key": key}))
        else:
            world.put(message(f"id-{key}", headers=headers))
    async with world:
        await world.settled(len(batch))
        rows = world.rows("SELECT tenant_id, message_id, status FROM queue_executions")
        told = world.rows("SELECT tenant_id, task_id FROM event_log WHERE task_id <> ''")
    expected = Counter(
        (tenant, f"m{n}" if by_header else f"id-{key}")
        for n, (tenant, key, by_header) in enumerate(batch)
    )
    # The same key or id under another tenant is another message. No header, or the name of the
    # default one: the same tenant.
    stored = {(tenant or "default", i) for tenant, i in expected}
    ran = Counter((e.tenant_id, e.message_id) for e in world.runtime.get_triggered_events())
    assert set(ran) <= set(expected)
    if len({(t or "default", k) for t, k, _ in batch}) == len(batch):
        assert ran == expected
        assert {(t, i) for t, i, status in rows if status == "succeeded"} == stored
        recorded = Counter((r["tenant_id"], r["message_id"]) for r in world.ledger.get_records())
        assert recorded == expected
    assert {(t, i) for t, i in told} == stored
