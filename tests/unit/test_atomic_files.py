"""Files that are there whole or not at all, whoever else writes them."""

from __future__ import annotations

import threading
from pathlib import Path

from ackbone.delivery.files import atomic_files


def test_two_that_write_one_file_do_not_spoil_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    bodies = [bytes([65 + n]) * 20_000 for n in range(4)]
    atomic_files.write(path, bodies[0])
    go = threading.Barrier(5)

    def write(body: bytes) -> None:
        go.wait()
        for _ in range(25):
            atomic_files.write(path, body)

    writers = [threading.Thread(target=write, args=(body,)) for body in bodies]
    for writer in writers:
        writer.start()
    go.wait()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in bodies
    assert path.read_bytes() in bodies
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_new_one_changes_nothing_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert atomic_files.write(path, b"first", new=True)
    assert not atomic_files.write(path, b"second", new=True)
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_one_of_many_that_write_a_new_one_did(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    wrote: list[bytes] = []
    go = threading.Barrier(8)

    def write(body: bytes) -> None:
        go.wait()
        if atomic_files.write(path, body, new=True):
            wrote.append(body)

    writers = [threading.Thread(target=write, args=(b"%d" % n,)) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [path.read_bytes()] == wrote


def test_gone_is_gone(tmp_path: Path) -> None:
    assert not atomic_files.remove(tmp_path / "a.json")
    assert not atomic_files.move(tmp_path / "a.json", tmp_path)
