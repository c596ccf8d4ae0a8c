"""Dead letters: found, read, sent again as new messages, edited, discarded; each once."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ackbone.admin.causes import by_cause
from ackbone.admin.dead_letters import Edits
from ackbone.admin.repairs import Change
from ackbone.config import Queue
from ackbone.core.errors import Ambiguous, Conflict, InvalidMessage, NotFound
from ackbone.core.records import LetterFilter
from ackbone.sqlitefile.sharing import OUTGOING
from tests.servers.stores import STORES, sqlite_store, store_url
from tests.unit.desk import Desk, open_desk


@pytest.fixture(params=STORES)
async def desk(request: pytest.FixtureRequest, home: Path) -> AsyncIterator[Desk]:
    async with open_desk(home, store=store_url(request)) as desk:
        yield desk


async def kill(desk: Desk, message_id: str, **options) -> str:
    """A message that dies; its letter's id."""
    await desk.app.send("bad", options.pop("payload", {"n": 1}), id=message_id, **options)
    await desk.work()
    return (await desk.letters.find(message_id)).id


async def test_a_letter_holds_the_message_its_reason_and_its_history(desk: Desk):
    await kill(desk, "m-1", payload={"amount": 7}, headers={"x-a": "b"})
    letter = await desk.letters.find("m-1")
    reading = desk.letters.read(letter)
    assert (letter.queue, letter.type, letter.state) == ("default", "bad", "open")
    assert "it is broken" in letter.error
    assert [each["attempt"] for each in letter.history] == [1]
    assert reading.message is not None
    assert reading.message.payload == {"amount": 7}
    assert reading.message.headers["x-a"] == "b"


async def test_a_replay_is_a_new_message_linked_to_the_old_one(desk: Desk):
    letter_id = await kill(
        desk, "m-1", idempotency_key="key-1", ordering_key="talk", correlation_id="c-1", priority=2
    )
    (handled,) = await desk.replayed([await desk.letters.find("m-1")])
    assert handled.error is None
    assert handled.replay_id not in (None, "m-1")
    assert await desk.sent(handled.replay_id or "") == [("default", 2, "talk")]
    (letter,) = await desk.records.letters_by_id([letter_id])
    assert (letter.state, letter.replay_id) == ("replayed", handled.replay_id)
    assert (await desk.events("m-1"))[-1] == "dlq.replayed"

    await desk.work()
    again = await desk.letters.find(handled.replay_id or "")
    message = desk.letters.read(again).message
    assert message is not None
    assert message.metadata["replay_of"] == "m-1"
    assert message.metadata["retry_count"] == 0
    assert (message.idempotency_key, message.correlation_id) == ("key-1", "c-1")
    assert await desk.events("m-1") == [
        "task.claimed", "task.failed", "task.dlq", "dlq.replayed",
    ]  # fmt: skip


async def test_a_letter_that_is_not_open_is_refused_and_nothing_is_sent(desk: Desk):
    await kill(desk, "m-1")
    letter = await desk.letters.find("m-1")
    (first,) = await desk.replayed([letter])
    (second,) = await desk.replayed([letter])
    assert isinstance(second.error, Conflict)
    assert first.replay_id is not None
    assert first.replay_id in str(second.error)
    (third,) = await desk.discarded([letter], reason="late")
    assert isinstance(third.error, Conflict)
    assert (await desk.events("m-1")).count("dlq.replayed") == 1
    assert len(await desk.sent("m-1")) == 1


async def test_two_operators_at_once_send_one_message(desk: Desk):
    await kill(desk, "m-1")
    letter = await desk.letters.find("m-1")
    replays = [desk.letters._again(letter, Edits())[1] for _ in range(8)]
    answers = await asyncio.gather(*(desk.operations.replay([each]) for each in replays))
    assert sorted(answer is None for (answer,) in answers) == [False] * 7 + [True]
    assert len(await desk.sent("m-1")) == 1


async def test_what_dies_again_during_a_replay_is_not_sent_a_second_time(desk: Desk):
    for n in range(5):
        await desk.app.send("bad", {"n": n}, id=f"m-{n}")
    await desk.work()
    handled = 0
    ids = await desk.letters.chosen(LetterFilter())
    async for each in desk.letters.replay(ids, rate=10.0):
        assert each.error is None
        handled += 1
        await desk.work()  # it dies at once: a new open letter
    assert handled == 5
    assert len(await desk.records.letters(LetterFilter(), limit=100)) == 5


