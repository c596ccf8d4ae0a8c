"""`ackbone deliveries`: what operators see of replies, and what they do to them."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ackbone import App, Context, FinalError
from ackbone.cli.root import cli
from ackbone.cli.session import Exit
from ackbone.composition.background import relays_of
from ackbone.config import load_config
from ackbone.core.errors import SendUnknown, TemporaryError
from ackbone.core.events import Event
from ackbone.core.outbound.delivery import Outbound

IDS = {
    "sent": "aaaa1111-sent",
    "failed": "bbbb1111-failed",
    "unknown": "cccc1111-unknown",
    "pending": "dddd1111-pending",
    "queued": "dddd2222-queued",
}
LIMIT_S = 60


class Moody:
    """A channel that does what a reply's text says."""

    name = "moody"

    async def send(self, reply: Outbound) -> str:
        if reply.content == "bad":
            raise FinalError("no such chat")
        if reply.content == "lost":
            raise SendUnknown("no answer")
        if reply.content == "away":
            raise TemporaryError("connection refused")
        return f"receipt-{reply.id}"

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _own_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "cwd").mkdir()
    monkeypatch.chdir(home / "cwd")
    monkeypatch.delenv("ACKBONE_CONFIG", raising=False)


def call(*arguments: str, stdin: str = "", code: int = 0) -> Result:
    command = ["deliveries", *arguments] if arguments[0] not in ("stats", "trace") else arguments
    result = CliRunner().invoke(cli, command, input=stdin, catch_exceptions=False)
    assert result.exit_code == code, (arguments, result.stdout, result.stderr)
    return result


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def one(name: str) -> dict[str, Any]:
    (found,) = lines(call("show", name, "--json"))
    return found


def with_app(use: Callable[[App], Awaitable[None]]) -> None:
    """An app whose channel is open for as long as `use` takes."""

    async def run() -> None:
        app = App(load_config())
        app.channel(Moody(), on_unknown="hold")
        async with asyncio.timeout(LIMIT_S), app:
            worker = app.worker(relays=relays_of(app, spawn_solo=False))
            await worker.begin()
            try:
                await use(app)
            finally:
                await worker.drain()

    asyncio.run(run())


async def settled(app: App, **wanted: str) -> None:
    """Wait until these replies are in these states."""
    records = app.storage.records(app.store)
    for name, status in wanted.items():
        while True:
            (found,) = await records.deliveries_named(IDS[name], tenant_id=None)
            if found.status == status and (status != "pending" or found.retry_count):
                break
            await asyncio.sleep(0.01)


@pytest.fixture
def replies() -> None:
    """One in each state that waits for a person, and what waits by itself."""

    async def make(app: App) -> None:
        texts = {"sent": "good", "failed": "bad", "unknown": "lost", "pending": "away"}
        for name, text in texts.items():
            await app.deliver(
                "moody", f"to-{name}", text, id=IDS[name],
                tenant_id="acme" if name == "failed" else "default",
            )  # fmt: skip
        await app.deliver("moody", "to-pending", "behind it", id=IDS["queued"])
        await settled(app, sent="sent", failed="failed", unknown="unknown", pending="pending")

    with_app(make)


# ── looking ──────────────────────────────────────────────────────────────────────────────────────


def test_empty_lists_say_so():
    call("list", code=Exit.NOT_FOUND)  # there is no database
    with_app(lambda app: asyncio.sleep(0))
    empty = call("list")
    assert (empty.stdout, empty.stderr) == ("", "no replies\n")
    assert call("list", "--status", "failed").stderr == "no reply matches\n"
    assert call("list", "--json").stdout == ""


@pytest.mark.usefixtures("replies")
def test_replies_are_listed_by_what_they_have_in_common():
    def ids(*options: str) -> list[str]:
        return [each["id"] for each in lines(call("list", "--json", *options))]

    assert sorted(ids()) == sorted(IDS.values())
    assert ids("--status", "failed") == [IDS["failed"]]
    assert ids("--tenant", "acme") == [IDS["failed"]]
    assert ids("--channel", "elsewhere") == []
    assert ids("--since", "1h", "--status", "sent") == [IDS["sent"]]
    assert ids("--since", "2100-01-01T00:00") == []
    table = call("list", "--limit", "2")
    assert len(table.stdout.splitlines()) == 3
    assert "more: raise --limit" in table.stderr
    shown = call("list").stdout
    assert "bbbb1111 " in shown, "short ids"
    assert "bbbb1111-" not in shown
    assert re.search(r"dddd1111 +moody +to-pending +pending +1/5 .* in \d+ s +connection", shown)
    assert re.search(r"dddd2222 +moody +to-pending +queued", shown)
    call("list", "--status", "nonsense", code=Exit.USAGE)


