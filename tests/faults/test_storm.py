"""Duplicate storm: many copies of each key from many producers at once, one run for each key."""

import subprocess
import sys

import pytest

from tests.faults.checker import Sent
from tests.faults.conftest import MakeFleet, on_every_broker

pytestmark = pytest.mark.xdist_group("faults-2")

PRODUCER = """
import asyncio, random, sys
from ackbone.app import App
async def main(producer, keys, copies, seed):
    app = App(name="producer")
    orders = [(key, copy) for key in range(keys) for copy in range(copies)]
    random.Random(seed + producer).shuffle(orders)
    async with app:
        async def send(key, copy):
            receipt = await app.send(
                "work", {"seconds": 0.01}, id=f"m-{producer}-{key}-{copy}",
                idempotency_key=f"key-{key}",
            )
            print(receipt.id, flush=False)
        for start in range(0, len(orders), 100):
            await asyncio.gather(*(send(*order) for order in orders[start:start + 100]))
asyncio.run(main(*map(int, sys.argv[1:])))
"""


@on_every_broker(soak=True)
def test_duplicate_storm(make_fleet: MakeFleet, soak: bool) -> None:
    fleet = make_fleet(WORKER__SLOTS=50)
    keys, copies, producers = 2_000 if soak else 300, 20, 10
    fleet.start(2)
    each = copies // producers
    sending = [
        subprocess.Popen(
            [sys.executable, "-c", PRODUCER, *map(str, (n, keys, each, fleet.seed))],
            env=fleet.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(producers)
    ]
    for producer in sending:
        output, _ = producer.communicate(timeout=600)
        assert producer.returncode == 0
        for message_id in output.split():
            key = f"key-{message_id.split('-')[2]}"
            fleet.sent.append(Sent(id=message_id, key=key))
    assert len(fleet.sent) == keys * copies
    fleet.wait_until_final()
    report = fleet.check(replies_per_run=1)
    assert report.ends == {"task.succeeded": keys, "task.duplicate": keys * (copies - 1)}
    assert report.effects == keys, "one run for each key, and not one more"
    answers = fleet.rows(
        "SELECT idem_key, count(DISTINCT result), count(*) FROM queue_executions GROUP BY 1"
    )
    assert len(answers) == keys
    assert {(kinds, n) for _, kinds, n in answers} == {(1, copies)}, "every copy got the one result"