async def test_pacing_keeps_the_rate(desk: Desk):
    for n in range(3):
        await desk.app.send("bad", {}, id=f"m-{n}")
    await desk.work()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    assert len(await desk.replayed(LetterFilter(), rate=10.0)) == 3
    assert loop.time() - begun >= 0.2 - 0.01  # the third one starts two tenths after the first


async def test_a_dry_run_changes_nothing(desk: Desk):
    await kill(desk, "m-1")
    (handled,) = await desk.replayed(LetterFilter(), dry_run=True)
    assert handled.error is None
    (gone,) = await desk.discarded(LetterFilter(), reason="", dry_run=True)
    assert gone.error is None
    assert (await desk.letters.find("m-1")).state == "open"
    assert await desk.events("m-1") == ["task.claimed", "task.failed", "task.dlq"]


async def test_an_edited_payload_runs_and_the_letter_stays_as_it_was(desk: Desk):
    await kill(desk, "m-1", payload={"n": 1})
    letter = await desk.letters.find("m-1")
    (handled,) = await desk.replayed([letter], edits=Edits(payload={"mended": True}))
    await desk.work()
    assert desk.seen == [{"mended": True}]
    last = (await desk.events_of("m-1"))[-1]
    assert last.type == "dlq.edited"
    assert last.data["changed"] == ["payload"]
    assert last.data["replay_id"] == handled.replay_id
    kept = desk.letters.read(await desk.letters.find("m-1")).message
    assert kept is not None
    assert kept.payload == {"n": 1}


async def test_a_replay_can_go_to_another_queue(desk: Desk):
    await kill(desk, "m-1")
    (handled,) = await desk.replayed(
        [await desk.letters.find("m-1")], edits=Edits(queue="other", type="good")
    )
    (sent,) = await desk.sent(handled.replay_id or "")
    assert sent.queue == "other"


async def test_a_discarded_letter_is_kept_and_no_final_event_is_written(desk: Desk):
    await kill(desk, "m-1")
    (handled,) = await desk.discarded(LetterFilter(queue="default"), reason="a test")
    assert handled.error is None
    letter = await desk.letters.find("m-1")
    assert letter.state == "discarded"
    assert letter.body is not None
    last = (await desk.events_of("m-1"))[-1]
    assert (last.type, last.data["reason"]) == ("dlq.discarded", "a test")
    assert (await desk.events("m-1")).count("task.failed") == 1


async def test_filters_choose_and_cursors_go_on(desk: Desk):
    for n in range(5):
        await desk.app.send("bad", {}, id=f"d-{n}", tenant_id="acme" if n % 2 else "zeta")
        await desk.work()
    await desk.app.send("bad", {}, id="o-1", queue="other")
    await desk.work()
    everything = LetterFilter()
    first = await desk.records.letters(everything, limit=4)
    rest = await desk.records.letters(everything, limit=4, before=first[-1].id)
    assert [each.message_id for each in (*first, *rest)] == [
        "o-1", "d-4", "d-3", "d-2", "d-1", "d-0",
    ]  # fmt: skip
    acme = await desk.records.letters(LetterFilter(tenant_id="acme"), limit=9)
    assert {each.message_id for each in acme} == {"d-1", "d-3"}
    assert len(await desk.letters.chosen(LetterFilter(queue="other"))) == 1
    assert await desk.letters.chosen(LetterFilter(reason="no such")) == []
    later = LetterFilter(since_us=first[0].failed_at_us + 1)
    assert await desk.letters.chosen(later) == []


async def test_names_may_be_short_but_not_ambiguous(desk: Desk):
    for name in ("order-1", "order-2"):
        await desk.app.send("bad", {}, id=name)
    await desk.work()
    letter = await desk.letters.find("order-1")
    assert (await desk.letters.find(letter.id)).message_id == "order-1"
    assert (await desk.letters.find(letter.id.replace("-", ""))).id == letter.id
    with pytest.raises(Ambiguous) as caught:
        await desk.letters.find("order")
    assert len(caught.value.matches) == 2
    with pytest.raises(NotFound):
        await desk.letters.find("nothing-of-this-name")
    with pytest.raises(InvalidMessage):
        await desk.letters.find("or")


