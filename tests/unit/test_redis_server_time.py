"""Times to live by the clock of a Redis server that is wrong, or is set."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from redis.exceptions import ResponseError

from ackbone.brokers.redis.server_time import HOLD_S, ServerTime
from ackbone.core.broker import Delivery
from ackbone.testing import FakeClock

PLAIN = Delivery(body=b"", headers={}, tag=1, identity="m")


class Server:
    """Two minutes behind; a test sets its clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.behind_s = 120.0
        self.asked = 0
        self.refuses = False
        self.time = ServerTime(self, self.clock)  # type: ignore[arg-type]

    def now_us(self) -> int:
        return self.clock.now_us() - int(self.behind_s * 1e6)

    async def ask(self, *commands: Any) -> list[Any]:
        self.asked += 1
        if self.refuses:
            return [ResponseError("NOPERM")]
        return [divmod(self.now_us(), 1_000_000)]

    def entry(self, *, age_s: float, ttl_s: float) -> Delivery:
        sent = self.now_us() - int(age_s * 1e6)
        return msgspec.structs.replace(
            PLAIN, sent_at_us=sent, expires_at_us=sent + int(ttl_s * 1e6)
        )

    async def left_s(self, entry: Delivery) -> float:
        """What is left of its time to live once it is read."""
        await self.time.look([entry])
        (timed,) = self.time.timed([entry])
        assert timed.expires_steady_s is not None
        return round(timed.expires_steady_s - self.clock.monotonic(), 3)


async def test_the_age_of_an_entry_goes_by_the_clock_that_made_its_id() -> None:
    server = Server()
    assert await server.left_s(server.entry(age_s=10, ttl_s=60)) == 50
    assert await server.left_s(server.entry(age_s=70, ttl_s=60)) == -10
    assert await server.left_s(server.entry(age_s=-5, ttl_s=60)) == 60


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_after_a_jump_a_time_to_live_begins_anew(jump_s: float) -> None:
    server = Server()
    waiting = server.entry(age_s=10, ttl_s=60)
    await server.left_s(waiting)
    server.behind_s += jump_s
    server.clock.advance(2)
    assert await server.left_s(waiting) == 60
    server.clock.advance(HOLD_S)
    assert await server.left_s(server.entry(age_s=10, ttl_s=60)) == 50


async def test_what_seems_to_be_over_is_not_before_the_server_was_asked() -> None:
    """Read within a second of the last look, and sent after a jump that nobody has seen yet."""
    server = Server()
    await server.left_s(server.entry(age_s=10, ttl_s=60))
    server.behind_s += 3600.0
    server.clock.advance(0.1)
    assert await server.left_s(server.entry(age_s=0, ttl_s=60)) == 60


async def test_a_server_is_asked_only_for_what_expires() -> None:
    server = Server()
    await server.time.look([PLAIN] * 3)
    assert server.asked == 0
    assert server.time.timed([PLAIN]) == [PLAIN]
    server.refuses = True
    mortal = server.entry(age_s=10, ttl_s=60)
    await server.time.look([mortal])
    assert server.time.timed([mortal]) == [mortal], "nobody knows better than the entry"
