"""The carrier on a real store: what a channel does or raises decides what becomes of a reply."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ackbone.core.breaker import BreakerPolicy
from ackbone.core.errors import FinalError, RateLimited, SendUnknown, TemporaryError
from ackbone.core.events import Entry
from ackbone.core.outbound.delivery import Channel, Limit, New, Outbound, Taken
from ackbone.core.store import Worker
from ackbone.delivery.attempts import Policy
from ackbone.delivery.backoff import LONGEST_WAIT_S
from ackbone.delivery.carrier import Carried, Carrier
from ackbone.engine.relays import Relay, run_relay
from ackbone.store.operations import StoreOperations
from ackbone.store.sqlite.deliveries import SqliteDeliveries
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore
from ackbone.testing import Signal

Act = Callable[[Outbound], Any]
FAST = Policy(wait_scale=0.0, timeout_s=5.0)


class Script:
    """A channel that does as it is told, call by call; then it takes everything."""

    def __init__(self, name: str = "chat", *acts: Act | Exception | None) -> None:
        self.name = name
        self.acts = list(acts)
        self.calls: list[Outbound] = []
        self.called: Signal[Outbound] = Signal("called")
        self.closed = False

    async def send(self, reply: Outbound) -> str | None:
        self.calls.append(reply)
        self.called.emit(reply)
        act = self.acts.pop(0) if self.acts else None
        if isinstance(act, Exception):
            raise act
        found = act(reply) if act is not None else f"r{len(self.calls)}"
        return await found if asyncio.iscoroutine(found) else found

    async def close(self) -> None:
        self.closed = True


class InParts(Script):
    """Sends word by word."""

    def parts(self, reply: Outbound) -> Sequence[Outbound]:
        from msgspec.structs import replace

        return [replace(reply, content=word) for word in reply.content.split()]


class Knowing(Script):
    """Can be asked what arrived."""

    known: bool | None = True

    async def arrived(self, reply: Outbound) -> bool | None:
        return self.known


class Desk:
    """A store, and a carrier that runs as a worker's relay does."""

    def __init__(self, home: Path) -> None:
        self.store = SqliteStore(home / "ackbone.db")
        self.deliveries = SqliteDeliveries(self.store)
        self.worker = Worker(worker_id=0)
        self.settled: Signal[str] = Signal("settled")
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        ensure_schema(self.store.path)
        await self.store.open()
        self.store.on_events(self._heard)
        self.worker = await self.store.register("w")

    def _heard(self, entries: Sequence[Entry]) -> None:
        for *_, kind, _data in entries:
            self.settled.emit(kind)

    async def hold_role(self, role: str) -> bool:
        return True

    def carry(self, *channels: Channel, policy: Policy = FAST, **options: Any) -> Carrier:
        carried = [Carried(channel, policy) for channel in channels]
        carrier = Carrier(self.deliveries, carried, **options)
        relay = Relay(name="deliveries", every_s=3600.0, step=carrier.step, bell=carrier)
        self._tasks.append(asyncio.create_task(run_relay(relay, self)))
        return carrier

    async def put(self, content: str = "hello", **fields: Any) -> None:
        given = {"id": content, "channel": "chat", "recipient": "ann", **fields}
        await self.deliveries.put([New(content=content, **given)])

    async def row(self, reply: str = "hello") -> dict[str, Any]:
        def op(conn: Any) -> dict[str, Any]:
            cursor = conn.execute("SELECT * FROM deliveries WHERE id = ?", (reply,))
            names = [column[0] for column in cursor.description]
            return dict(zip(names, cursor.fetchone(), strict=True))

        return await self.store.file.read(op)

    async def ends(self, reply: str = "hello", *, status: str = "sent") -> dict[str, Any]:
        """Wait until it is there."""
        async with asyncio.timeout(30):
            while True:
                heard = self.settled.count  # what is heard from here on is news
                if (row := await self.row(reply))["status"] == status:
                    break
                await self.settled.wait(heard + 1, timeout=30)
        return row

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            await asyncio.wait([task])
        await self.store.close()