async def test_undecodable_bytes_are_kept_and_can_be_edited_but_not_sent_as_they_are(
    desk: Desk, home: Path
):
    await desk.app.send("good", {"n": 1}, id="m-1")
    broken = b'{"message_id": "m-1", "message_'
    put_bytes(home, "m-1", broken)
    await desk.work()
    letter = await desk.letters.find("m-1")
    assert letter.reason == "undecodable"
    assert letter.body == broken
    assert desk.letters.read(letter).problem is not None
    (handled,) = await desk.replayed([letter])
    assert isinstance(handled.error, Conflict)
    assert "dlq edit" in str(handled.error)
    (untyped,) = await desk.replayed([letter], edits=Edits(payload=1))
    assert isinstance(untyped.error, InvalidMessage)
    (edited,) = await desk.replayed([letter], edits=Edits(payload={"n": 2}, type="good"))
    assert edited.error is None
    await desk.work()
    assert desk.seen == [{"n": 2}]


async def test_a_body_that_changed_on_disk_is_never_sent_again(desk: Desk):
    await kill(desk, "m-1", payload={"n": 1})
    await desk.spoil_letters()
    letter = await desk.letters.find("m-1")
    assert not letter.intact
    (handled,) = await desk.replayed([letter])
    assert isinstance(handled.error, Conflict)
    assert "checksum" in str(handled.error)


async def test_a_wrong_codec_is_mended_by_setting_it_right(home: Path):
    async with open_desk(home, texts=Queue(codec="json")) as desk:
        await desk.app.send("good", "plain words", queue="texts", id="m-1")
        put_bytes(home, "m-1", b"plain words")
        await desk.work()
        assert (await desk.letters.find("m-1")).reason == "undecodable"
    async with open_desk(home, texts=Queue(codec="text")) as desk:
        letter = await desk.letters.find("m-1")
        (handled,) = await desk.replayed([letter])
        assert handled.error is None
        (waiting,) = await desk.records.waiting_with(handled.replay_id or "", limit=2)
        assert waiting.headers["x-replay-of"] == "m-1"


async def test_an_expired_letter_lives_anew(desk: Desk):
    now = datetime.now(UTC)
    await desk.app.send(
        "good",
        {"n": 1},
        id="m-1",
        created_at=now - timedelta(hours=2),
        expires_at=now - timedelta(hours=1),
    )
    await desk.work()
    letter = await desk.letters.find("m-1")
    assert letter.reason == "expired"
    (handled,) = await desk.replayed([letter])
    assert handled.error is None
    await desk.work()
    assert desk.seen == [{"n": 1}]


async def test_with_two_files_the_replay_goes_through_the_outbox(home: Path):
    async with open_desk(home, two_files=True) as desk:
        await kill(desk, "m-1")
        bell = sqlite_store(desk.app).file.subscribe(OUTGOING)
        (handled,) = await desk.replayed([await desk.letters.find("m-1")])
        assert handled.error is None
        await asyncio.wait_for(bell.wait(), 20)  # whoever carries the outbox is told at once
        desk.app.store.unsubscribe(bell)
        with closing(sqlite3.connect(home / "store.db")) as conn:
            rows = conn.execute("SELECT queue_name, message_id FROM outbox").fetchall()
        assert rows == [("default", handled.replay_id)]


def put_bytes(home: Path, message_id: str, body: bytes) -> None:
    """Other bytes in the queue, with the checksum that their sender would have written."""
    import zlib

    with closing(sqlite3.connect(home / "ackbone.db", isolation_level=None)) as conn:
        changed = conn.execute(
            "UPDATE messages SET body = ?, body_crc = ? WHERE message_id = ?",
            (body, zlib.crc32(body), message_id),
        ).rowcount
    assert changed == 1


# ── many at once ─────────────────────────────────────────────────────────────────────────────────


