"""The test server for Telegram: what it would let through, no test could find."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.servers.telegram_rules import (
    Refused,
    Windows,
    check_album,
    check_caption,
    check_keyboard,
    check_text,
    plain_text,
)


def taken(windows: Windows, chat: str, times: list[float]) -> list[bool]:
    found = []
    for now_s in times:
        try:
            windows.take("1", chat, now_s)
        except Refused:
            found.append(False)
        else:
            found.append(True)
    return found


def test_one_a_second_in_a_chat() -> None:
    assert taken(Windows(), "7", [0.0, 0.9, 1.0, 1.5, 2.1]) == [True, False, True, False, True]


def test_twenty_a_minute_in_a_group() -> None:
    times = [float(second) for second in range(21)]
    assert taken(Windows(), "-7", times) == [True] * 20 + [False]
    assert taken(Windows(), "@news", [*times, 60.0]) == [True] * 20 + [False, True]


def test_thirty_a_second_for_a_bot() -> None:
    windows = Windows()
    for chat in range(30):
        windows.take("1", str(chat), 0.0)
    windows.take("2", "30", 0.0)
    with pytest.raises(Refused, match="retry after 1"):
        windows.take("1", "30", 0.5)
    windows.take("1", "30", 1.0)


@pytest.mark.parametrize(
    ("text", "plain"),
    [("*a* _b_ `c`", "a b c"), ("[x](http://y)", "x"), ("```\nc\n```", "\nc\n"), (r"\*a", "*a")],
)
def test_markdown_that_is_read(text: str, plain: str) -> None:
    assert plain_text(text, "Markdown") == plain


@pytest.mark.parametrize("text", ["*a", "a_b", "`", "```a``", "[a"])
def test_markdown_that_is_not(text: str) -> None:
    assert plain_text(text, None) == text
    with pytest.raises(Refused, match="can't parse entities: Can't find end"):
        plain_text(text, "Markdown")


def test_lengths() -> None:
    check_text("🎈" * 2048, None)
    check_caption({"caption": "🎈" * 512})
    with pytest.raises(Refused, match="message is too long"):
        check_text("🎈" * 2048 + "x", None)
    with pytest.raises(Refused, match="caption is too long"):
        check_caption({"caption": "🎈" * 512 + "x"})
    with pytest.raises(Refused, match="text is empty"):
        check_text(" \n", None)


def test_albums_and_buttons() -> None:
    photo, audio = {"type": "photo", "media": "p"}, {"type": "audio", "media": "a"}
    check_album([photo, photo])
    for album in ([photo], [photo] * 11, [photo, audio]):
        with pytest.raises(Refused):
            check_album(album)
    for button in (
        {"text": "x"},
        {"text": "", "url": "u"},
        {"text": "x", "callback_data": "d" * 65},
    ):
        with pytest.raises(Refused):
            check_keyboard({"inline_keyboard": [[button]]})


def test_as_a_process_of_its_own() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.servers.telegram", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert posted(f"{url}/_test/faults", [{"kind": "answer", "code": 500}])["ok"]
            sent = [
                posted(f"{url}/bot12:abcdef/sendMessage", {"chat_id": 1, "text": "hi"})
                for _ in range(3)
            ]
            log = posted(f"{url}/_test/log", None)
        finally:
            process.kill()
    assert [answer.get("error_code", 200) for answer in sent] == [500, 200, 429]
    assert [entry["code"] for entry in log] == [500, 200, 429]
    assert [entry["at_s"] for entry in log] == sorted(entry["at_s"] for entry in log)


def posted(url: str, body: Any) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as no:
        with no:
            return json.load(no)
