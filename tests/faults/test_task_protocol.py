"""The acceptance criteria of the task protocol: real workers, a real Redis, a real PostgreSQL.

The orchestrator is a plain Redis client. It knows the streams, and nothing of ackbone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from redis import Redis

from tests.faults.conftest import VISIBILITY_S, MakeFleet
from tests.faults.harness import Fleet
from tests.servers.redis import RedisServer

pytestmark = [
    pytest.mark.xdist_group("faults-postgres"),
    pytest.mark.parametrize("broker", ["redis+postgres"], indirect=True),
]
TASKS, RESULTS, LETTERS, GROUP = "stream:task", "stream:result", "stream:dlq", "cg:workers"
MAX_RETRIES = 3


@pytest.fixture
def fleet(make_fleet: MakeFleet, redis_server: RedisServer) -> Fleet:
    broker = f"{redis_server.url}?visibility_timeout_s={VISIBILITY_S}"
    return make_fleet(DEFAULT_QUEUE=TASKS, TASKS__STREAM=TASKS, BROKER=broker)


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with Redis.from_url(redis_server.url, decode_responses=True) as client:
        yield client


def submit(client: Any, task_id: str, tool: str, payload: dict[str, Any], key: str = "") -> None:
    client.xadd(
        TASKS,
        {
            "task_id": task_id,
            "tool_name": tool,
            "payload": json.dumps(payload),
            "idempotency_key": key or f"key-{task_id}",
            "retry_count": "0",
        },
    )


def results_of(client: Any, task_id: str) -> list[dict[str, str]]:
    return [fields for _, fields in client.xrange(RESULTS) if fields["task_id"] == task_id]


def ends(client: Any, fleet: Fleet, task_id: str) -> dict[str, str]:
    """Its one result, once it is there."""
    (result,) = fleet.wait_for(partial(results_of, client, task_id), f"a result of {task_id}")
    return result


def pending(client: Any) -> int:
    return int(client.xpending(TASKS, GROUP)["pending"])


def holder(client: Any) -> tuple[str, str]:
    """The one entry that is pending, and its consumer."""
    (found,) = client.xpending_range(TASKS, GROUP, "-", "+", 10)
    assert found["consumer"] in {each["name"] for each in client.xinfo_consumers(TASKS, GROUP)}
    return found["message_id"], found["consumer"]


def nothing_is_pending(client: Any, fleet: Fleet) -> None:
    fleet.wait_for(lambda: pending(client) == 0, "every entry is acknowledged")


def timeline(fleet: Fleet, task_id: str) -> list[tuple[str, dict[str, Any]]]:
    found = fleet.rows(
        "SELECT event_type, data FROM event_log WHERE task_id = ? ORDER BY created_at, seq", task_id
    )
    return [(kind, data if isinstance(data, dict) else json.loads(data)) for kind, data in found]


def kinds(fleet: Fleet, task_id: str) -> list[str]:
    """Of the task itself: its reply is an event, too."""
    return [kind for kind, _ in timeline(fleet, task_id) if kind.startswith("task.")]


def test_a_task_that_succeeds(fleet: Fleet, client: Any) -> None:
    """1. created → claimed → succeeded, acknowledged, nothing pending."""
    fleet.start(2)
    submit(client, "t-1", "work", {"seconds": 0})
    result = ends(client, fleet, "t-1")
    assert result["status"] == "succeeded"
    assert set(json.loads(result["result"])) == {"pid"}
    nothing_is_pending(client, fleet)
    assert kinds(fleet, "t-1") == ["task.created", "task.claimed", "task.succeeded"]
    assert client.xlen(TASKS) == 0


def test_a_task_that_fails(fleet: Fleet, client: Any) -> None:
    """2. retried up to MAX_RETRIES, then a dead letter; every step is in the event log."""
    fleet.start(2)
    submit(client, "t-1", "work", {"fail": MAX_RETRIES + 1})
    result = ends(client, fleet, "t-1")
    assert (result["status"], result["retry_count"]) == ("failed", str(MAX_RETRIES + 1))
    letters = fleet.wait_for(lambda: client.xrange(LETTERS), "a dead letter")
    ((_, letter),) = letters
    assert {name: letter[name] for name in ("task_id", "tool_name", "retry_count")} == {
        "task_id": "t-1",
        "tool_name": "work",
        "retry_count": str(MAX_RETRIES + 1),
    }
    assert json.loads(letter["payload"]) == {"fail": MAX_RETRIES + 1}
    assert "fails as planned" in letter["error"]
    assert letter["failed_at"]
    nothing_is_pending(client, fleet)
    tried = ["task.claimed", "task.retried"] * MAX_RETRIES
    assert kinds(fleet, "t-1") == [
        "task.created",
        *tried,
        "task.claimed",
        "task.failed",
        "task.dlq",
    ]


def test_a_task_of_a_worker_that_was_killed(fleet: Fleet, client: Any) -> None:
    """3. pending with a dead worker, or for too long: reclaimed, and completed."""
    fleet.start(4)
    submit(client, "t-1", "work", {"seconds": 2})
    (victim,) = fleet.wait_for(fleet.busy, "the task runs")
    entry, first = holder(client)
    fleet.kill(fleet.process(victim.pid))
    assert holder(client) == (entry, first), "it stays pending with the dead"
    survivors = fleet.wait_for(fleet.busy, "another worker runs it")
    pending = client.xpending_range(TASKS, GROUP, "-", "+", 10)
    assert ends(client, fleet, "t-1")["status"] == "succeeded"
    nothing_is_pending(client, fleet)
    assert len(survivors) == 1
    # Three workers survived. The server itself says which of them took the entry. An entry that was
    # taken over before its worker was declared dead is adopted: then nothing is pending.
    steps = timeline(fleet, "t-1")
    (reclaimed,) = [data for kind, data in steps if kind == "task.reclaimed"]
    assert (reclaimed["original_consumer"], reclaimed["task_id"]) == (first, "t-1")
    assert first.endswith(f":{victim.pid}")
    assert reclaimed["new_consumer"].endswith(f":{survivors[0].pid}")
    for found in pending:
        assert (found["message_id"], found["consumer"]) == (entry, reclaimed["new_consumer"])
        assert reclaimed["message_id"] == entry
    assert kinds(fleet, "t-1") == [
        "task.created",
        "task.claimed",
        "task.lost",
        "task.reclaimed",
        "task.claimed",
        "task.succeeded",
    ]
    assert VISIBILITY_S <= 2, "or this waits for long"


def test_what_a_stranger_left_pending(fleet: Fleet, client: Any) -> None:
    """3., by the letter: the entry of a consumer that knows no store is taken by its age."""
    client.xgroup_create(TASKS, GROUP, "0", mkstream=True)
    submit(client, "t-1", "work", {"seconds": 0})
    client.xreadgroup(GROUP, "stranger", {TASKS: ">"})
    fleet.start()
    assert ends(client, fleet, "t-1")["status"] == "succeeded"
    nothing_is_pending(client, fleet)
    (reclaimed,) = [data for kind, data in timeline(fleet, "t-1") if kind == "task.reclaimed"]
    assert reclaimed["original_consumer"] == "stranger"


def copies(client: Any) -> set[str]:
    names = {f"copy-{n}" for n in range(10)}
    for name in names:
        submit(client, name, "work", {"seconds": 0}, key="the same")
    return names


def killed_after_the_effect(client: Any) -> set[str]:
    """The worker dies between its effect and its commit, twice."""
    payload = {"kills": 2, "at": "after", "policy": "park"}
    submit(client, "t-1", "effect", payload, key="the same")
    return {"t-1"}


@pytest.mark.parametrize("send", [copies, killed_after_the_effect], ids=["copies", "kills"])
def test_one_key_one_effect(fleet: Fleet, client: Any, send: Callable[[Any], set[str]]) -> None:
    """4. the same idempotency_key: what is done outside is done once."""
    fleet.start(2)
    wanted = send(client)

    def all_told() -> bool:
        fleet.replace_the_dead()
        return wanted <= {fields["task_id"] for _, fields in client.xrange(RESULTS)}

    fleet.wait_for(all_told, "every task is told of")
    told = [fields["status"] for _, fields in client.xrange(RESULTS)]
    assert told == ["succeeded"] * len(wanted)
    effects = fleet.oracle.effects()
    assert len(effects) == 1, effects
    nothing_is_pending(client, fleet)