@pytest.fixture
async def desk(home: Path) -> AsyncIterator[Desk]:
    desk = Desk(home)
    await desk.open()
    yield desk
    await desk.close()


async def test_a_reply_arrives(desk: Desk) -> None:
    channel = Script()
    desk.carry(channel)
    await desk.put(options={"silent": True})
    row = await desk.ends()
    (call,) = channel.calls
    assert (call.content, call.recipient, call.options) == ("hello", "ann", {"silent": True})
    assert json.loads(row["receipts"]) == ["r1"]
    assert (row["retry_count"], row["calls"], row["resent"]) == (0, 1, 0)


async def test_a_failure_costs_an_attempt_and_success_ends_it(desk: Desk) -> None:
    channel = Script("chat", TemporaryError("away"), OSError("reset"))
    desk.carry(channel)
    await desk.put()
    row = await desk.ends()
    assert (row["retry_count"], row["calls"], row["resent"]) == (2, 3, 0)
    assert len({call.id for call in channel.calls}) == 1, "the same id each time"


class LateSettling(SqliteDeliveries):
    """What ends is written down when the take of the same step is over."""

    def __init__(self, store: SqliteStore) -> None:
        super().__init__(store)
        self.taken = asyncio.Event()

    async def take(self, *args: Any, **options: Any) -> Taken:
        taken = await super().take(*args, **options)
        self.taken.set()
        return taken

    async def settle(self, channels: Any, batch: Sequence[Any], *, worker: Worker) -> None:
        self.taken.clear()
        await self.taken.wait()
        await super().settle(channels, batch, worker=worker)


async def test_a_wait_is_kept_by_the_alarm_though_the_take_did_not_see_it(desk: Desk) -> None:
    """The loop would look by itself only after an hour."""
    desk.deliveries = LateSettling(desk.store)
    channel = Script("chat", TemporaryError("away"))
    desk.carry(channel, policy=Policy(wait_scale=0.001))
    await desk.put()
    assert (await desk.ends())["retry_count"] == 1


@pytest.mark.parametrize(
    ("error", "least_s", "most_s"),
    [
        (TemporaryError("503", retry_after_s=300.0), 300, 301),
        (RateLimited("429", retry_after_s=300.0), 300, 301),
        (SendUnknown("504", retry_after_s=300.0), 300, 301),
        (TemporaryError("503", retry_after_s=1.0), 5, 6),
        (TemporaryError("503", retry_after_s=1e9), LONGEST_WAIT_S, LONGEST_WAIT_S + 1),
        (RateLimited("429", retry_after_s=1e9), LONGEST_WAIT_S, LONGEST_WAIT_S + 1),
    ],
)
async def test_a_failure_waits_as_long_as_the_other_side_asks(
    desk: Desk, error: TemporaryError, least_s: float, most_s: float
) -> None:
    """But not less than by the table, and no longer than a day."""
    assert least_s <= await wait_after(desk, error) <= most_s


@pytest.mark.parametrize("scale", [0.01, 10.0])
async def test_the_scale_is_for_the_table_alone(desk: Desk, scale: float) -> None:
    error = TemporaryError("503", retry_after_s=300.0)
    assert 300 <= await wait_after(desk, error, wait_scale=scale) <= 301


async def wait_after(desk: Desk, error: TemporaryError, *, wait_scale: float = 1.0) -> float:
    """How long a reply waits after this error."""
    told: list[float] = []
    desk.store.on_events(
        lambda entries: told.extend(data["wait_s"] for *_, data in entries if "wait_s" in data)
    )
    desk.carry(Script("chat", error), policy=Policy(wait_scale=wait_scale))
    await desk.put()
    await desk.settled.wait_for(lambda kind: kind == "delivery.waiting", timeout=30)
    return told[0]


