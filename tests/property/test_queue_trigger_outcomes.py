"""Properties 10 to 14: governance, ack policies, retries, dead letters and their logs."""

import json
import re
from typing import Any

from hypothesis import strategies as st

from ackbone.core import events
from ackbone.testing import FakeClock
from tests.property.trigger_lab import (
    PATIENCE_S,
    POLICIES,
    Lines,
    World,
    ids,
    message,
    printable,
    queue_property,
    tenants,
    words,
)

policies = st.sampled_from(POLICIES)


@queue_property(
    10,
    "every message is checked by the governance layer before it runs; a rejected one is handled by"
    " the ack_policy, and the reason is recorded",
    policy=policies,
    batch=st.lists(
        st.tuples(
            ids,
            st.none() | tenants,
            st.none() | st.tuples(printable, st.lists(words, max_size=3)),
        ),
        max_size=6,
        unique_by=lambda m: m[0],
    ),
)
async def test_property_10_governance(
    policy: str, batch: list[tuple[str, str | None, tuple[str, list[str]] | None]]
) -> None:
    world = World(ack_policy=policy)
    for i, tenant, denied in batch:
        world.put(message(i, headers={} if tenant is None else {"x-tenant-id": tenant}))
        if denied is not None:
            world.governance.deny(denied[0], denied[1], message_id=i)
    async with world:
        await world.settled(len(batch))
        statuses = world.rows("SELECT status FROM queue_executions")
    asked = {context["message_id"]: context for context in world.governance.checks}
    assert asked == {
        i: {"source": "queue_trigger", "queue": "orders", "message_id": i, "tenant_id": tenant}
        for i, tenant, _ in batch
    }
    rejected = {i: denied for i, _, denied in batch if denied is not None}
    allowed = {i for i, _, denied in batch if denied is None}
    assert sorted(world.runs()) == sorted(allowed)
    assert statuses.count(("rejected",)) == len(rejected)
    recorded = {r["message_id"]: r for r in world.ledger.get_records() if r["status"] == "rejected"}
    assert {i: (r["reason"], r["policies"]) for i, r in recorded.items()} == rejected
    buried = {raw.message_id: reason for raw, reason in world.adapter.get_dlq()}
    if policy == "dlq":
        assert set(buried) == set(rejected)
        assert sorted(world.adapter.get_acked()) == sorted(allowed)
    else:
        assert buried == {}
        assert sorted(world.adapter.get_acked()) == sorted(i for i, *_ in batch)
    assert world.adapter.get_nacked() == []


outcomes = st.sampled_from(["good", "failed", "broken"])


@queue_property(
    11,
    "for any configured ack policy (ack, nack, requeue, dlq) the matching confirmation follows"
    " success or failure, as the policy says",
    policy=policies,
    plan=st.lists(outcomes, max_size=8),
)
async def test_property_11_ack_policy(policy: str, plan: list[str]) -> None:
    world = World(ack_policy=policy, max_retries=0)
    found: dict[str, list[str]] = {kind: [] for kind in ("good", "failed", "broken")}
    for n, kind in enumerate(plan):
        found[kind].append(f"m{n}")
        world.put(message(f"m{n}", b"{" if kind == "broken" else b"{}"))
        if kind == "failed":
            world.runtime.fail(RuntimeError("no"), message_id=f"m{n}")
    good, failed, broken = found["good"], found["failed"], found["broken"]
    # A message that is put back comes again, once, and is known then.
    words_to_queue = len(plan) + (len(failed) if policy == "requeue" else 0)
    async with world:
        await world.settled(words_to_queue)
        await world.calm()
        letters = world.rows("SELECT message_id FROM dead_letters")
    acked, nacked = sorted(world.adapter.get_acked()), sorted(world.adapter.get_nacked())
    buried = sorted(raw.message_id for raw, _ in world.adapter.get_dlq())
    expected = {
        "ack": (good + failed, [], broken),
        "nack": (good, failed, broken),
        "requeue": (good + failed, failed, broken),
        "dlq": (good, [], failed + broken),
    }[policy]
    assert (acked, nacked, buried) == tuple(sorted(part) for part in expected)
    assert world.adapter.waiting == 0
    assert sorted(world.runs()) == sorted(good + failed)  # none ran a second time
    assert sorted(i for (i,) in letters) == sorted(failed + broken)  # kept, whatever the policy


async def retried(world: World, attempt: int) -> None:
    """The failure of this attempt is committed."""

    def tells(entry: events.Entry) -> bool:
        return entry[3] == events.RETRIED and bool(entry[4]["attempt"] == attempt)

    await world.store.told.wait_for(tells, timeout=PATIENCE_S, what=f"retry after {attempt}")


