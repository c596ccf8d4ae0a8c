"""The screen of `ackbone chat`: whole lines above the prompt; lines from wherever they come."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from ackbone.cli.chat_screen import PROMPT, Screen, TypedLines


def drawn(text: str, width: int = 40) -> list[str]:
    """What a terminal shows after this: it knows \\n, \\r and the clearing of a line's rest."""
    rows, column = [""], 0
    for part in text.replace("\x1b[K", "\x00"):
        if part == "\n":
            rows.append("")
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\x00":
            rows[-1] = rows[-1][:column]
        else:
            rows[-1] = rows[-1][:column] + part + rows[-1][column + 1 :]
            column += 1
    return rows


def test_a_line_that_comes_while_somebody_types_stands_above_the_prompt():
    written: list[str] = []
    screen = Screen(prompt=PROMPT, write=written.append)
    screen.show("hello")
    screen.ask()
    screen.show("news").result()
    written.append("typed")  # by the terminal, as an echo
    screen.show("more\nnews")
    screen.close()
    assert drawn("".join(written)) == ["hello", "news", "more", "news", PROMPT]


def test_after_an_answer_lines_follow_it():
    written: list[str] = []
    screen = Screen(prompt=PROMPT, write=written.append)
    screen.ask()
    screen.answered()
    screen.show("below")
    screen.ask()
    screen.leave()
    screen.show("the end")
    screen.close()
    assert "".join(written) == f"{PROMPT}below\n{PROMPT}\nthe end\n"


def test_without_a_person_there_is_no_prompt_and_no_escape():
    written: list[str] = []
    screen = Screen(write=written.append)
    screen.ask()
    screen.show("a")
    screen.leave()
    screen.close()
    assert "".join(written) == "a\n"


def test_programs_get_one_document_a_line():
    written: list[str] = []
    screen = Screen(as_json=True, write=written.append)
    screen.show("a\nb")
    screen.show("text", {"reply": {"id": 1}})
    screen.close()
    assert [json.loads(line) for line in "".join(written).splitlines()] == [
        {"line": "a\nb"},
        {"reply": {"id": 1}},
    ]


def test_a_screen_that_is_gone_is_told_to_whoever_asks():
    def gone(text: str) -> None:
        raise BrokenPipeError("gone")

    screen = Screen(write=gone)
    with pytest.raises(BrokenPipeError):
        screen.show("hello").result()
    screen.close()


async def typed(fd: int) -> list[str]:
    async with asyncio.timeout(30):
        return [line async for line in TypedLines(fd)]


async def test_lines_come_from_a_pipe_as_they_are_written():
    reader, writer = os.pipe()
    lines = TypedLines(reader)
    found = aiter(lines)
    os.write(writer, "grüß".encode()[:3])
    os.write(writer, "grüß".encode()[3:] + b" dich\r\nsecond\nlast")
    assert await anext(found) == "grüß dich"
    assert await anext(found) == "second"
    os.close(writer)
    assert await anext(found) == "last"
    with pytest.raises(StopAsyncIteration):
        await anext(found)
    os.close(reader)


async def test_lines_come_from_a_file_and_from_nowhere(tmp_path: Path):
    (tmp_path / "lines").write_text("one\ntwo\n")
    with (tmp_path / "lines").open("rb") as file:
        assert await typed(file.fileno()) == ["one", "two"]
    with open(os.devnull, "rb") as file:
        assert await typed(file.fileno()) == []


async def test_somebody_else_may_end_the_lines():
    reader, writer = os.pipe()
    lines = TypedLines(reader)
    waiting = asyncio.create_task(anext(aiter(lines), None))
    await asyncio.sleep(0)
    lines.end()
    assert await asyncio.wait_for(waiting, 30) is None
    os.close(reader)
    os.close(writer)