async def test_six_failures_are_the_end_and_keep_their_reason(desk: Desk) -> None:
    script = Script("chat", *[TemporaryError("away")] * 9)
    desk.carry(script, breaker=BreakerPolicy(failures=100))
    await desk.put()
    row = await desk.ends(status="failed")
    assert row["last_error"] == "away; given up after 6 attempts"
    assert (row["calls"], row["content"]) == (6, "hello")


async def test_being_told_to_wait_costs_nothing(desk: Desk) -> None:
    desk.carry(Script("chat", *[RateLimited("slow down", retry_after_s=0.01)] * 9))
    await desk.put()
    row = await desk.ends()
    assert (row["retry_count"], row["calls"]) == (0, 10)


async def test_a_refusal_ends_it_at_once(desk: Desk) -> None:
    channel = Script("chat", FinalError("chat not found"))
    desk.carry(channel)
    await desk.put()
    row = await desk.ends(status="failed")
    assert (row["last_error"], len(channel.calls)) == ("chat not found", 1)


async def test_no_answer_is_a_doubt_and_the_repeat_is_marked(desk: Desk) -> None:
    channel = Script("chat", SendUnknown("timeout"), TemporaryError("away"))
    desk.carry(channel)
    await desk.put()
    row = await desk.ends()
    assert [call.in_doubt for call in channel.calls] == [False, True, True]
    assert (row["resent"], row["retry_count"]) == (1, 2), "the second call was not taken"


async def test_the_last_attempt_may_be_the_one_that_arrived(desk: Desk) -> None:
    channel = Script("chat", TemporaryError("away"), SendUnknown("timeout"))
    desk.carry(channel)
    await desk.put(max_retries=1)
    row = await desk.ends(status="failed")
    assert (row["in_doubt"], row["resent"]) == (1, 0)
    async with StoreOperations(desk.store, by="ann") as operations:
        await operations.retry_deliveries(["hello"])
        row = await desk.ends()
    assert (channel.calls[-1].in_doubt, row["resent"]) == (True, 1)


async def test_what_is_held_back_was_not_sent_again(desk: Desk) -> None:
    dead = await desk.store.register("dead")
    await desk.put()
    await desk.deliveries.take({"chat": lambda reply: ()}, limit=1, worker=dead)
    await desk.store.leave(dead)
    channel = Script()
    desk.carry(channel, policy=Policy(wait_scale=0.0, hold_unknown=True))
    row = await desk.ends(status="unknown")
    assert (row["resent"], channel.calls) == (0, [])


async def test_a_channel_that_hangs_is_given_up(desk: Desk) -> None:
    async def hang(reply: Outbound) -> None:
        await asyncio.Event().wait()

    channel = Script("chat", hang)
    desk.carry(channel, policy=Policy(wait_scale=0.0, timeout_s=0.05))
    await desk.put()
    row = await desk.ends()
    assert (row["resent"], row["retry_count"]) == (1, 1)


async def test_a_channel_that_cancels_itself_has_failed_and_no_more(desk: Desk) -> None:
    def cancelled(reply: Outbound) -> None:
        raise asyncio.CancelledError  # of a task of its own, say

    channel = Script("chat", cancelled)
    desk.carry(channel)
    await desk.put()
    await desk.put("next")
    row = await desk.ends()
    assert (row["resent"], row["retry_count"]) == (1, 1)
    await desk.ends("next")


async def test_what_may_have_arrived_is_held_if_its_channel_must_not_repeat_itself(
    desk: Desk,
) -> None:
    channel = Script("chat", SendUnknown("timeout"))
    desk.carry(channel, policy=Policy(wait_scale=0.0, hold_unknown=True))
    await desk.put()
    await desk.put("next")
    row = await desk.ends(status="unknown")
    assert "may have arrived" in row["last_error"]
    await desk.ends("next")
    assert len(channel.calls) == 2, "the conversation goes on"