@queue_property(
    12,
    "any failure that may be retried is retried by the configured policy (max_retries,"
    " backoff_base, backoff_multiplier), with exponentially growing waits",
    max_retries=st.integers(0, 4),
    base=st.floats(0.1, 2.0),
    multiplier=st.floats(1.0, 3.0),
    fails=st.integers(0, 6),
)
async def test_property_12_retries(
    max_retries: int, base: float, multiplier: float, fails: int
) -> None:
    clock = FakeClock()
    world = World(
        clock=clock,
        max_retries=max_retries,
        retry_backoff_base=base,
        retry_backoff_multiplier=multiplier,
        ack_policy="dlq",
    )
    world.runtime.fail(RuntimeError("again"), times=fails)
    world.put(message("m"))
    retries = min(fails, max_retries)
    async with world:
        for n in range(retries):
            await retried(world, n + 1)
            ((due,),) = world.rows("SELECT due_at FROM queue_executions")
            assert due - clock.now_us() == int(base * multiplier**n * 1e6)
            clock.advance((due - clock.now_us() - 1) / 1e6)
            await world.store.look()
            assert len(world.runs()) == n + 1, "it ran before its time"
            clock.advance(1e-6)
            await world.runtime.events.wait(n + 2, timeout=PATIENCE_S)
        await world.settled(1)
        assert len(world.runs()) == retries + 1
    exhausted = fails > max_retries
    assert world.adapter.get_acked() == ([] if exhausted else ["m"])
    assert len(world.adapter.get_dlq()) == int(exhausted)


@queue_property(
    13,
    "any message whose retries are exhausted goes to the dead-letter queue, with the reason and the"
    " history of its retries",
    policy=policies,
    max_retries=st.integers(0, 3),
    batch=st.lists(st.tuples(st.integers(0, 5), printable), max_size=5),
)
async def test_property_13_dead_letters(
    policy: str, max_retries: int, batch: list[tuple[int, str]]
) -> None:
    world = World(
        ack_policy=policy, max_retries=max_retries, retry_backoff_base=1e-6, concurrency=3
    )
    dead: dict[str, list[str]] = {}
    for n, (fails, why) in enumerate(batch):
        world.put(message(f"m{n}", json.dumps(n).encode()))
        for attempt in range(fails):
            world.runtime.fail(RuntimeError(f"why {attempt}: {why}"), message_id=f"m{n}")
        if fails > max_retries:
            dead[f"m{n}"] = [f"RuntimeError: why {a}: {why}" for a in range(max_retries + 1)]
    again = len(dead) if policy == "requeue" else 0
    async with world:
        await world.settled(len(batch) + again)
        letters = world.rows("SELECT message_id, reason, error, history, body FROM dead_letters")
    kept = {letter[0]: letter[1:] for letter in letters}
    assert set(kept) == set(dead)
    for i, errors in dead.items():
        reason, error, history, body = kept[i]
        assert (reason, body) == ("retries_exhausted", i[1:].encode())
        assert same(error, errors[-1])
        assert_history(json.loads(history), errors)
    buried = {raw.message_id: (raw, reason) for raw, reason in world.adapter.get_dlq()}
    assert set(buried) == (set(dead) if policy == "dlq" else set())
    for i, (raw, reason) in buried.items():
        assert same(reason, dead[i][-1])
        assert_history(raw.metadata["retry_history"], dead[i])


def same(found: str, said: str) -> bool:
    """What was said, save that what looks like a credential is masked."""
    pattern = ".*".join(map(re.escape, found.split("***")))
    return re.fullmatch(pattern, said.strip(), re.DOTALL) is not None


def assert_history(history: list[dict[str, Any]], errors: list[str]) -> None:
    assert [entry["attempt"] for entry in history] == list(range(1, len(errors) + 1))
    assert all(same(h["error"], e) for h, e in zip(history, errors, strict=True))
    times = [entry["at"] for entry in history]
    assert times == sorted(times)


@queue_property(
    14,
    "for any message that is retried, the number, time and cause of each attempt are logged, and"
    " the log holds the whole history",
    max_retries=st.integers(0, 3),
    plan=st.lists(st.integers(0, 4), max_size=5),
)
async def test_property_14_retry_log(max_retries: int, plan: list[int]) -> None:
    world = World(max_retries=max_retries, retry_backoff_base=1e-6, concurrency=2)
    for n, fails in enumerate(plan):
        world.put(message(f"m{n}"))
        for attempt in range(fails):
            world.runtime.fail(RuntimeError(f"cause {attempt + 1}"), message_id=f"m{n}")
    with Lines() as lines:
        async with world:
            await world.settled(len(plan))
            ledger = world.rows(
                "SELECT task_id, data FROM event_log WHERE event_type = ?", events.RETRIED
            )
    said: dict[str, list[tuple[int, int, str]]] = {}
    for record in lines.records:
        told = re.match(
            r"message (\S+): attempt (\d+) of (\d+) of \S+ failed: RuntimeError: (cause \d+)",
            record.getMessage(),
        )
        if told:
            assert record.created > 0
            assert record.trace_id == f"queue-{told[1]}"  # type: ignore[attr-defined]
            said.setdefault(told[1], []).append((int(told[2]), int(told[3]), told[4]))
    for n, fails in enumerate(plan):
        attempts = min(fails, max_retries + 1)
        expected = [(a, max_retries + 1, f"cause {a}") for a in range(1, attempts + 1)]
        assert said.get(f"m{n}", []) == expected
        retried = [json.loads(data) for task, data in ledger if task == f"m{n}"]
        assert [(r["attempt"], r["error"]) for r in retried] == [
            (a, f"RuntimeError: cause {a}") for a in range(1, min(fails, max_retries) + 1)
        ]