@pytest.mark.usefixtures("replies")
def test_a_reply_is_shown_whole():
    sent = call("show", "aaaa1111").stdout
    for wanted in ("status    sent", "part 1    arrived as receipt-aaaa1111-sent", "    good"):
        assert wanted in sent
    unknown = call("show", IDS["unknown"]).stdout
    assert "doubt     it may have arrived" in unknown
    assert "error     no answer" in unknown
    waits = one("dddd1111")
    assert (waits["retry_count"], waits["calls"], waits["receipts"]) == (1, 1, [])
    assert waits["content"] == "away"
    assert waits["due_at"] > waits["created_at"]
    assert "retries   1 of 5" in call("show", "dddd1111").stdout


@pytest.mark.usefixtures("replies")
def test_names_must_fit_exactly_one():
    unclear = call("show", "dddd", code=Exit.CONFLICT)
    assert "'dddd' matches 2 replies" in unclear.stderr
    assert IDS["pending"] in unclear.stderr
    assert IDS["queued"] in unclear.stderr
    call("show", "zzzz", code=Exit.NOT_FOUND)
    assert "too short" in call("show", "d", code=Exit.FAILURE).stderr
    call("show", "bbbb1111", "--tenant", "default", code=Exit.NOT_FOUND)


@pytest.mark.usefixtures("replies")
def test_stats_show_every_state_and_what_is_paused():
    call("pause", "moody")
    shown = call("stats").stdout
    counted = "1 pending, 1 queued, 1 sent, 1 failed, 1 unknown"
    assert f"replies   moody (paused): {counted}\n" in shown
    (found,) = lines(call("stats", "--json"))
    assert found["replies"]["moody"]["unknown"] == 1
    assert found["paused_channels"] == ["moody"]


# ── acting ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("replies")
def test_a_reply_is_edited_and_sent_again():
    edited = call("edit", "bbbb1111", "--content", "good now")
    assert edited.stdout == f"{IDS['failed']} edited\n"
    assert f"ackbone deliveries retry {IDS['failed']}" in edited.stderr
    assert one("bbbb1111")["status"] == "failed"
    assert call("retry", "bbbb1111").stdout == f"{IDS['failed']} due again\n"
    assert one("bbbb1111")["status"] == "pending"
    with_app(lambda app: settled(app, failed="sent"))
    assert one("bbbb1111")["content"] == "good now"


@pytest.mark.usefixtures("replies")
def test_an_edit_may_come_from_a_file_and_go_out_at_once(home: Path):
    (home / "text").write_text("two\nlines")
    call("edit", "bbbb1111", "--file", str(home / "text"), "--retry")
    assert one("bbbb1111")["content"] == "two\nlines"
    assert one("bbbb1111")["status"] == "pending"
    call("edit", "bbbb1111", "--file", "-", stdin="from a pipe")
    assert one("bbbb1111")["content"] == "from a pipe"
    call("edit", "bbbb1111", code=Exit.USAGE)
    call("edit", "bbbb1111", "--content", "a", "--file", "b", code=Exit.USAGE)
    call("edit", "bbbb1111", "--file", "/no/such/file", code=Exit.USAGE)
    assert "needs text" in call("edit", "bbbb1111", "--content", " ", code=Exit.FAILURE).stderr
    assert "it was sent" in call("edit", "aaaa1111", "--content", "x", code=Exit.CONFLICT).stderr


@pytest.mark.usefixtures("replies")
def test_an_edit_opens_the_editor_on_a_terminal(home: Path):
    editor = home / "editor"
    editor.write_text(f'#!/bin/sh\ncp "$1" {home}/seen && printf \'typed\\n\' > "$1"\n')
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "ackbone", "deliveries", "edit", "bbbb1111"]
    done = subprocess.run(
        command, stdin=secondary, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "EDITOR": str(editor), "VISUAL": ""},
    )  # fmt: skip
    os.close(primary)
    os.close(secondary)
    assert done.returncode == 0, done.stderr
    assert (home / "seen").read_text() == "bad\n"
    assert one("bbbb1111")["content"] == "typed"