async def test_what_is_unknown_is_sent_once_more_if_a_person_says_so(desk: Desk) -> None:
    channel = Script("chat", SendUnknown("timeout"), TemporaryError("away"), SendUnknown("again"))
    desk.carry(channel, policy=Policy(wait_scale=0.0, hold_unknown=True))
    await desk.put()
    await desk.ends(status="unknown")
    async with StoreOperations(desk.store, by="ann") as operations:
        assert await operations.retry_deliveries(["hello"]) == [None]
        await channel.called.wait(3)
        row = await desk.ends(status="unknown")
        assert "again; it may have arrived" in row["last_error"], "held again"
        assert await operations.retry_deliveries(["hello"]) == [None]
        await desk.ends()
    assert [call.in_doubt for call in channel.calls] == [False, True, True, True]


async def test_a_channel_that_knows_what_arrived_is_asked_first(desk: Desk) -> None:
    channel = Knowing("chat", SendUnknown("timeout"))
    desk.carry(channel)
    await desk.put()
    row = await desk.ends()
    assert (len(channel.calls), row["resent"]) == (1, 0)


async def test_a_channel_that_knows_that_nothing_arrived_sends_again(desk: Desk) -> None:
    channel = Knowing("chat", SendUnknown("timeout"))
    channel.known = False
    desk.carry(channel, policy=Policy(wait_scale=0.0, hold_unknown=True))
    await desk.put()
    await desk.ends()
    assert len(channel.calls) == 2


async def test_a_long_text_goes_in_parts_and_goes_on_where_it_was(desk: Desk) -> None:
    channel = InParts("chat", None, TemporaryError("away"))
    desk.carry(channel)
    await desk.put("one two three")
    row = await desk.ends("one two three")
    assert [call.content for call in channel.calls] == ["one", "two", "two", "three"]
    assert json.loads(row["receipts"]) == ["r1", "r3", "r4"]


async def test_a_conversation_is_in_order_and_waits_for_its_head(desk: Desk) -> None:
    channel = Script("chat", TemporaryError("away"), TemporaryError("away"))
    for n in range(5):
        await desk.put(f"ann{n}")
    desk.carry(channel)
    await desk.ends("ann4")
    order = [call.content for call in channel.calls]
    assert order == ["ann0", "ann0", "ann0", "ann1", "ann2", "ann3", "ann4"]


async def test_others_do_not_wait_for_one_that_fails(desk: Desk) -> None:
    slow = asyncio.Event()

    async def wait(reply: Outbound) -> str:
        await slow.wait()
        return "late"

    channel = Script("chat", wait)
    await desk.put("slow", recipient="ann")
    await desk.put("quick", recipient="bob")
    desk.carry(channel)
    await desk.ends("quick")
    assert (await desk.row("slow"))["status"] == "sending"
    slow.set()
    await desk.ends("slow")


async def test_answers_to_people_go_first(desk: Desk) -> None:
    channel = Script()
    for n in range(3):
        await desk.put(f"timer{n}", recipient=f"t{n}", priority=0)
    await desk.put("answer", recipient="ann")
    desk.carry(channel, slots=1)
    await desk.ends("timer2")
    assert channel.calls[0].content == "answer"


async def test_a_destination_that_is_down_stops_the_clock(desk: Desk) -> None:
    """Three failures open its breaker; what comes then waits and loses no attempt."""
    channel = Script("chat", *[TemporaryError("down")] * 3)
    desk.carry(channel, slots=1, breaker=BreakerPolicy(failures=3, probe_s=0.2))
    for n in range(6):
        await desk.put(f"to{n}", recipient=f"r{n}")
    for n in range(6):
        await desk.ends(f"to{n}")
    rows = [await desk.row(f"to{n}") for n in range(6)]
    assert sum(row["retry_count"] for row in rows) == 3
    assert all(row["status"] == "sent" for row in rows)


