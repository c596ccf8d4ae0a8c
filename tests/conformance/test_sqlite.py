"""The embedded broker passes the suite: one file, clients as processes have them."""

import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.broker import Broker
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.testing import BrokerConformance


class TestSqlite(BrokerConformance):
    quiet_s = 0.05
    delay_s = 0.4
    tolerance_s = 5.0  # a shared machine
    patience_s = 30.0

    def setup_method(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp")
        self._path = Path(self._folder.name) / "queue.db"
        ensure_schema(self._path)

    def teardown_method(self) -> None:
        self._folder.cleanup()

    async def make_broker(self) -> SqliteBroker:
        return SqliteBroker(self._path)

    async def second_client(self, first: Broker) -> SqliteBroker:
        return SqliteBroker(self._path)

    async def restart(self, broker: Broker) -> None:
        await broker.close()
        await broker.open()

    async def dead_letters(self, broker: Broker, queue: str) -> Sequence[bytes]:
        conn = sqlite3.connect(self._path)
        try:
            found = conn.execute("SELECT body FROM dead_letters WHERE queue_name = ?", (queue,))
            return [body for (body,) in found]
        finally:
            conn.close()
