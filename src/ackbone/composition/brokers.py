"""The brokers of an app. They are opened and closed together, and each queue is on one of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ackbone.brokers.registry import make_broker
from ackbone.core.broker import Broker, LimitsPublish, NamesConsumers, Renews
from ackbone.core.clock import Clock
from ackbone.core.errors import BrokerDenied, BrokerUnavailable, ConfigError

if TYPE_CHECKING:
    from ackbone.config import Config
    from ackbone.config.endpoints import Endpoint

log = logging.getLogger("ackbone.app")

SOON_S, LATEST_S = 0.05, 2.0
"""Pauses before a broker that could not be opened is tried again: they double."""


def explained(config: Config, queue: str, error: BrokerUnavailable) -> BrokerUnavailable:
    """Return the error of a send with the queue, its broker and what to do next."""
    endpoint = config.endpoint(queue)
    setting = f"`{endpoint.setting}`"
    several = len(config.endpoints) > 1
    which = f"broker {endpoint.name}" if several else f"the broker of the setting {setting}"
    # The PostgreSQL broker is in the store's database, whose address is used.
    where = "`store`" if endpoint.kind.name == "postgresql" else setting
    advice = f". Start it, or correct {where}, then send again"
    return type(error)(
        f"queue {queue} is on {which}, which is unavailable: {endpoint.named(str(error))}; "
        f"the message was not sent{'' if isinstance(error, BrokerDenied) else advice}"
    )


class Brokers:
    """The brokers of one configuration, not open yet."""

    def __init__(self, config: Config, *, clock: Clock) -> None:
        """Raises ConfigError for a broker that this version does not have."""
        self._config = config
        self._endpoints: Mapping[str, Endpoint] = config.endpoints
        self.by_name: dict[str, Broker] = {}
        problems: list[str] = []
        for name, endpoint in self._endpoints.items():
            try:
                self.by_name[name] = make_broker(endpoint.url, clock=clock)
            except ConfigError as error:
                problems += [endpoint.named(problem) for problem in error.problems]
        if problems:
            raise ConfigError(problems)
        self._places: dict[str, str] = {}
        """The names of the brokers of queues that were asked for: every send asks."""
        self._opening: list[asyncio.Task[None]] = []

    def of(self, queue: str) -> Broker:
        """Return the broker that the queue is on."""
        name = self._places.get(queue)
        if name is None:
            name = self._places[queue] = self._config.endpoint(queue).name
        return self.by_name[name]

    def with_queues(self, queues: Iterable[str]) -> list[tuple[Broker, list[str]]]:
        """Return the brokers of these queues, each with those that are on it."""
        found: dict[str, list[str]] = {}
        for queue in queues:
            found.setdefault(self._config.endpoint(queue).name, []).append(queue)
        return [(self.by_name[name], some) for name, some in found.items()]

    def on_file(self, path: Path) -> Broker | None:
        """Return the broker whose queues are in this SQLite file, if there is one."""
        names = (name for name, each in self._endpoints.items() if each.file == path)
        return next((self.by_name[name] for name in names), None)

    def at(self, url: str) -> list[Broker]:
        """Return the brokers whose queues are in the database with this URL."""
        return [self.by_name[name] for name, each in self._endpoints.items() if each.url == url]

    def prepare(
        self, consumer: str, *, publish_within_s: float, config_now: Callable[[], Config]
    ) -> str:
        """Tell the brokers what they need before they are opened.

        Returns the name by which all of them know this reader, if they know readers by names.
        """
        for name, broker in self.by_name.items():
            if isinstance(broker, Renews):
                broker.renew_by(lambda name=name: config_now().endpoints[name].url)  # type: ignore[misc]
            if isinstance(broker, NamesConsumers):
                consumer = broker.name_consumer(consumer)
            if isinstance(broker, LimitsPublish):
                broker.publish_within_s = publish_within_s
        return consumer

    async def open(self, *, servers: bool = True) -> None:
        """Open all of them. Without `servers`, only those that are no server.

        A broker that is unavailable stops only its own queues: it is opened when it is back. If
        none can be opened, raises the error of the first one.
        """
        wanted = [
            (name, broker)
            for name, broker in self.by_name.items()
            if servers or not self._endpoints[name].kind.is_server
        ]
        answers = await asyncio.gather(
            *(broker.open() for _, broker in wanted), return_exceptions=True
        )
        away = []
        for (name, broker), error in zip(wanted, answers, strict=True):
            if isinstance(error, BrokerUnavailable):
                away.append((name, broker, error))
            elif error is not None:
                raise error
        if away and len(away) == len(wanted):
            raise away[0][2]
        for name, broker, error in away:
            log.info("broker %s is unavailable: %s; it is opened when it is back", name, error)
            opening = self._open_later(name, broker)
            self._opening.append(asyncio.create_task(opening, name=f"ackbone open {name}"))

    async def _open_later(self, name: str, broker: Broker) -> None:
        pause = SOON_S
        while True:
            await asyncio.sleep(pause)
            pause = min(LATEST_S, pause * 2)
            try:
                await broker.open()
            except BrokerUnavailable as error:
                log.debug("broker %s: %s", name, error)
                continue
            log.info("broker %s is open", name)
            return

    async def close(self) -> None:
        for opening in self._opening:
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        self._opening.clear()
        ends = await asyncio.gather(
            *(broker.close() for broker in self.by_name.values()), return_exceptions=True
        )
        for error in ends:
            if error is not None:
                raise error