async def test_what_is_held_back_is_no_answer_of_a_destination_that_is_down(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    dead = await desk.store.register("dead")
    await desk.put("doubt", recipient="bob")
    await desk.deliveries.take({"chat": lambda reply: ()}, limit=1, worker=dead)
    await desk.store.leave(dead)
    await desk.put("down", max_retries=0)
    channel = Script("chat", TemporaryError("down"))
    desk.carry(
        channel,
        slots=1,
        policy=Policy(wait_scale=0.0, hold_unknown=True),
        breaker=BreakerPolicy(failures=1, probe_s=0.1),
    )
    await desk.ends("down", status="failed")
    await desk.ends("doubt", status="unknown")
    assert len(channel.calls) == 1
    assert "chat is back" not in caplog.text


async def test_while_a_probe_hangs_the_others_wait_and_nothing_is_told_of_them(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ackbone.delivery")
    answered = asyncio.Event()
    told: list[str] = []

    async def hang(reply: Outbound) -> str:
        await answered.wait()
        return "late"

    desk.store.on_events(lambda entries: told.extend(kind for *_, kind, _ in entries))
    channel = Script("chat", TemporaryError("down"), hang)
    names = [f"to{n}" for n in range(8)]
    for name in names:
        await desk.put(name, recipient=name)
    desk.carry(channel, slots=4, breaker=BreakerPolicy(failures=1, probe_s=0.3))
    async with asyncio.timeout(30):
        while not any(row["calls"] == 2 for row in [await desk.row(name) for name in names[1:]]):
            await channel.called.wait_for(lambda _: len(channel.calls) == 2, timeout=30)
            await asyncio.sleep(0)
    answered.set()
    rows = [await desk.ends(name) for name in names]
    assert [row["retry_count"] for row in rows] == [1] + [0] * 7
    assert told.count("delivery.waiting") == 1, "the one that failed"
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "waits: " in line] == []
    assert [line for line in lines if "chat is" in line] == [
        "[delivery] chat is down: one call each 0s until it answers",
        "[delivery] chat is back",
    ]
    assert sum(row["calls"] for row in rows) <= 30, "they do not ask again and again"


async def test_an_answer_of_a_place_that_was_down_lets_the_others_go_at_once(desk: Desk) -> None:
    answered = asyncio.Event()

    async def slow(reply: Outbound) -> str:
        await answered.wait()
        return "late"

    channel = Script("chat", slow, TemporaryError("down"))
    carrier = desk.carry(channel, breaker=BreakerPolicy(failures=1, probe_s=3600.0))
    await desk.put("slow", recipient="ann")
    await channel.called.wait_for(lambda reply: reply.id == "slow", timeout=30)
    await desk.put("down", recipient="bob", max_retries=0)
    await desk.ends("down", status="failed")
    await desk.put("next", recipient="cem")
    async with asyncio.timeout(30):  # it was taken once, and not tried
        while (await desk.row("next"))["calls"] == 0 or len(carrier._calls) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0)  # reading the row takes its time
    answered.set()
    assert (await desk.ends("next"))["retry_count"] == 0


async def test_what_waits_for_one_place_goes_when_that_is_back(desk: Desk) -> None:
    """Others are not held up meanwhile, and nobody waits for the rest of the pause."""
    answered = asyncio.Event()

    async def slow(reply: Outbound) -> str:
        await answered.wait()
        return "late"

    hooks = ToHosts("hooks", slow, TemporaryError("down"))
    desk.carry(hooks, breaker=BreakerPolicy(failures=1, probe_s=3600.0))
    await desk.put("slow", channel="hooks", recipient="host/ann")
    await hooks.called.wait_for(lambda reply: reply.id == "slow", timeout=30)
    await desk.put("down", channel="hooks", recipient="host/bob", max_retries=0)
    await desk.ends("down", status="failed")
    for name in ("one", "two"):
        await desk.put(name, channel="hooks", recipient=f"host/{name}")
    await desk.put("elsewhere", channel="hooks", recipient="calm/ann")
    await desk.ends("elsewhere")
    async with asyncio.timeout(30):
        for name in ("one", "two"):
            while (await desk.row(name))["put_off_by"] is None:  # noqa: ASYNC110
                await asyncio.sleep(0)  # reading the row takes its time
    answered.set()
    for name in ("one", "two"):
        assert (await desk.ends(name))["retry_count"] == 0
    assert [call.id for call in hooks.calls][-2:] == ["one", "two"]


