"""Two apps with different handlers on one queue, in one process."""

from __future__ import annotations

from ackbone.engine.context import Context
from tests.integration.lab import Lab


async def test_conversations_of_another_app_hold_up_nobody(one_file: Lab) -> None:
    """More of them wait for a worker that is busy than this worker has slots."""
    left, right = await one_file.open(worker={"slots": 1}), await one_file.open()
    right.on("right")(nothing)
    left.on("left")(nothing)
    busy = await one_file.start(right)
    busy.pause()
    waiting = [await left.send("right", ordering_key=f"talk-{n}") for n in range(3)]
    await one_file.start(left)
    for each in waiting:
        await one_file.becomes(each.id, "ready")
    mine = await left.send("left", ordering_key="talk-mine")
    assert await one_file.ends(mine.id) == ["succeeded"]
    assert {one_file.status(each.id) for each in waiting} == {"ready"}
    busy.resume()
    assert await one_file.ends(*(each.id for each in waiting)) == ["succeeded"] * 3


async def test_a_message_for_all_types_is_not_parked(one_file: Lab) -> None:
    """The worker with a handler for `*` is busy; the other one leaves the message to it."""
    some, every = await one_file.open(), await one_file.open()
    some.on("known")(nothing)
    every.on("*")(nothing)
    busy = await one_file.start(every)
    busy.pause()
    await one_file.start(some)
    unknown = await some.send("unknown")
    await one_file.becomes(unknown.id, "ready")
    busy.resume()
    assert await one_file.ends(unknown.id) == ["succeeded"]
    assert "task.parked" not in one_file.kinds(unknown.id)


async def nothing(ctx: Context) -> None:
    return None
