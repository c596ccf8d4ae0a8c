"""The one way in which commands act on many items: dry run, question, act, count."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence

import click
import pytest

from ackbone.cli.many import Ended, Words, on_each, on_many, refuse_unclear
from ackbone.cli.session import Exit, Session
from ackbone.core.errors import AckboneError, Conflict, NotFound
from ackbone.core.outbound.delivery_records import DeliveryFilter
from ackbone.core.records import LetterFilter

WORDS = Words("done", "nothing fits", ". Repeat the command")


@pytest.fixture
def session() -> Session:
    return Session(as_json=False, config_path=None, debug=False)


class Items:
    """What becomes of each id: None, or an error. Stops where it is asked to."""

    def __init__(self, *outcomes: AckboneError | None, stop_after: int | None = None) -> None:
        self.outcomes = outcomes
        self.ids = [f"i-{n}" for n in range(len(outcomes))]
        self.seen: list[str] = []
        self._stop_after = stop_after

    async def act(self, asked: asyncio.Event) -> AsyncIterator[tuple[str, AckboneError | None]]:
        for each in zip(self.ids, self.outcomes, strict=True):
            if asked.is_set():
                return
            self.seen.append(each[0])
            yield each
            if len(self.seen) == self._stop_after:
                signal.raise_signal(signal.SIGINT)
                await asyncio.wait_for(asked.wait(), 10)

    async def run(
        self, session: Session, *, dry_run: bool = False, question: str | None = None
    ) -> None:
        async def preview() -> None:
            session.out.say("a preview")

        await on_many(
            session,
            self.ids,
            self.act,
            ended=lambda each: Ended(each[0], {"id": each[0]}, each[1], " well"),
            words=WORDS,
            preview=preview,
            dry_run=dry_run,
            question=question,
        )


async def code_of(items: Items, session: Session) -> int:
    with pytest.raises(click.exceptions.Exit) as ended:
        await items.run(session)
    return ended.value.exit_code


@pytest.mark.parametrize(("number", "said"), [(0, "nothing fits\n"), (1, ""), (3, "3 done\n")])
async def test_every_item_has_a_line_and_several_have_a_sum(
    session: Session, capsys: pytest.CaptureFixture[str], number: int, said: str
) -> None:
    items = Items(*[None] * number)
    await items.run(session)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [f"{each} done well" for each in items.ids]
    assert shown.err == said


@pytest.mark.parametrize(
    ("outcomes", "code", "said"),
    [
        ((NotFound("no such one"),), Exit.NOT_FOUND, "ackbone: no such one\n"),
        (
            (Conflict("too late"), NotFound("no such one")),
            Exit.CONFLICT,
            "ackbone: too late\nackbone: no such one\n0 done, 2 failed\n",
        ),
        ((None, Conflict("too late")), Exit.PARTIAL, "ackbone: too late\n1 done, 1 failed\n"),
    ],
)
async def test_errors_are_said_counted_and_decide_the_code(
    session: Session,
    capsys: pytest.CaptureFixture[str],
    outcomes: Sequence[AckboneError | None],
    code: Exit,
    said: str,
) -> None:
    assert await code_of(Items(*outcomes), session) == code
    assert capsys.readouterr().err == said


async def test_programs_get_a_record_for_each_item(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(as_json=True, config_path=None, debug=False)
    assert await code_of(Items(None, Conflict("too late")), session) == Exit.PARTIAL
    first, second = capsys.readouterr().out.splitlines()
    assert first == '{"id": "i-0", "error": null}'
    assert "too late" in second


async def test_a_dry_run_asks_nothing_and_does_nothing(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    items = Items(None, None)
    await items.run(session, dry_run=True, question="Really?")
    assert (items.seen, capsys.readouterr().err) == ([], "a preview\n")


async def test_a_question_without_a_terminal_needs_yes(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    items = Items(None)
    with pytest.raises(click.UsageError, match=r"Really\? Confirm with --yes"):
        await items.run(session, question="Really?")
    assert items.seen == []
    await Items().run(session, question="Really?")  # there is nothing to ask about


async def test_a_no_does_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "n")
    items = Items(None)
    with pytest.raises(click.Abort):
        await items.run(session, question="Really?")
    assert items.seen == []


async def test_the_first_ctrl_c_stops_between_two_items_and_says_what_is_left(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    items = Items(None, None, None, stop_after=1)
    assert await code_of(items, session) == Exit.INTERRUPTED
    assert items.seen == ["i-0"]
    assert capsys.readouterr().err == ("stopped: 1 done, 2 not changed. Repeat the command\n")


# -- named ones -----------------------------------------------------------------------------------


async def test_of_several_names_the_others_are_done(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    async def act(name: str) -> tuple[object, str]:
        if name == "bad":
            raise NotFound("no such one")
        return {"name": name}, f"{name} resumed"

    with pytest.raises(NotFound):
        await on_each(session, ["bad"], act)
    with pytest.raises(click.exceptions.Exit) as ended:
        await on_each(session, ["bad", "good"], act)
    assert ended.value.exit_code == Exit.PARTIAL
    assert capsys.readouterr() == ("good resumed\n", "ackbone: no such one\n")
    with pytest.raises(click.exceptions.Exit) as ended:
        await on_each(session, ["bad", "bad"], act)
    assert ended.value.exit_code == Exit.NOT_FOUND


@pytest.mark.parametrize("empty", [LetterFilter(), DeliveryFilter()])
def test_ids_or_a_choice_or_all(empty: LetterFilter | DeliveryFilter) -> None:
    of_tenant = type(empty)(tenant_id="acme")
    recent = type(empty)(since_us=1)
    for names, where, every in (
        (["a"], empty, False),
        (["a"], of_tenant, False),  # where to look
        ([], of_tenant, False),
        ([], recent, False),
        ([], empty, True),
        ([], recent, True),
    ):
        refuse_unclear(names, where, every, options="--since")
    for names, where, every in ((["a"], empty, True), (["a"], recent, False)):
        with pytest.raises(click.UsageError, match="not both"):
            refuse_unclear(names, where, every, options="--since")
    with pytest.raises(click.UsageError, match="Give ids, --since, or --all"):
        refuse_unclear([], empty, False, options="--since")