async def test_one_process_hears_from_another_that_a_place_is_back(desk: Desk) -> None:
    """Its own breaker is open for an hour; what it is given to send says that it need not be."""
    answered = asyncio.Event()

    async def slow(reply: Outbound) -> str:
        await answered.wait()
        return "late"

    here = ToHosts("hooks", slow)
    there = ToHosts("hooks", TemporaryError("down"))
    policy = BreakerPolicy(failures=1, probe_s=3600.0)
    carriers = [
        Carrier(desk.deliveries, [Carried(channel, FAST)], breaker=policy)
        for channel in (here, there)
    ]
    await desk.put("slow", channel="hooks", recipient="host/ann")
    await carriers[0].step(desk.worker)
    await here.called.wait_for(lambda reply: reply.id == "slow", timeout=30)
    await desk.put("down", channel="hooks", recipient="host/bob", max_retries=0)
    await _stepped(carriers[1], desk)
    assert (await desk.row("down"))["status"] == "failed"
    *_, gate = carriers[0]._limits["hooks"](here.calls[0])
    carriers[0]._breakers[gate.key].failed()  # it was down for this process, too
    await desk.put("next", channel="hooks", recipient="host/cem")
    for _ in range(2):  # it is taken and not tried, and put off then
        await _stepped(carriers[1], desk)
    assert (await desk.row("next"))["put_off_by"] == gate.key
    answered.set()
    await _stepped(carriers[0], desk, take=False)
    await _stepped(carriers[1], desk)
    assert (await desk.row("next"))["status"] == "sent"
    assert [call.id for call in there.calls] == ["down", "next"]


async def _stepped(carrier: Carrier, desk: Desk, *, take: bool = True) -> None:
    """Until everything that it began is written down."""
    if take:
        await carrier.step(desk.worker)
    while not carrier.is_idle:
        if carrier._calls:
            await asyncio.wait(carrier._calls)
        await carrier._settle()


async def test_a_limit_is_kept(desk: Desk) -> None:
    class Slow(Script):
        def limits(self, reply: Outbound) -> Sequence[Limit]:
            return (Limit("bot", 2, 0.3, whole_channel=True),)

    channel = Slow()
    moments: list[float] = []
    channel.acts = [lambda reply: moments.append(asyncio.get_running_loop().time())] * 6
    for n in range(6):
        await desk.put(f"n{n}", recipient=f"r{n}")
    desk.carry(channel)
    for n in range(6):
        await desk.ends(f"n{n}")
    assert all(b - a >= 0.3 for a, b in zip(moments, moments[2:], strict=False)), moments


async def test_a_tenant_has_a_limit_of_its_own_over_all_channels(desk: Desk) -> None:
    chat, mail = Script("chat"), Script("mail")
    for channel in ("chat", "mail"):
        await desk.put(f"acme {channel}", channel=channel, tenant_id="acme")
    await desk.put("other", tenant_id="other")
    desk.carry(chat, mail, tenant_per_minute=1)
    await desk.ends("other")
    async with asyncio.timeout(30):
        while True:
            rows = [await desk.row(f"acme {channel}") for channel in ("chat", "mail")]
            if sorted(row["status"] for row in rows) == ["pending", "sent"]:
                break
            await desk.settled.wait_for(lambda _: True, timeout=30)
    assert len(chat.calls) + len(mail.calls) == 2


