"""Messages that RabbitMQ moves to dead-letter queues: each becomes a dead letter of ours, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiormq
import msgspec
import pytest
from pamqp import commands as spec

from ackbone import App, Context
from ackbone.admin.dead_letters import DeadLetters
from ackbone.cli.session import encoder
from ackbone.composition import background
from ackbone.config import Config, Queue
from ackbone.core.errors import BrokerError
from ackbone.core.ids import new_id
from ackbone.core.outcome import GIVEN_UP
from ackbone.core.records import DeadLetter, LetterFilter
from ackbone.core.store import Verdict
from ackbone.engine.broker_dead_letters import BrokerDeadLetters
from tests.integration.rabbit_lab import until
from tests.servers.rabbitmq import RabbitServer

pytestmark = [pytest.mark.xdist_group("rabbitmq"), pytest.mark.timeout(120)]


class Lab:
    """An app whose queues were declared by another program, with one dead-letter queue for all."""

    def __init__(self, app: App, server: RabbitServer, channel: Any, name: str) -> None:
        self.app = app
        self.server = server
        self.channel = channel
        self.queue = name
        self.dead = f"{name}.dead"

    async def declare(self, suffix: str = "", **arguments: Any) -> str:
        name = f"{self.queue}{suffix}"
        given = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": self.dead}
        given |= {name.replace("_", "-"): value for name, value in arguments.items()}
        await self.channel.queue_declare(self.dead, durable=True)
        await self.channel.queue_declare(name, durable=True, arguments=given)
        return name

    async def publish(self, queue: str, body: bytes, **properties: Any) -> None:
        about = spec.Basic.Properties(**properties)
        await self.channel.basic_publish(body, routing_key=queue, properties=about)

    async def rejected(self, queue: str, *, requeue: bool = False) -> None:
        """Reject the first message of a queue, as another program's reader does."""

        async def got() -> Any:
            found = (await self.channel.basic_get(queue)).delivery
            return found if isinstance(found, spec.Basic.GetOk) else None

        await self.channel.basic_reject((await until(got)).delivery_tag, requeue=requeue)

    async def until_moved(self, n: int) -> None:
        """Wait until the dead-letter queue has `n` messages."""

        async def moved() -> bool:
            found = await self.channel.queue_declare(self.dead, passive=True)
            return bool(found.message_count == n)

        await until(moved)

    async def imported(self) -> Sequence[DeadLetter]:
        worker = await self.app.store.register("import")
        subs = self.app.subscriptions()
        try:
            await BrokerDeadLetters(self.app.store, self.app.broker, subs).step(worker)  # type: ignore[arg-type]
        finally:
            await self.app.store.leave(worker)
        return await self.letters()

    async def letters(self) -> Sequence[DeadLetter]:
        records = self.app.storage.records(self.app.store)
        return await records.letters_by_id(await records.letter_ids(LetterFilter(), limit=None))


MakeLab = Callable[..., AbstractAsyncContextManager[Lab]]


@pytest.fixture(params=["rabbitmq", "newest_rabbitmq"])
def make_lab(request: pytest.FixtureRequest, home: Path) -> MakeLab:
    server: RabbitServer = request.getfixturevalue(request.param)

    @asynccontextmanager
    async def opened(*suffixes: str, on: Callable[[Context], Any] = print) -> AsyncIterator[Lab]:
        name = f"dead-{new_id()[-8:]}"
        queues = {
            f"{name}{suffix}": Queue(
                codec="json", ordered=False, broker_dead_letters=f"{name}.dead"
            )
            for suffix in ("", *suffixes)
        }
        app = App(Config(home=home, broker=server.url, queues=queues))
        for queue in queues:
            app.on("queue_message", queue=queue)(on)
        connection = await aiormq.connect(server.url)
        try:
            async with app:
                yield Lab(app, server, await connection.channel(), name)
        finally:
            await connection.close()
            named = [each["name"] for each in server.api("GET", "queues/%2F")]
            server.forget(*(each for each in named if each.startswith(name)))

    return opened


async def test_each_reason(make_lab: MakeLab):
    """With the reason and the body, under the queue that it was in, without the server's
    headers."""
    async with make_lab("-full", "-refused", "-limited") as lab:
        late = await lab.declare(x_message_ttl=1)
        await lab.publish(late, b'{"n": 1}', message_id="late", headers={"x-mine": "kept"})
        full = await lab.declare("-full", x_max_length=1)
        for n in (2, 3):
            await lab.publish(full, b'{"n": %d}' % n, message_id=f"full-{n}")
        refused = await lab.declare("-refused")
        await lab.publish(refused, b"{", message_id="refused")
        await lab.rejected(refused)
        limited = await lab.declare("-limited", x_queue_type="quorum", x_delivery_limit=1)
        await lab.publish(limited, b'{"n": 4}')
        for _ in range(2):
            await lab.rejected(limited, requeue=True)
        await lab.until_moved(4)
        found = {each.queue: each for each in await lab.imported()}
        await lab.until_moved(0)
        assert len(await lab.imported()) == len(found) == 4
    assert [found[each].reason for each in (late, full, refused, limited)] == [
        GIVEN_UP,
        GIVEN_UP,
        "undecodable",
        GIVEN_UP,
    ]
    assert f"out of queue {late}: the time to live" in found[late].error
    assert "the queue was full" in found[full].error
    assert "a reader rejected it; " in found[refused].error
    assert "returned too often" in found[limited].error
    bodies = [found[each].body for each in (late, full, refused, limited)]
    assert bodies == [b'{"n": 1}', b'{"n": 2}', b"{", b'{"n": 4}']
    assert "x-mine" in str(found[late].body_info)
    assert "death" not in str(found[late].body_info)