async def test_filters_by_type_error_and_time(desk: Desk):
    await kill(desk, "m-1")
    await desk.app.send("worse", {}, id="m-2", queue="other", ttl_s=0.001)
    await asyncio.sleep(0.01)
    await desk.work()
    first, second = await desk.letters.find("m-1"), await desk.letters.find("m-2")
    for where, meant in (
        (LetterFilter(type="bad"), [first.id]),
        (LetterFilter(error="is broken"), [first.id]),
        (LetterFilter(error="is BROKEN"), []),
        (LetterFilter(error="%"), []),
        (LetterFilter(before_us=second.failed_at_us), [first.id]),
        (LetterFilter(since_us=first.failed_at_us), [first.id, second.id]),
        (LetterFilter(since_us=first.failed_at_us + 1), [second.id]),
    ):
        assert await desk.letters.chosen(where) == meant, where
    assert await desk.letters.chosen(LetterFilter(), limit=1) == [first.id]


async def test_one_change_mends_many_letters(desk: Desk):
    for n in range(250):
        await desk.app.send("bad", {"n": n, "wrong": True}, id=f"m-{n}", tenant_id="acme")
    await desk.work()
    ids = await desk.letters.chosen(LetterFilter())
    changes = (Change("type", "good"), Change("payload.wrong"), Change("payload.by.whom", "me"))
    handled = [each async for each in desk.letters.replay(ids, edits=Edits(changes=changes))]
    assert {each.error for each in handled} == {None}
    await desk.work()
    assert sorted(each["n"] for each in desk.seen) == list(range(250))
    assert {repr(each["by"]) for each in desk.seen} == {"{'whom': 'me'}"}
    assert not any("wrong" in each for each in desk.seen)
    last = (await desk.events_of("m-7", "acme"))[-1]
    assert last.type == "dlq.edited"
    assert last.data["changed"] == ["type", "payload.wrong", "payload.by.whom"]
    assert "@" in last.data["by"]


async def test_a_change_that_does_not_fit_is_the_letters_own_error(desk: Desk):
    await kill(desk, "m-1", payload={"n": 1})
    await kill(desk, "m-2", payload=[1])
    handled = await desk.replayed(
        LetterFilter(), edits=Edits(changes=(Change("payload.n", 2),)), dry_run=True
    )
    assert [each.error is None for each in handled] == [True, False]
    assert "a list" in str(handled[1].error)
    assert handled[0].message is not None
    assert handled[0].message.payload == {"n": 2}
    causes = by_cause(handled)
    assert [(cause.count, cause.problem is None) for cause in causes] == [(1, True), (1, False)]
    assert await desk.letters.chosen(LetterFilter()) == [each.letter.id for each in handled]


async def test_a_replay_that_is_asked_to_stop_leaves_the_rest_open(desk: Desk):
    for n in range(6):
        await desk.app.send("bad", {}, id=f"m-{n}")
    await desk.work()
    ids = await desk.letters.chosen(LetterFilter())
    stop, done = asyncio.Event(), []
    async with asyncio.timeout(30):  # the next one would be due in an hour
        async for handled in desk.letters.replay(ids, rate=1 / 3600, stop=stop):
            done.append(handled.letter.id)
            asyncio.get_running_loop().call_later(0.01, stop.set)
    assert done == ids[:1]
    assert await desk.letters.chosen(LetterFilter()) == ids[1:]
    assert [each async for each in desk.letters.discard(ids, reason="", stop=stop)] == []


async def test_a_task_that_lacks_a_field_can_be_mended(home: Path):
    async with open_desk(home, tasks=Queue(codec="task")) as desk:
        await desk.app.send("good", {"n": 1}, queue="tasks", id="m-1", idempotency_key="k-1")
        await desk.app.send("good", {"n": 1}, queue="tasks", id="m-2", idempotency_key="k-2")
        put_bytes(home, "m-1", b'{"task_id": "m-1", "tool_name": "good", "payload": "[1]",'
                               b' "idempotency_key": "k-1"}')  # fmt: skip
        put_bytes(home, "m-2", b'{"task_id": "m-2", "payload": "{}"}')
        await desk.work()
        first, second = await desk.replayed(
            LetterFilter(reason="undecodable"), edits=Edits(changes=(Change("payload", {"n": 2}),))
        )
        assert first.message is not None
        assert (first.message.type, first.message.idempotency_key) == ("good", "k-1")
        assert isinstance(second.error, InvalidMessage)  # nobody knows what it was to do
        (mended,) = await desk.replayed([second.letter], edits=Edits(payload={"n": 3}, type="good"))
        assert mended.error is None
        (waiting,) = await desk.records.waiting_with(mended.replay_id or "", limit=2)
        assert waiting.queue == "tasks"
