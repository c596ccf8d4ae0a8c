"""Child processes that never come to their first message: an error says why, and none is left."""

import asyncio
import os
import sys
from typing import Any, cast

import pytest

from ackbone.core.errors import HandlerFailed
from ackbone.engine import child_pool
from ackbone.engine.child_pool import Children
from ackbone.engine.context import Context
from ackbone.engine.handlers import Handler

HANDLER = Handler(type="n", queue="jobs", call=print, isolation="process")


async def start(code: str) -> Children:
    children = Children([sys.executable, "-c", code], size=1)
    await children.call(HANDLER, cast(Context, None))
    return children


async def test_one_that_hangs_while_it_loads_the_app_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_pool, "READY_S", 0.2)
    spawned: list[int] = []
    spawn = child_pool.Child.spawn

    async def noted(*args: Any) -> Any:
        child = await spawn(*args)
        spawned.append(child.pid)
        return child

    monkeypatch.setattr(child_pool.Child, "spawn", noted)
    async with asyncio.timeout(20):
        with pytest.raises(HandlerFailed, match="has not loaded the app within"):
            await start("import time; time.sleep(600)")
    (pid,) = spawned
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_one_that_ends_before_it_has_loaded_the_app_tells_how() -> None:
    with pytest.raises(HandlerFailed, match=r"cannot load the app: .* exit code 3"):
        await start("raise SystemExit(3)")
    with pytest.raises(HandlerFailed, match=r"cannot load the app: .* killed by SIGKILL"):
        await start("import os; os.kill(os.getpid(), 9)")
