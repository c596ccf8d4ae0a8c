"""Who may go now: the choice itself, for any replies, limits and answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.core.outbound import send_order, settling
from ackbone.core.outbound.delivery import (
    Again,
    Failed,
    Held,
    Limit,
    Outbound,
    Sent,
    Settled,
    Status,
)
from ackbone.core.outbound.send_order import (
    AHEAD_US,
    UNANSWERED_US,
    Choice,
    DueReply,
    Window,
    Windows,
    choose,
    name_of,
    turns,
)
from ackbone.core.outbound.settling import attempt_end

NOW = 1_000_000_000
PLACE, BOT = Limit("place", 2, 10.0), Limit("bot", 3, 10.0, whole_channel=True)


def due(
    name: str = "r", *, head: bool = True, expires_us: int | None = None, call: int = 1
) -> DueReply:
    reply = Outbound(
        id=name,
        tenant_id="acme",
        channel="c",
        recipient="ann",
        content="",
        call=call,
        expires_us=expires_us,
    )
    return DueReply(reply, "s", f"lane of {name}", head)


def chosen(
    page: Sequence[DueReply],
    *limits: Limit,
    windows: Windows | None = None,
    now: int = NOW,
    room: int = 100,
    expiry_us: int = NOW,
) -> Choice:
    asked = send_order.limits_of(page, lambda reply: limits)
    found = {} if windows is None else windows
    return choose(page, asked, found, now_us=now, expiry_us=expiry_us, room=room)


def ids(found: Sequence[DueReply]) -> list[str]:
    return [each.reply.id for each in found]


def test_each_goes_its_way() -> None:
    page = [
        due("behind", head=False),
        due("over", expires_us=NOW),
        due("in time", expires_us=NOW + 1),
        due("any"),
    ]
    choice = chosen(page)
    assert ids(choice.queued) == ["behind"]
    assert ids(choice.expired) == ["over"]
    assert ids(choice.granted) == ["in time", "any"]
    assert not choice.put_off
    assert choice.blocked_us is None
    assert (choice.changes, choice.set_aside, choice.may_go_on) == (True, 2, True)


def test_nothing_expires_while_the_clock_is_in_doubt() -> None:
    assert ids(chosen([due("over", expires_us=1)], expiry_us=0).granted) == ["over"]


def test_a_place_at_its_limit_puts_off_and_a_channel_stops() -> None:
    page = [due(f"r{n}") for n in range(4)] + [due("behind", head=False)]
    choice = chosen(page, PLACE)
    assert (ids(choice.granted), ids(choice.queued)) == (["r0", "r1"], ["behind"])
    assert [(each.due.reply.id, each.until_us) for each in choice.put_off] == [
        ("r2", NOW + 10_000_000 - AHEAD_US),
        ("r3", NOW + 10_000_000 - AHEAD_US),
    ]
    choice = chosen(page, BOT)
    assert (ids(choice.granted), choice.queued, choice.put_off) == (["r0", "r1", "r2"], [], [])
    assert choice.blocked_us == NOW + 10_000_000 - AHEAD_US
    assert choice.keys == {"bot"}


def test_no_more_than_there_is_room_for() -> None:
    choice = chosen([due(f"r{n}") for n in range(5)] + [due("behind", head=False)], room=2)
    assert ids(choice.granted) == ["r0", "r1"]
    assert not choice.queued, "what is behind them is not looked at"


def test_asking_again_is_never_too_late() -> None:
    """A call that is under way may be answered at once: then its place is free `per_s` later."""
    window = Window()
    window.begin("a", PLACE, NOW)
    window.begin("b", PLACE, NOW)
    assert window.free_at(PLACE, NOW) == NOW + UNANSWERED_US + 10_000_000
    assert window.ask_at(PLACE, NOW) == NOW + 10_000_000
    window.answered("a", PLACE, NOW + 5)
    assert window.ask_at(PLACE, NOW + 5) == NOW + 5 + 10_000_000 == window.free_at(PLACE, NOW + 5)
    window.block(NOW + 60_000_000)
    assert window.ask_at(PLACE, NOW + 5) == NOW + 60_000_000


def test_a_call_of_the_dead_is_over_now() -> None:
    window = Window()
    window.begin("a.1", PLACE, NOW)
    assert settling.give_up_calls({"p": window, "q": Window()}, {"a.1": NOW}, NOW + 7) == {"p"}
    assert window.calls == {"a.1": NOW + 7 + 10_000_000}


def test_many_calls_of_the_dead_are_looked_for_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only writer does this: windows times calls would keep everybody else waiting."""
    windows = {f"chat {n}": Window() for n in range(100)}
    for n, window in enumerate(windows.values()):
        window.begin(f"r{n}.1", PLACE, NOW)
    asked: list[str] = []
    given_up = Window.given_up

    def counted(window: Window, name: str, begun_us: int, now_us: int) -> bool:
        asked.append(name)
        return given_up(window, name, begun_us, now_us)

    monkeypatch.setattr(Window, "given_up", counted)
    calls = {f"r{n}.1": NOW for n in range(50, 150)}
    changed = settling.give_up_calls(windows, calls, NOW + 7)
    assert changed == {f"chat {n}" for n in range(50, 100)}
    assert sorted(asked) == sorted(f"r{n}.1" for n in range(50, 100))


