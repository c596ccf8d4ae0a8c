"""Faults that are planted into the real protocol, to see that the model finds them.

Each rewrites statements on their way to the database. A plant counts how often it changed
something: one that no longer matches any statement would prove nothing, and fails its test.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from tests.property.protocol_world import Mode, World

Change = Callable[[str], str]


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, and the world that shows it."""

    name: str
    mode: Mode
    rewrite: Change | None = None
    leaks: str | None = None
    lazy: bool = False
    """Commits that only turn out to need it are not synced."""
    shows: str
    """What the model must say of it (a regular expression)."""

    def into(self, world: World) -> None:
        world.file.conn.plant(self.rewrite, self.leaks)
        world.file.lazy = self.lazy


def _replacing(*pairs: tuple[str, str], only: str = "") -> Change:
    """Replace each pattern, in statements that match `only`."""

    def rewrite(sql: str) -> str:
        if re.search(only, sql) is None:
            return sql
        for pattern, text in pairs:
            sql = re.sub(pattern, text, sql)
        return sql

    return rewrite


_FINISH = r"^WITH u |SET status = .*AND worker_id = \? AND epoch = \?"
"""The statements of finish: the batch of successes, and the single outcome."""

PLANTS = (
    Plant(
        name="finish does not ask whether the message is running",
        mode=Mode.FUSED,
        rewrite=_replacing((r" AND status = 'running'(?= RETURNING held$)", ""), only=_FINISH),
        shows="committed twice|P3",
    ),
    Plant(
        name="finish does not ask for the token",
        mode=Mode.FUSED,
        rewrite=_replacing(
            (r"queue_executions\.worker_id = u\.worker", "u.worker IS NOT NULL"),
            (r"queue_executions\.epoch = u\.epoch", "u.epoch IS NOT NULL"),
            (r"AND worker_id = \? AND epoch = \?", "AND ? IS NOT NULL AND ? IS NOT NULL"),
            only=_FINISH,
        ),
        shows="belongs to .* and holds",
    ),
    Plant(
        name="a key is taken over while its message runs",
        mode=Mode.BROKER,
        rewrite=_replacing(("^INSERT OR IGNORE", "INSERT OR REPLACE"), only="idempotency_keys"),
        shows="P4",
    ),
    Plant(
        name="a conversation is adopted in the wrong order",
        mode=Mode.FUSED,
        rewrite=_replacing(
            ("ORDER BY seq", "ORDER BY seq DESC"), only="FROM messages.*lane IS NOT NULL"
        ),
        shows="order",
    ),
    Plant(
        name="any message of a conversation may run",
        mode=Mode.ORDERED,
        rewrite=_replacing(
            (r"\(a\.lane IS NULL OR NOT EXISTS .*?\)\)", "1"),
            (r"(SELECT 1 FROM queue_executions WHERE tenant_id = \? .*) LIMIT 1$", r"\1 LIMIT 0"),
            only="lane",
        ),
        shows="order",
    ),
    Plant(
        name="the last of a conversation is promoted, not the first",
        mode=Mode.ORDERED,
        rewrite=_replacing(("ORDER BY lane_seq LIMIT 1", "ORDER BY lane_seq DESC LIMIT 1")),
        shows="never came to rest",
    ),
    Plant(
        name="a key is not freed when its message fails",
        mode=Mode.BROKER,
        rewrite=_replacing(("$", " AND 0"), only="^DELETE FROM idempotency_keys"),
        shows="never came to rest",
    ),
    Plant(
        name="the reaper does not raise the epoch",
        mode=Mode.FUSED,
        rewrite=_replacing(("epoch = epoch [+] 1, crashes", "crashes"), only="crashes = "),
        shows="is told ALREADY and never committed",
    ),
    Plant(
        name="replies are written outside the transaction",
        mode=Mode.FUSED,
        leaks="deliveries",
        shows="P5",
    ),
    Plant(
        name="follow-ups are written outside the transaction",
        mode=Mode.BROKER,
        leaks="outbox",
        shows="P5",
    ),
    Plant(
        name="a leaving worker keeps what it claimed",
        mode=Mode.FUSED,
        rewrite=_replacing(
            ("q.worker_id = [?]1$", "q.worker_id = -?1"), only="^SELECT q.tenant_id"
        ),
        shows="never came to rest",
    ),
    Plant(
        name="a dead number may still claim",
        mode=Mode.FUSED,
        rewrite=_replacing(("SELECT state", "SELECT 'alive'"), only="^SELECT state FROM workers"),
        shows="never came to rest",
    ),
    Plant(
        name="a claim that lets the broker's copy go is not synced",
        mode=Mode.BROKER,
        lazy=True,
        shows="has vanished|P6|never came to rest",
    ),
)