@pytest.mark.parametrize("deaths", [5, True, "text", [1], [{}]], ids=repr)
async def test_a_message_that_was_put_into_the_dead_letter_queue(make_lab: MakeLab, deaths: Any):
    """By a program that writes the server's header itself."""
    async with make_lab() as lab:
        await lab.declare()
        await lab.publish(lab.dead, b"1", message_id="odd", headers={"x-death": deaths})
        await lab.until_moved(1)
        (found,) = await lab.imported()
    assert (found.reason, found.body) == (GIVEN_UP, b"1")


async def test_a_policy_on_queues_that_we_declare(make_lab: MakeLab):
    """As the guide says. The message keeps its id, and other programs' limits end it."""
    async with make_lab() as lab:
        definition = {
            "message-ttl": 1,
            "dead-letter-exchange": "",
            "dead-letter-routing-key": lab.dead,
        }
        pattern = f"^{lab.queue}(:p[0-3])?$"
        policy = {"pattern": pattern, "definition": definition, "apply-to": "queues"}
        path = f"policies/%2F/{lab.queue}"
        await asyncio.to_thread(lab.server.api, "PUT", path, policy)
        try:
            await lab.channel.queue_declare(lab.dead, durable=True)
            receipts = [
                await lab.app.send("queue_message", n, queue=lab.queue, priority=priority)
                for n, priority in enumerate((1, 3))
            ]
            await lab.until_moved(2)
            found = await lab.imported()
        finally:
            await asyncio.to_thread(lab.server.api, "DELETE", path)
    assert {each.message_id for each in found} == {each.id for each in receipts}
    assert {(each.queue, each.reason) for each in found} == {(lab.queue, GIVEN_UP)}
    assert all("the time to live" in each.error for each in found)


async def test_a_crash_before_the_acknowledgement(
    make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch
):
    async with make_lab() as lab:
        queue = await lab.declare(x_message_ttl=1)
        for n in range(150):  # more than one batch
            await lab.publish(queue, b"%d" % n, message_id=f"m{n}")
        await lab.until_moved(150)
        claim = lab.app.store.claim

        async def crash(*args: Any, **options: Any) -> Sequence[Verdict]:
            await claim(*args, **options)
            raise RuntimeError("the process ends here")

        with monkeypatch.context() as patched:
            patched.setattr(lab.app.store, "claim", crash)
            with pytest.raises(RuntimeError):
                await lab.imported()
        assert 0 < len(await lab.letters()) <= 100
        await lab.until_moved(150)
        await lab.imported()
        await lab.until_moved(0)
        assert sorted(int(each.body or b"") for each in await lab.letters()) == list(range(150))


async def test_a_queue_that_cannot_be_read_does_not_stop_the_others(make_lab: MakeLab):
    async with make_lab("-good") as lab:
        bad, good = lab.app.subscriptions()
        bad = msgspec.structs.replace(bad, broker_dead_letters="x" * 256)
        await lab.channel.queue_declare(lab.dead, durable=True)
        await lab.publish(lab.dead, b"1", message_id="m")
        await lab.until_moved(1)
        letters = BrokerDeadLetters(lab.app.store, lab.app.broker, [bad, good])  # type: ignore[arg-type]
        with pytest.raises(BrokerError, match="xxx…: longer than 255 bytes"):
            await letters.step(await lab.app.store.register("import"))
        assert [each.queue for each in await lab.letters()] == [good.queue]


async def test_a_replay_goes_to_the_queue_that_it_was_in(
    make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch
):
    """Imported by the relay of a running worker; the queue of the highest priority counts as its
    queue."""
    monkeypatch.setattr(background, "LETTERS_S", 0.1)
    ran: list[Any] = []

    async def handle(ctx: Context) -> None:
        ran.append(ctx.payload)

    async with make_lab("-other", on=handle) as lab:
        queue = await lab.declare("-other")
        names = {queue, await lab.declare("-other:p3")}
        for name in names:
            await lab.publish(name, b'"%s"' % name.encode(), message_id=name)
            await lab.rejected(name)
        await lab.until_moved(2)
        working = asyncio.create_task(lab.app.work())

        async def both() -> Sequence[DeadLetter]:
            found = await lab.letters()
            return found if len(found) == 2 else ()

        assert {each.queue for each in await until(both)} == {queue}
        assert not ran
        storage, store = lab.app.storage, lab.app.store
        async with storage.operations(store, by="test") as operations:
            desk = DeadLetters(
                storage.records(store),
                operations,
                encode=encoder(lab.app),
                codec_of=lambda _: "json",
            )
            ids = await desk.chosen(await lab.letters())
            assert all([each.error is None async for each in desk.replay(ids)])

        async def handled() -> bool:
            return {*ran} == names

        await until(handled)
        working.cancel()
        await asyncio.wait({working})
        assert len(ran) == 2
        assert not await lab.letters()
