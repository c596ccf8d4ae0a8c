"""Several replies in one call: what a carrier merges, and what becomes of each of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from ackbone.core.errors import FinalError, SendUnknown, StoreUnavailable, TemporaryError
from ackbone.core.outbound.delivery import MERGE_MOST, Limit, New, Outbound
from ackbone.delivery.attempts import Policy
from tests.unit.test_carrier import Act, Desk, Script, desk

__all__ = ["desk"]

LONGEST = 60


class Merging(Script):
    """Sends what waits in one line, if that is not too long."""

    def __init__(self, *acts: Act | Exception | None, merges: bool = True) -> None:
        super().__init__("chat", *acts)
        self.merges = merges

    def merged(self, replies: Sequence[Outbound]) -> Outbound | None:
        content = "+".join(reply.content for reply in replies)
        return replace(replies[0], content=content) if len(content) <= LONGEST else None

    @property
    def texts(self) -> list[str]:
        return [call.content for call in self.calls]


class Knowing(Merging):
    async def arrived(self, reply: Outbound) -> bool | None:
        return None


async def put_all(desk: Desk, names: str, **fields: Any) -> None:
    for name in names:
        await desk.put(name, **fields)


async def test_what_waits_goes_by_one_call(desk: Desk) -> None:
    channel = Merging()
    await put_all(desk, "abc")
    await desk.put("bob", recipient="bob")
    desk.carry(channel)
    rows = [await desk.ends(name) for name in "abc"]
    await desk.ends("bob")
    assert sorted(channel.texts) == ["a+b+c", "bob"]
    (merged,) = (call for call in channel.calls if call.content == "a+b+c")
    assert merged.id == "a"
    receipts = [json.loads(row["receipts"]) for row in rows]
    assert receipts == [receipts[0]] * 3
    assert [(row["calls"], row["retry_count"]) for row in rows] == [(1, 0)] * 3


async def test_it_does_not_wait_for_more(desk: Desk) -> None:
    """What comes while a call is under way goes by the next."""
    go = asyncio.Event()

    async def wait(reply: Outbound) -> str:
        await go.wait()
        return "late"

    channel = Merging(wait)
    desk.carry(channel)
    await desk.put("a")
    await channel.called.wait_for(lambda _: True, timeout=30)
    await put_all(desk, "bcd")
    go.set()
    await desk.ends("d")
    assert channel.texts == ["a", "b+c+d"]


async def test_at_most_so_many_and_so_long(desk: Desk) -> None:
    channel = Merging()
    names = [f"{n:02}" for n in range(MERGE_MOST + 2)]
    for name in names:
        await desk.put(name)
    await desk.put("y" * 55)
    await desk.put("z" * 55)
    desk.carry(channel)
    await desk.ends("z" * 55)
    assert channel.texts == ["+".join(names[:MERGE_MOST]), "20+21", "y" * 55, "z" * 55]


async def test_only_who_wants_to_merges(desk: Desk) -> None:
    channel = Merging(merges=False)
    await put_all(desk, "abc")
    desk.carry(channel)
    await desk.ends("c")
    assert channel.texts == ["a", "b", "c"]


async def test_who_can_be_asked_what_arrived_does_not_merge(desk: Desk) -> None:
    channel = Knowing()
    await put_all(desk, "ab")
    desk.carry(channel)
    await desk.ends("b")
    assert channel.texts == ["a", "b"]


async def test_options_go_alone(desk: Desk) -> None:
    channel = Merging()
    await desk.put("a", options={"silent": True})
    await put_all(desk, "bc")
    await desk.put("d", options={"silent": True})
    await desk.put("e")
    desk.carry(channel)
    await desk.ends("e")
    assert channel.texts == ["a", "b+c", "d", "e"]


async def test_one_slot_of_the_limits(desk: Desk) -> None:
    class Slow(Merging):
        def limits(self, reply: Outbound) -> Sequence[Limit]:
            return (Limit("bot", 2, 3600.0, whole_channel=True),)

    channel = Slow()
    await put_all(desk, "abc")
    carrier = desk.carry(channel)
    await desk.ends("c")
    await desk.deliveries.put(  # in one go: alone, the first of them would have the last slot
        [New(id=name, channel="chat", recipient="ann", content=name) for name in "de"]
    )
    await desk.ends("e")
    assert channel.texts == ["a+b+c", "d+e"]
    async with asyncio.timeout(30):
        while not carrier.is_idle:  # noqa: ASYNC110 - it takes a last look at what waits
            await asyncio.sleep(0)


async def test_a_bad_text_takes_no_neighbour_with_it(desk: Desk) -> None:
    def refuse(reply: Outbound) -> str:
        if "x" in reply.content:
            raise FinalError("bad text")
        return "ok"

    channel = Merging(*[refuse] * 9)
    await put_all(desk, "abxc")
    desk.carry(channel)
    await desk.ends("c")
    row = await desk.ends("x", status="failed")
    assert channel.texts == ["a+b+x+c", "a", "b", "x", "c"]
    assert row["last_error"] == "bad text"
    assert [(await desk.row(name))["retry_count"] for name in "abxc"] == [0, 0, 0, 0]


async def test_a_failure_costs_each_an_attempt_and_then_they_go_alone(desk: Desk) -> None:
    channel = Merging(TemporaryError("away"))
    await put_all(desk, "abc")
    desk.carry(channel)
    rows = [await desk.ends(name) for name in "abc"]
    assert channel.texts == ["a+b+c", "a", "b", "c"]
    assert [(row["retry_count"], row["calls"]) for row in rows] == [(1, 2)] * 3
    assert not any(call.in_doubt for call in channel.calls)


async def test_each_has_its_own_last_attempt(desk: Desk) -> None:
    channel = Merging(TemporaryError("away"))
    await desk.put("a", max_retries=0)
    await desk.put("b")
    desk.carry(channel)
    await desk.ends("b")
    assert (await desk.row("a"))["last_error"] == "away; given up after 1 attempts"


async def test_no_answer_leaves_all_of_them_in_doubt(desk: Desk) -> None:
    channel = Merging(SendUnknown("timeout"))
    await put_all(desk, "ab")
    desk.carry(channel)
    rows = [await desk.ends(name) for name in "ab"]
    assert [(call.content, call.in_doubt) for call in channel.calls[1:]] == [
        ("a", True),
        ("b", True),
    ]
    assert [row["resent"] for row in rows] == [1, 1]


async def test_all_that_may_have_arrived_are_held(desk: Desk) -> None:
    channel = Merging(SendUnknown("timeout"))
    await put_all(desk, "ab")
    desk.carry(channel, policy=Policy(wait_scale=0.0, hold_unknown=True))
    for name in "ab":
        await desk.ends(name, status="unknown")
    assert len(channel.calls) == 1


async def test_a_head_goes_whatever_is_wrong_behind_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> Sequence[Outbound]:
        raise StoreUnavailable("away")

    monkeypatch.setattr(desk.deliveries, "follow", away)
    channel = Merging()
    await put_all(desk, "ab")
    desk.carry(channel)
    await desk.ends("b")
    assert channel.texts == ["a", "b"]
