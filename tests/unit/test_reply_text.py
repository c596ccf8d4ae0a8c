"""Long texts in parts, and the keys and marks of repeats."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.core.errors import SendUnknown, TemporaryError
from ackbone.core.outbound.delivery import Outbound
from ackbone.delivery.channels.reply_text import (
    FENCE,
    MARK,
    doubt_placed,
    key_short,
    key_uuid,
    marked,
    readable,
    split,
    split_fenced,
    utf16_length,
)
from ackbone.delivery.files.channel_sender import Channels

texts = st.text(st.sampled_from("ab \n🎈é中`*"), max_size=400)
lines = st.lists(
    st.sampled_from(["```python", "```", "x = 1", "some words 🎈🎈", "", "y" * 90, "  ```"]),
    max_size=40,
)


@given(texts, st.integers(2, 60))
def test_joined_parts_are_the_text(text: str, limit: int) -> None:
    parts = split(text, limit)
    assert "".join(parts) == text
    assert all(utf16_length(part) <= limit for part in parts)
    assert len(parts) == 1 or all(parts)


@given(texts, st.integers(1, 60))
def test_lengths_are_counted_as_asked(text: str, limit: int) -> None:
    parts = split(text, limit, length=len)
    assert "".join(parts) == text
    assert all(len(part) <= limit for part in parts)


def fence_lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.lstrip(" ").startswith(FENCE)]


def without_fences(text: str) -> str:
    kept = (line for line in text.split("\n") if not line.lstrip(" ").startswith(FENCE))
    return "".join(kept)


@given(lines, st.integers(64, 200))
def test_fences_that_were_cut_are_closed_and_opened_again(found: list[str], limit: int) -> None:
    text = "\n".join(found)
    parts = split_fenced(text, limit)
    assert all(utf16_length(part) <= limit for part in parts)
    assert "".join(map(without_fences, parts)) == without_fences(text)
    assert all(len(fence_lines(part)) % 2 == 0 for part in parts[:-1])
    assert len(fence_lines(parts[-1])) % 2 == len(fence_lines(text)) % 2


@given(texts, st.integers(64, 200))
def test_any_text_with_fences_stays_within_the_limit(text: str, limit: int) -> None:
    parts = split_fenced(text, limit)
    assert all(utf16_length(part) <= limit for part in parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("short", ["short"]),
        ("", [""]),
        ("one two three", ["one two ", "three"]),
        ("one\ntwo three", ["one\ntwo ", "three"]),
        ("one t\n\nwo three", ["one t\n\n", "wo three"]),
        ("abcdefghijkl", ["abcdefghij", "kl"]),
        ("🎈🎈🎈🎈🎈🎈", ["🎈🎈🎈🎈🎈", "🎈"]),
    ],
)
def test_where_it_is_cut(text: str, parts: list[str]) -> None:
    assert split(text, 10) == parts


def test_a_fence_that_fits_is_not_cut() -> None:
    before, block = "words " * 8, "```\ncode code code code code\n```"
    assert split_fenced(f"{before}\n{block}", 64) == [f"{before}\n", block]


def test_a_fence_that_does_not_fit_is_opened_again() -> None:
    code = [f"line_{n} = {n}" for n in range(20)]
    parts = split_fenced("\n".join(["```python", *code, "```"]), 100)
    assert len(parts) > 2
    assert all(part.startswith("```python\n") and part.endswith("```") for part in parts)


def test_blank_parts_are_left_out() -> None:
    assert readable(["a", " \n", "b"]) == ["a", "b"]
    assert readable([" "]) == [""]


# -- repeats --------------------------------------------------------------------------------------


def reply(**other: Any) -> Outbound:
    fields: dict[str, Any] = {
        "id": "0d3f8a52-6d0b-4e0e-9c38-4f6f2f0f7a11",
        "tenant_id": "default",
        "channel": "c",
        "recipient": "r",
        "content": "hello",
    }
    return Outbound(**{**fields, **other})


def test_a_mark() -> None:
    assert marked(reply()) == reply()
    assert marked(reply(in_doubt=True)).content == "(may be a repeat) hello"
    assert marked(reply(in_doubt=True, content="")).content == "(may be a repeat)"
    fenced = marked(reply(in_doubt=True, content="```\nx\n```")).content
    assert fenced == "(may be a repeat)\n```\nx\n```"
    assert len(fenced) <= len(MARK) + len("```\nx\n```")


def test_keys_are_of_the_part_and_the_same_on_every_attempt() -> None:
    first, second = reply(), reply(receipts=("1",))
    assert key_uuid(first) == first.id
    assert key_uuid(second) == key_uuid(reply(receipts=("x",), call=9)) != first.id
    assert str(uuid.UUID(key_uuid(reply(id="order 7")))) == key_uuid(reply(id="order 7"))
    assert key_short(first) != key_short(second)
    assert len(key_short(first)) == 25


# -- with the queue of files ----------------------------------------------------------------------


class Parrot:
    """A channel that sends words one by one, and fails when it is told."""

    name = "parrot"

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fails: list[Exception] = []

    def parts(self, reply: Outbound) -> list[Outbound]:
        return [msgspec.structs.replace(reply, content=word) for word in reply.content.split()]

    async def send(self, reply: Outbound) -> str:
        if self.fails and len(reply.receipts) == 1:
            raise self.fails.pop()
        self.said.append(reply.content)
        return reply.content

    async def close(self) -> None:
        """Nothing is open."""


async def test_parts_that_arrived_are_not_sent_again() -> None:
    parrot = Parrot()
    channels = Channels(parrot)
    parrot.fails = [TemporaryError("later"), TemporaryError("later")]
    for _ in range(2):
        with pytest.raises(TemporaryError):
            await channels("parrot", "roof", "one two three", delivery_id="1")
    await channels("parrot", "roof", "one two three", delivery_id="1")
    assert parrot.said == ["one", "two", "three"]
    await channels("parrot", "roof", "one", delivery_id="1")
    assert parrot.said[3:] == ["one"], "nothing is remembered of what is done"


class Marking(Parrot):
    """Says of a word that it may be a repeat."""

    def parts(self, reply: Outbound) -> list[Outbound]:
        return doubt_placed(reply, super().parts(reply))

    async def send(self, reply: Outbound) -> str:
        return await super().send(marked(reply))


async def test_what_another_process_may_have_sent_is_marked_part_by_part() -> None:
    parrot = Marking()
    channels = Channels(parrot)  # of a process that was started after a crash
    parrot.fails = [TemporaryError("later")]
    with pytest.raises(TemporaryError):
        await channels("parrot", "roof", "one two three", delivery_id="1", in_doubt=True)
    await channels("parrot", "roof", "one two three", delivery_id="1", in_doubt=True)
    assert parrot.said == [f"(may be a repeat) {word}" for word in ("one", "two", "three")]


async def test_the_first_part_that_is_in_doubt_is_marked_and_no_other() -> None:
    parrot = Marking()
    channels = Channels(parrot)
    silence = parrot.send
    errors: list[Exception] = [SendUnknown("no answer"), TemporaryError("later")]

    async def send(reply: Outbound) -> str:
        if errors:
            raise errors.pop(0)
        return await silence(reply)

    parrot.send = send  # type: ignore[method-assign]
    with pytest.raises(SendUnknown):
        await channels("parrot", "roof", "one two", delivery_id="1")
    with pytest.raises(TemporaryError):
        await channels("parrot", "roof", "one two", delivery_id="1", in_doubt=True)
    await channels("parrot", "roof", "one two", delivery_id="1", in_doubt=True)
    assert parrot.said == ["(may be a repeat) one", "two"]


async def test_the_part_that_is_in_doubt_is_marked_and_no_other() -> None:
    parrot = Marking()
    channels = Channels(parrot)
    parrot.fails = [TemporaryError("later"), SendUnknown("no answer")]
    with pytest.raises(SendUnknown):
        await channels("parrot", "roof", "one two three", delivery_id="1")
    with pytest.raises(TemporaryError):
        await channels("parrot", "roof", "one two three", delivery_id="1", in_doubt=True)
    await channels("parrot", "roof", "one two three", delivery_id="1", in_doubt=True)
    assert parrot.said == ["one", "(may be a repeat) two", "three"]


async def test_a_text_that_was_changed_meanwhile_is_sent_whole() -> None:
    parrot = Parrot()
    channels = Channels(parrot)
    parrot.fails = [TemporaryError("later")]
    with pytest.raises(TemporaryError):
        await channels("parrot", "roof", "one two", delivery_id="1")
    await channels("parrot", "roof", "four", delivery_id="1")
    assert parrot.said == ["one", "four"]