def test_turns_go_by_urgency_and_then_round() -> None:
    levels = {"a": [2, 0], "b": [2], "c": [1]}
    assert turns(levels, 0) == [("a", 2), ("b", 2), ("c", 1), ("a", 0)]
    assert turns(levels, 1) == [("b", 2), ("a", 2), ("c", 1), ("a", 0)]
    assert turns({}, 5) == []


@pytest.mark.parametrize(
    ("result", "status", "in_doubt", "retries"),
    [
        (Sent(), Status.SENT, False, 0),
        (Sent(more=True), Status.PENDING, False, None),
        (Again(error="e", wait_s=2.0), Status.PENDING, None, 1),
        (Again(error="e", wait_s=2.0, costs=False, in_doubt=True), Status.PENDING, True, 0),
        (Failed(error="e", in_doubt=True), Status.FAILED, True, 0),
        (Failed(error="e"), Status.FAILED, None, 0),
        (Held(error="e"), Status.UNKNOWN, True, 0),
    ],
)
def test_what_an_attempt_changes(
    result: Sent | Again | Failed | Held,
    status: Status,
    in_doubt: bool | None,
    retries: int | None,
) -> None:
    ending = attempt_end(Settled(reply=due(call=3).reply, result=result))
    assert (ending.id, ending.call, ending.status) == ("r", 3, status)
    assert (ending.in_doubt, ending.retries) == (in_doubt, retries)
    assert ending.is_end is (status is not Status.PENDING)


def test_whoever_was_told_to_wait_blocks_one_window() -> None:
    reply = due().reply
    said = Settled(reply=reply, result=Again(error="e", wait_s=30.0, blocks=PLACE), ago_s=1.0)
    asked = [(said, (PLACE, BOT, Limit("gate")))]
    windows: Windows = {}
    settling.count_answers(asked, windows, NOW)
    assert settling.changed_keys(asked) == {"place", "bot"}, "a gate that was not touched"
    assert windows["place"].blocked_until == NOW + 30_000_000
    assert windows["bot"].blocked_until == 0
    assert windows["bot"].calls == {name_of(reply): NOW - 1_000_000 + 10_000_000}


def test_a_place_that_was_down_is_free_when_it_answers() -> None:
    gate = Limit("gate")
    reply = due().reply
    down = Again(error="e", wait_s=5.0, blocks=gate, block_s=60.0)
    windows: Windows = {}
    settling.count_answers([(Settled(reply=reply, result=down), (gate,))], windows, NOW)
    assert windows["gate"].blocked_until == NOW + 60_000_000
    asked = [(Settled(reply=reply, result=Sent(), frees=gate), (gate,))]
    assert settling.changed_keys(asked) == {"gate"}
    settling.count_answers(asked, windows, NOW)
    assert windows["gate"].blocked_until == 0
    full = Again(error="e", wait_s=9.0, blocks=gate)
    settling.count_answers([(Settled(reply=reply, result=full, frees=gate), ())], windows, NOW)
    assert windows["gate"].blocked_until == NOW + 9_000_000, "it is back, and asks for patience"


def test_what_was_not_tried_costs_nothing_and_is_not_told() -> None:
    reply = msgspec.structs.replace(due(call=3).reply, in_doubt=True)
    windows: Windows = {}
    windows["place"] = Window()
    windows["place"].begin(name_of(reply), PLACE, NOW)
    result = Again(error="e", wait_s=0.0, costs=False, tried=False, blocks=BOT, block_s=30.0)
    settled = Settled(reply=reply, result=result)
    ending = attempt_end(settled)
    assert (ending.status, ending.is_due, ending.retries) == (Status.PENDING, True, 0)
    assert (ending.in_doubt, ending.resent) == (None, 0)
    assert not settling.was_tried(settled)
    settling.count_answers([(settled, (PLACE,))], windows, NOW)
    assert windows["place"].calls == {}, "no call was made"
    assert windows["bot"].blocked_until == NOW + 30_000_000


@given(
    st.lists(st.tuples(st.integers(0, 4_000_000), st.integers(0, 3_000_000)), max_size=40),
    st.integers(1, 4),
)
def test_never_above_a_limit_and_never_idle_below_it(
    steps: list[tuple[int, int]], count: int
) -> None:
    """Time passes, a call is asked for, and is answered after a while; at any time in between it
    may count at the other side."""
    limit = Limit("place", count, 5.0)
    windows: Windows = {}
    now = NOW
    spans: list[tuple[int, int]] = []
    open_calls: list[tuple[int, Outbound]] = []
    for n, (wait, takes) in enumerate(steps):
        now += wait
        for at, reply in [each for each in open_calls if each[0] <= now]:
            settled = Settled(reply=reply, result=Sent(), ago_s=(now - at) / 1e6)
            settling.count_answers([(settled, (limit,))], windows, now)
        open_calls = [each for each in open_calls if each[0] > now]
        asked = due(f"r{n}")
        choice = chosen([asked], limit, windows=windows, now=now)
        counting = [span for span in spans if span[1] > now - 5_000_000]
        if len(counting) < count:
            assert choice.granted, "it may go at once"
        if choice.granted:
            begin = now + round(choice.granted[0].reply.wait_s * 1e6)
            assert begin <= now + AHEAD_US
            still = [span for span in spans if span[1] > begin - 5_000_000]
            assert len(still) < count, "never above"
            spans.append((begin, begin + takes))
            open_calls.append((begin + takes, asked.reply))
        else:
            ((_, until, _),) = choice.put_off
            assert now < until <= now + 5_000_000