@pytest.mark.usefixtures("replies")
def test_many_are_sent_again_by_choice_after_a_question():
    refused = call("retry", "--all", code=Exit.USAGE)
    assert "Send 1 reply again? Confirm with --yes." in refused.stderr
    dry = call("retry", "--channel", "moody", "--dry-run")
    assert "bbbb1111" in dry.stdout
    assert "1 reply would be sent again; nothing was changed" in dry.stderr
    (shown,) = lines(call("retry", "aaaa1111", "--dry-run", "--json"))
    assert shown["what"] == "cannot"
    assert one("bbbb1111")["status"] == "failed"
    done = call("retry", "--since", "1h", "--tenant", "acme", "--yes", "--json")
    assert lines(done) == [{"id": IDS["failed"], "error": None}]
    assert call("retry", "--all", "--yes").stderr == "no reply matches\n", "an unknown one is left"
    call("retry", "--status", "unknown", "--yes")
    assert one("cccc1111")["status"] == "pending"
    for unclear in ([], ["bbbb1111", "--all"]):
        call("retry", *unclear, code=Exit.USAGE)


@pytest.mark.usefixtures("replies")
def test_what_cannot_be_sent_again_is_said():
    assert "it was sent" in call("retry", "aaaa1111", code=Exit.CONFLICT).stderr
    some = call("retry", "aaaa1111", "bbbb1111", code=Exit.PARTIAL)
    assert "1 due again, 1 failed" in some.stderr


@pytest.mark.usefixtures("replies")
def test_replies_are_discarded():
    call("discard", "bbbb1111", "--reason", "they called")
    assert one("bbbb1111")["status"] == "discarded"
    call("discard", "cccc1111", "dddd1111", code=Exit.USAGE)
    assert call("discard", "cccc1111", "dddd1111", "--yes").stderr == "2 discarded\n"
    assert one("dddd2222")["status"] == "pending", "what stood behind it goes on"
    call("discard", "bbbb1111", code=Exit.CONFLICT)
    call("discard", code=Exit.USAGE)


@pytest.mark.usefixtures("replies")
def test_many_replies_are_discarded_by_what_they_have_in_common():
    shown = call("discard", "--channel", "moody", "--since", "1h", "--dry-run")
    assert "bbbb1111" in shown.stdout
    assert "would be discarded" in shown.stdout
    assert "cccc1111" not in shown.stdout, "what is unknown only if its state is named"
    assert shown.stderr == "1 reply would be discarded; nothing was changed\n"
    assert one("bbbb1111")["status"] == "failed"
    refused = call("discard", "--all", code=Exit.USAGE)
    assert "Discard 1 reply? Confirm with --yes." in refused.stderr
    (done,) = lines(call("discard", "--all", "--yes", "--reason", "over", "--json"))
    assert done == {"id": IDS["failed"], "error": None}
    assert one("cccc1111")["status"] == "unknown", "only those that failed"
    call("discard", "--status", "unknown", "--yes")
    assert one("cccc1111")["status"] == "discarded"
    call("discard", "--status", "pending", "--limit", "1", "--yes")
    assert one("dddd1111")["status"] == "discarded"
    assert one("dddd2222")["status"] == "pending", "what stood behind it goes on"
    assert call("discard", "--channel", "nobody", "--yes").stderr == "no reply matches\n"
    call("discard", "bbbb1111", "--all", code=Exit.USAGE)
    cannot = call("discard", "aaaa1111", "--dry-run")
    assert "cannot" in cannot.stdout
    assert cannot.stderr == "0 replies would be discarded; nothing was changed\n"
    call("discard", "--status", "sent", "--yes", code=Exit.USAGE)


@pytest.mark.usefixtures("replies")
def test_channels_are_paused_and_resumed():
    assert call("pause", "moody").stdout == "moody is paused\n"
    assert call("pause", "moody").stdout == "moody is paused (it already was)\n"
    assert "ackbone deliveries resume moody" in call("list").stderr
    assert "channel   moody (paused)" in call("show", "bbbb1111").stdout
    (resumed,) = lines(call("resume", "moody", "--json"))
    assert resumed == {"channel": "moody", "paused": False, "changed": True}
    assert "no reply was ever sent to a channel 'mody'" in call("pause", "mody").stderr


def test_a_trace_says_what_a_person_has_to_know_of_a_reply():
    async def answer(app: App) -> None:
        @app.on("ask")
        async def ask(ctx: Context) -> None:
            await ctx.reply("away", channel="moody", recipient="a")
            await ctx.reply("lost", channel="moody", recipient="b")

        heard = asyncio.Event()
        seen: set[str] = set()

        def hear(event: Event) -> None:
            seen.add(event.type)
            if {"delivery.unknown", "delivery.waiting"} <= seen:
                heard.set()

        app.observe(hear)
        await app.send("ask", {}, id="m-1")
        await heard.wait()

    with_app(answer)
    shown = call("trace", "m-1").stdout
    assert re.search(r"moody:a \(pending \w{8}, 1 retry, connection refused\): away", shown)
    assert re.search(r"moody:b \(unknown \w{8}, it may have arrived, no answer; ", shown)
