"""One app in several loops and threads, one after the other and at once."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ackbone import App, Config


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(Config(home=tmp_path))


def test_blocks_that_overlap_may_do_so_in_one_loop_after_the_other(app: App) -> None:
    """As in a test suite, where each test has a loop of its own and the app is a module's."""

    async def one() -> None:
        async with app:
            await app.send("greeting")

    async def both() -> None:
        await asyncio.gather(one(), one())

    for _ in range(3):
        asyncio.run(both())


def test_threads_that_send_first_at_the_same_time_share_one_store(app: App) -> None:
    """As in a web server with threads."""
    together = threading.Barrier(8)

    def send(n: int) -> str:
        together.wait(30)
        return app.send_sync("greeting", n).id

    with ThreadPoolExecutor(8) as pool:
        sent = [future.result(30) for future in [pool.submit(send, n) for n in range(8)]]
    assert len(set(sent)) == 8
    loops = [each.name for each in threading.enumerate() if each.name == "ackbone-sync"]
    assert loops == ["ackbone-sync"]
    app.close_sync()
    assert "ackbone-sync" not in [each.name for each in threading.enumerate()]


async def test_tasks_that_open_at_the_same_time_open_one_store(app: App) -> None:
    await asyncio.gather(app.open(), app.open(), app.open())
    writers = [each.name for each in threading.enumerate() if "ackbone-writer" in each.name]
    await app.close()
    assert len(writers) == 1
