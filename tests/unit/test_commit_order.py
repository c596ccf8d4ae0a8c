"""What follows from a transaction happens in one order, whatever the dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from ackbone.core import events
from ackbone.core.broker import Outgoing
from ackbone.core.notices import Notices
from ackbone.core.outbound.subscribers import Subscriber, Subscribers
from ackbone.core.store import Send
from ackbone.store.commit import Transactions
from ackbone.store.sqlite.sql import SQL
from ackbone.store.unit import OUTGOING, WORK, Change, Row, Tx

T = TypeVar("T")

ENDED = ("acme", "orders", "m-1", events.SUCCEEDED, {"status": "success"})


class FakeTx:
    """`Tx`, `OutgoingRows` and `DeliveryRows`, which note what they are asked for."""

    sql = SQL
    repeated = False

    def __init__(self, steps: list[str]) -> None:
        self.letters: dict[str, Any] = {}
        self.outgoing = self.deliveries = self
        self._steps = steps

    async def rows(self, statement: str, *_: Any) -> list[Row]:
        assert statement == SQL.store.ended_tasks
        self._steps.append("notices")
        return [(*ENDED[:3], "pay", b"1", 0, None, None, "worker")]

    async def moment(self) -> int:
        return 1

    def insert(self, rows: Sequence[Row]) -> None:
        self._steps.append(f"{len(rows)} deliveries")

    def publish(self, sends: Sequence[Send], now_us: int) -> None:
        self._steps.append(f"{len(sends)} messages")


class Recorded(Transactions[Tx]):
    """A dialect without a database."""

    def __init__(self, notices: Notices, subscribers: Subscribers) -> None:
        super().__init__(lambda _: notices, subscribers)
        self.steps: list[str] = []
        self.change = Change()

    async def read(self, statement: str, *values: Any) -> list[Row]:
        raise AssertionError("nothing is read")

    async def _transact(
        self, op: Callable[[Tx, Change], Awaitable[T]], *, worker_id: int, durable: bool
    ) -> tuple[T, Change]:
        tx = cast(Tx, FakeTx(self.steps))

        async def append() -> None:
            self.steps.append(f"{len(self.change.entries)} events")

        result = await op(tx, self.change)
        await self._conclude(tx, self.change, append)
        self.steps.append("commit")
        return result, self.change

    async def _pass_on(self, tx: Tx, change: Change) -> None:
        self.steps.append("keys and conversations")


async def test_what_follows_from_a_change_is_written_in_order() -> None:
    subscriber = Subscriber(channel="http", recipient="https://example.org", events=("task.*",))
    store = Recorded(Notices(results="results"), Subscribers([subscriber]))
    store.on_events(lambda entries: store.steps.append(f"{len(entries)} heard"))

    async def op(tx: Tx, change: Change) -> str:
        store.steps.append("rows")
        change.entries.append(ENDED)
        change.let_go("acme", "orders", "key", None)
        more = Outgoing(id="m-2", body=b"")
        change.sends.append(Send(queue="more", outgoing=more, tenant_id="acme"))
        change.topics.add(WORK)
        return "result"

    assert await store.write(op, worker_id=1) == "result"
    assert store.steps == [
        "rows",
        "keys and conversations",
        "notices",
        "1 deliveries",
        "2 messages",
        "1 events",
        "commit",
        "1 heard",
    ]
    assert store.change.topics == {WORK, OUTGOING}
