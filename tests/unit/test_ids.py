"""Ids: UUIDv7 that never go backwards, UUIDv5 that never change."""

import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackbone.core.ids import derived_id, new_id, uuid7_block, uuid7_bytes


def test_version_and_variant() -> None:
    for _ in range(1000):
        made = uuid.UUID(new_id())
        assert made.version == 7
        assert made.variant == uuid.RFC_4122


def test_the_time_is_in_it() -> None:
    before = time.time_ns() // 1_000_000
    made = int.from_bytes(uuid7_bytes()[:6], "big")
    after = time.time_ns() // 1_000_000
    assert before <= made <= after + 20, "at most a little ahead, when many came in a millisecond"


def test_they_never_go_backwards() -> None:
    made = [uuid7_bytes() for _ in range(50_000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    texts = [new_id() for _ in range(50_000)]
    assert texts == sorted(texts)
    assert len(set(texts)) == len(texts)


@given(st.lists(st.tuples(st.sampled_from(["text", "bytes", 3]), st.integers(-2, 3)), max_size=40))
def test_all_kinds_are_one_sequence_whatever_the_clock_does(steps: list[tuple[Any, int]]) -> None:
    now = time.time_ns()
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind, passed_ms in steps:
            now += passed_ms * 1_000_000
            patch.setattr(time, "time_ns", lambda at=now: at)
            if kind == "text":
                made.append(uuid.UUID(new_id()).int)
            else:
                block = [uuid7_bytes()] if kind == "bytes" else uuid7_block(kind)
                made += [int.from_bytes(one, "big") for one in block]
    assert made == sorted(set(made))


def test_a_fork_does_not_count_on_from_the_same_id() -> None:
    """In one millisecond, where ids count upwards."""
    code = """if True:
        import os, time
        from ackbone.core.ids import new_id
        now = time.time_ns()
        time.time_ns = lambda: now
        new_id()
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, new_id().encode())
            os._exit(0)
        print(new_id(), os.read(read, 36).decode())
        os.wait()
    """
    ours, childs = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert ours[:13] == childs[:13]
    assert abs(uuid.UUID(ours).int - uuid.UUID(childs).int) > 1_000_000


def test_they_never_go_backwards_when_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    first = [uuid7_bytes() for _ in range(10)]
    monkeypatch.setattr(time, "time_ns", lambda: now - 3_600_000_000_000)
    second = [uuid7_bytes() for _ in range(10)]
    assert first + second == sorted(first + second)


def test_threads_get_different_ones() -> None:
    made: list[bytes] = []

    def make() -> None:
        for _ in range(1000):
            made.append(uuid7_bytes())
            made.append(uuid.UUID(new_id()).bytes)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8000


names = st.text(alphabet=st.characters(exclude_characters="\x1f"), min_size=1, max_size=20)


@given(st.lists(names, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=4))
def test_other_parts_give_another_id(first: list[str], second: list[str]) -> None:
    try:
        same = derived_id(*first) == derived_id(*second)
    except UnicodeEncodeError:
        return
    assert same is (first == second)