class ToHosts(Script):
    """Goes to many places that fail each by itself: `host/person`."""

    def destination(self, reply: Outbound) -> str:
        return reply.recipient.partition("/")[0]


async def test_a_place_that_asks_to_wait_stops_nobody_else_of_its_tenant(desk: Desk) -> None:
    """The tenant's limit is not the place's: others of that tenant go on."""
    hooks = ToHosts("hooks", RateLimited("slow down", retry_after_s=3600.0))
    chat = Script("chat")
    await desk.put("first", channel="hooks", recipient="busy/ann", tenant_id="acme")
    desk.carry(hooks, chat, policy=Policy(), tenant_per_minute=100)
    await desk.settled.wait_for(lambda kind: kind == "delivery.waiting", timeout=30)
    await desk.put("same place", channel="hooks", recipient="busy/bob", tenant_id="acme")
    await desk.put("other place", channel="hooks", recipient="calm/ann", tenant_id="acme")
    await desk.put("other channel", recipient="ann", tenant_id="acme")
    await desk.ends("other place")
    await desk.ends("other channel")
    assert (await desk.row("same place"))["status"] == "pending"
    assert [call.content for call in hooks.calls] == ["first", "other place"]


@pytest.mark.parametrize("whole_channel", [False, True])
async def test_who_is_told_to_wait_is_the_place_or_the_whole_channel(
    desk: Desk, whole_channel: bool
) -> None:
    class Limited(Script):
        def limits(self, reply: Outbound) -> Sequence[Limit]:
            return (
                Limit("bot", 100, 1.0, whole_channel=True),
                Limit(f"to {reply.recipient}", 100, 1.0),
            )

    slow = RateLimited("slow down", retry_after_s=3600.0, whole_channel=whole_channel)
    chat, other = Limited("chat", slow), Script("other")
    await desk.put("first", recipient="ann")
    desk.carry(chat, other, policy=Policy())
    await desk.settled.wait_for(lambda kind: kind == "delivery.waiting", timeout=30)
    await desk.put("second", recipient="bob")
    await desk.put("elsewhere", channel="other")
    await desk.ends("elsewhere")
    if whole_channel:
        assert (await desk.row("second"))["status"] == "pending"
        assert [call.id for call in chat.calls] == ["first"]
    else:
        await desk.ends("second")


async def test_a_sender_that_died_left_a_doubt(desk: Desk) -> None:
    dead = await desk.store.register("dead")
    await desk.put()
    taken = await desk.deliveries.take({"chat": lambda reply: ()}, limit=1, worker=dead)
    assert len(taken.replies) == 1
    await desk.store.leave(dead)
    channel = Script()
    desk.carry(channel)
    row = await desk.ends()
    assert (row["resent"], channel.calls[0].in_doubt) == (1, True)


async def test_at_the_end_calls_under_way_get_their_answers(desk: Desk) -> None:
    go = asyncio.Event()

    async def wait(reply: Outbound) -> str:
        await go.wait()
        return "done"

    channel = Script("chat", wait)
    carrier = desk.carry(channel)
    await desk.put()
    await channel.called.wait_for(lambda _: True, timeout=30)
    await desk.put("waiting", recipient="bob")
    for task in desk._tasks:
        task.cancel()
        await asyncio.wait([task])
    finishing = asyncio.create_task(carrier.finish(desk.worker))
    go.set()
    await asyncio.wait_for(finishing, 30)
    assert (await desk.row())["status"] == "sent"
    assert (await desk.row("waiting"))["status"] == "sent", "what was due went, too"
    assert channel.closed
    assert carrier.is_idle


