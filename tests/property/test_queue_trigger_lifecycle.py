"""Properties 5 to 7, 22 and 24: settings, states, errors, health and stopping."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import strategies as st

from ackbone import FinalError, MockQueueAdapter, TemporaryError
from tests.property.trigger_lab import (
    PATIENCE_S,
    Lines,
    World,
    any_text,
    fresh_folder,
    message,
    queue_property,
    words,
)

KEYS = {"status", "running", "adapter_healthy", "active_workers"}


class SickAdapter(MockQueueAdapter):
    """A queue whose connection can be lost, and whose health check can break."""

    ill: bool | Exception = False

    async def health_check(self) -> bool:
        if isinstance(self.ill, Exception):
            raise self.ill
        return await super().health_check() and not self.ill


@queue_property(
    5,
    "for any valid configuration (queue_name, consumer_group, concurrency, ack_policy, …) the"
    " trigger runs by it, and its parameters take effect",
    queue=words,
    group=words,
    concurrency=st.integers(1, 5),
    waiting=st.integers(1, 8),
    max_retries=st.integers(0, 2),
    enable_dedup=st.booleans(),
    focus=st.none() | any_text,
)
async def test_property_05_settings_take_effect(
    queue: str,
    group: str,
    concurrency: int,
    waiting: int,
    max_retries: int,
    enable_dedup: bool,
    focus: str | None,
) -> None:
    world = World(
        queue_name=queue,
        consumer_group=group,
        concurrency=concurrency,
        max_retries=max_retries,
        retry_backoff_base=0.001,
        enable_dedup=enable_dedup,
        focus=focus,
        parser_type="text",
        ack_policy="nack",
    )
    gate = world.runtime.block()
    world.put(*(message(f"m{n}", b"{", {"x-dedup-key": "same"}) for n in range(waiting)))
    distinct = 1 if enable_dedup else waiting
    async with world:
        at_once = min(concurrency, distinct)
        await world.runtime.events.wait(at_once, timeout=PATIENCE_S)
        health = await world.trigger.health_check()
        assert health["active_workers"] == concurrency
        gate.set()
        await world.settled(waiting)
        world.runtime.gate = None
        world.runtime.fail(RuntimeError("no"), times=max_retries + 1)
        world.put(message("fails", b"{"))
        await world.settled(waiting + 1)
        subscriptions = world.rows("SELECT DISTINCT subscription, queue_name FROM queue_executions")
    assert world.runtime.most_running == at_once
    assert world.adapter.get_nacked() == ["fails"]
    assert world.runs().count("fails") == max_retries + 1
    assert len(set(world.runs()) - {"fails"}) == distinct
    for event in world.runtime.get_triggered_events():
        assert (event.focus, event.context["source"]) == (focus, queue)
        assert event.context["message"] == "{"
    assert subscriptions == [(f"{queue}/{group}", queue)]


operations = st.lists(
    st.sampled_from(["start", "pause", "resume", "stop", "message"]), min_size=4, max_size=12
)


@queue_property(
    6,
    "for any trigger, start, pause, resume and stop change its state correctly, and asking for it"
    " returns the current one",
    operations=operations | operations.map(lambda found: ["start", *found]),
)
async def test_property_06_states(operations: list[str]) -> None:
    world = World()
    state, sent, ran = "stopped", 0, 0
    for operation in operations:
        if operation == "message":
            world.put(message(f"m{sent}"))
            sent += 1
            if state == "running":
                await world.settled(sent)
        elif operation == "start":
            if state == "stopped":
                await world.trigger.start()
                state = "running"
                await world.settled(sent)
            else:
                with pytest.raises(RuntimeError, match="Trigger is already running"):
                    await world.trigger.start()
        elif operation == "stop":
            await world.trigger.stop()
            state = "stopped"
        else:
            await getattr(world.trigger, operation)()
            if state == "running" and operation == "pause":
                state = "paused"
            elif state == "paused" and operation == "resume":
                state = "running"
                await world.settled(sent)
        health = await world.trigger.health_check()
        assert health["running"] is (state == "running")
        assert health["adapter_healthy"] is (state != "stopped")
        expected = {"running": "healthy", "paused": "paused", "stopped": "unhealthy"}
        assert health["status"] == expected[state]
        if state == "paused":
            await world.calm()
            assert len(world.runs()) == ran
        ran = len(world.runs())
    if state == "paused":  # resumable, and nothing of what waits was lost
        await world.trigger.resume()
        await world.settled(sent)
    await world.trigger.stop()
    assert len(world.runs()) == len(set(world.runs()))
    assert len(world.runs()) + world.adapter.waiting == sent
    await world.close()


errors = st.sampled_from(
    [
        RuntimeError("boom"),
        ValueError("x" * 5000),
        KeyError(),
        TimeoutError(),
        FinalError("never"),
        TemporaryError("later", retry_after_s=0.001),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        Exception("\ud800 \0"),
        asyncio.CancelledError(),
        SystemExit(3),
        RecursionError(),
    ]
)


@queue_property(
    7,
    "for any error while a message is processed, it is logged and the next messages are processed;"
    " one failing message never stops the consumption",
    plan=st.lists(st.none() | errors, min_size=1, max_size=8),
)
async def test_property_07_errors_stop_nobody(plan: list[BaseException | None]) -> None:
    world = World(max_retries=0, concurrency=2)
    for n, error in enumerate(plan):
        world.put(message(f"m{n}"))
        if error is not None:
            world.runtime.fail(error, message_id=f"m{n}")
    with Lines() as lines:
        async with world:
            await world.settled(len(plan))
            assert (await world.trigger.health_check())["status"] == "healthy"
            world.put(message("last"))
            await world.settled(len(plan) + 1)
            statuses = dict(world.rows("SELECT message_id, status FROM queue_executions"))
    for n, error in enumerate(plan):
        assert statuses[f"m{n}"] == ("succeeded" if error is None else "failed")
        if error is not None:
            said = [
                r for r in lines.records if r.levelname == "WARNING" and f"m{n}" in r.getMessage()
            ]
            assert said, f"nothing was logged of {error!r}"
    assert statuses["last"] == "succeeded"
    assert len(world.runs()) == len(plan) + 1


moments = st.lists(
    st.one_of(
        st.sampled_from(["start", "pause", "resume", "stop", "message", "release"]),
        st.sampled_from([False, True, OSError("gone")]),
    ),
    min_size=4,
    max_size=12,
).map(lambda found: ["start", *found])


@queue_property(
    22,
    "at any moment the health check returns the current state (running, adapter_healthy,"
    " active_workers), as it really is",
    moments=moments,
    concurrency=st.integers(1, 3),
)
async def test_property_22_health(moments: list[Any], concurrency: int) -> None:
    adapter = SickAdapter()
    world = World(adapter=adapter, concurrency=concurrency, shutdown_timeout_s=0.0)
    world.runtime.block()
    state = "stopped"
    sent = begun = 0
    for moment in moments:
        if moment == "message":
            world.put(message(f"m{sent}"))
            sent += 1
        elif moment == "release":
            assert world.runtime.gate is not None
            world.runtime.gate.set()
            await world.settled(begun)
            world.runtime.block()
        elif isinstance(moment, str):
            if moment != "start" or state == "stopped":
                await getattr(world.trigger, moment)()
            if moment == "stop":
                break  # what ran was handed back: the count of begun ones starts anew
            changes = {
                ("stopped", "start"): "running",
                ("running", "pause"): "paused",
                ("paused", "resume"): "running",
            }
            state = changes.get((state, moment), state)
        else:
            adapter.ill = moment
        if state == "running":
            begun = min(sent, begun + concurrency - world.runtime.running)
            await world.runtime.events.wait(begun, timeout=PATIENCE_S) if begun else None
        health = await world.trigger.health_check()
        assert set(health) == KEYS
        healthy = state != "stopped" and adapter.ill is False
        assert health["adapter_healthy"] is healthy
        assert health["running"] is (state == "running")
        if state == "paused":
            assert health["status"] == "paused"
            assert health["active_workers"] == world.runtime.running
        else:
            running = state == "running"
            assert health["status"] == ("healthy" if running and healthy else "unhealthy")
            assert health["active_workers"] == (concurrency if running else 0)
    await world.trigger.stop()
    health = await world.trigger.health_check()
    assert (health["running"], health["active_workers"]) == (False, 0)
    await world.close()


@queue_property(
    24,
    "for any running trigger, stop waits for the messages that are being processed, then lets go of"
    " all connections; none of them is lost",
    count=st.integers(0, 8),
    concurrency=st.integers(1, 4),
    in_time=st.booleans(),
    fails=st.booleans(),
)
async def test_property_24_graceful_stop(
    count: int, concurrency: int, in_time: bool, fails: bool
) -> None:
    folder = fresh_folder()
    adapter = MockQueueAdapter()
    world = World(
        adapter=adapter,
        folder=folder,
        concurrency=concurrency,
        retry_backoff_base=3600.0,
        shutdown_timeout_s=PATIENCE_S if in_time else 0.0,
    )
    gate = world.runtime.block()
    if fails:
        world.runtime.fail(RuntimeError("later"), times=1)
    every = {f"m{n}" for n in range(count)}
    world.put(*(message(i, json.dumps(i).encode()) for i in sorted(every)))
    await world.trigger.start()
    begun = min(count, concurrency)
    if begun:
        await world.runtime.events.wait(begun, timeout=PATIENCE_S)
    stopping = asyncio.create_task(world.trigger.stop())
    if in_time:
        await asyncio.sleep(0)  # the stop has begun
        gate.set()
    await stopping
    assert not await adapter.health_check()
    assert world.runtime.running == 0
    acked = adapter.get_acked()
    finished = {e.message_id for e in world.runtime.finished.seen}
    assert sorted(acked) == sorted(finished)
    assert len(acked) == (begun - fails * min(1, begun) if in_time else 0)
    assert len(acked) + adapter.waiting == count  # the rest is back in the queue
    await world.store.close()

    second = World(adapter=adapter, folder=folder, concurrency=8, retry_backoff_base=0.001)
    before = len(adapter.get_acked()) + len(adapter.get_nacked()) + len(adapter.get_dlq())
    async with second:
        # What failed before the stop waits for its hour in the store, and is run by nobody else.
        waits = 1 if in_time and fails and begun else 0
        await second.settled(before + count - len(acked) - waits)
        assert sorted([*acked, *second.runs()]) == sorted(every - second_waiting(second))
        attempts = second.rows(
            "SELECT attempt FROM queue_executions WHERE status = 'succeeded' AND crashes = 0"
        )
        assert all(attempt == (1,) for attempt in attempts)  # being handed back spends none


def second_waiting(world: World) -> set[str]:
    return {
        i for (i,) in world.rows("SELECT message_id FROM queue_executions WHERE status = 'ready'")
    }
