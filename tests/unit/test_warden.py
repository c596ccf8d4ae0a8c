"""A warden counts the suspects of its own app, and no others."""

from collections.abc import Sequence
from pathlib import Path

from ackbone.app import App
from ackbone.config import load_config
from ackbone.core.store import Suspects, Worker
from ackbone.engine.context import Context
from ackbone.processes.suspects import Warden


async def test_only_suspects_of_types_that_its_children_handle_are_counted(home: Path) -> None:
    app = App(load_config(environ={}, overrides={"home": str(home)}))

    @app.on("mine")
    async def mine(ctx: Context) -> None: ...

    async with app:
        asked: list[Worker] = []

        async def suspects(subscriptions: Sequence[str], *, worker: Worker) -> Suspects:
            asked.append(worker)
            return Suspects()

        app.store.suspects = suspects  # type: ignore[method-assign]
        worker = await app.store.register("warden")
        await Warden(app, "app:app").step(worker)
    (as_child,) = asked
    assert as_child.offers is not None
    assert set().union(*as_child.offers.types.values()) == {"mine"}