async def test_at_the_end_a_conversation_goes_on_behind_an_answer_that_just_came(
    desk: Desk,
) -> None:
    channel = Script()
    carrier = Carrier(desk.deliveries, [Carried(channel, FAST)])
    bell = carrier.subscribe()
    await desk.put("one")
    await desk.put("two")
    bell.clear()
    await carrier.step(desk.worker)
    await asyncio.wait_for(bell.wait(), 30)  # the answer is there, and not written down
    carrier.unsubscribe(bell)
    await carrier.finish(desk.worker)
    assert [call.content for call in channel.calls] == ["one", "two"]
    assert (await desk.row("two"))["status"] == "sent"


async def test_at_the_end_no_call_is_cut_that_could_have_been_left_for_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is due than the time is enough for: what begins gets its answer, the rest stays."""
    monkeypatch.setattr("ackbone.delivery.carrier.LAST_S", 2.0)

    async def slow(reply: Outbound) -> str:
        await asyncio.sleep(0.1)
        return "done"

    channel = Script("chat", *[slow] * 1000)
    names = [f"to{n}" for n in range(200)]
    for name in names:
        await desk.put(name, recipient=name)
    carrier = Carrier(desk.deliveries, [Carried(channel, FAST)], slots=4)
    await carrier.finish(desk.worker)
    rows = [await desk.row(name) for name in names]
    found = Counter(row["status"] for row in rows)
    assert found["sent"] == len(channel.calls) > 0
    assert found == {"sent": len(channel.calls), "pending": 200 - len(channel.calls)}


class LateTaking(SqliteDeliveries):
    """What is taken is known to the store long before it is to whoever asked."""

    def __init__(self, store: SqliteStore) -> None:
        super().__init__(store)
        self.taken, self.told = asyncio.Event(), asyncio.Event()

    async def take(self, *args: Any, **options: Any) -> Taken:
        taken = await super().take(*args, **options)
        self.taken.set()
        await self.told.wait()
        return taken


async def test_what_was_taken_is_sent_though_the_step_was_cut(desk: Desk) -> None:
    deliveries = LateTaking(desk.store)
    channel = Script()
    carrier = Carrier(deliveries, [Carried(channel, FAST)])
    await desk.put()
    step = asyncio.create_task(carrier.step(desk.worker))
    await asyncio.wait_for(deliveries.taken.wait(), 30)
    step.cancel()
    await asyncio.wait([step])
    deliveries.told.set()
    await carrier.finish(desk.worker)
    row = await desk.row()
    assert (row["status"], len(channel.calls)) == ("sent", 1)


async def test_what_was_taken_too_late_at_the_end_is_handed_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ackbone.delivery.carrier.LAST_S", 4.0)
    told: list[str] = []
    desk.store.on_events(lambda entries: told.extend(kind for *_, kind, _ in entries))
    deliveries = LateTaking(desk.store)
    channel = Script()
    carrier = Carrier(deliveries, [Carried(channel, FAST)])
    await desk.put()
    asyncio.get_running_loop().call_later(2.1, deliveries.told.set)
    await carrier.finish(desk.worker)
    row = await desk.row()
    assert (row["status"], row["retry_count"], row["in_doubt"]) == ("pending", 0, 0)
    assert channel.calls == []
    assert told == ["delivery.created"]
    assert carrier.is_idle


async def test_what_cannot_be_written_down_now_is_written_down_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ackbone.core.errors import StoreUnavailable

    real = desk.deliveries.settle
    refused = asyncio.Event()

    async def settle(*args: Any, **more: Any) -> None:
        if args[1] and not refused.is_set():
            refused.set()
            raise StoreUnavailable("away")
        await real(*args, **more)

    monkeypatch.setattr(desk.deliveries, "settle", settle)
    channel = Script()
    carrier = desk.carry(channel)
    await desk.put()
    await asyncio.wait_for(refused.wait(), 30)
    carrier._ring()  # the relay's own clock, in a worker
    row = await desk.ends()
    assert (len(channel.calls), row["calls"]) == (1, 1), "sent once"
