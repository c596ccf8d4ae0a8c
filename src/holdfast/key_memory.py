"""Which memory of dedup keys beside the store a configuration asks for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from holdfast.brokers.registry import make_key_memory
from holdfast.config import Config
from holdfast.core.broker import Keys, Subscription
from holdfast.core.errors import ConfigError
from holdfast.core.meter import Meter
from holdfast.engine.shared_keys import SharedKeys

log = logging.getLogger("holdfast.app")

URL_VARIABLE = "REDIS_URL"


def shared_keys_of(
    subscriptions: Sequence[Subscription], config_now: Callable[[], Config], meter: Meter | None
) -> SharedKeys | None:
    """None if no queue asks for one. Raises ConfigError if nobody says where it is.

    `config_now`: asked again when the server refuses the credentials.
    """
    config = config_now()
    url = key_memory_url(subscriptions, config)
    if url is None:
        return None
    asking = _asking(subscriptions)
    for sub in asking:
        if sub.keys is Keys.REDIS_ONLY:
            log.warning("queue %s: P4 off: Redis alone remembers its keys", sub.queue)

    def unavailable(queue: str, messages: int) -> None:
        if meter is not None:
            meter.dedup_unavailable(queue, messages)

    return SharedKeys(
        make_key_memory(url, url_now=lambda: _url(config_now()) or ""),
        asking,
        may_miss=config.on_dedup_unavailable == "continue",
        unavailable=unavailable,
    )


def check_key_memory(subscriptions: Sequence[Subscription], config: Config) -> None:
    """Raises ConfigError if `shared_keys_of` would."""
    url = key_memory_url(subscriptions, config)
    if url is not None:
        make_key_memory(url)


def key_memory_url(subscriptions: Sequence[Subscription], config: Config) -> str | None:
    """Where that memory is; None if no queue asks for one. Raises ConfigError if nobody says."""
    asking = _asking(subscriptions)
    if not asking:
        return None
    url = _url(config)
    if url is None:
        raise ConfigError(
            [
                f"queues.{asking[0].queue}.dedup: {asking[0].keys} needs a Redis: write dedup_url, "
                f"or set the variable {URL_VARIABLE}, such as redis://localhost:6379/0"
            ]
        )
    return url


def _asking(subscriptions: Sequence[Subscription]) -> list[Subscription]:
    return [sub for sub in subscriptions if sub.keys is not Keys.STORE]


def _url(config: Config) -> str | None:
    if config.dedup_url is not None:
        return config.dedup_url
    return config.broker if config.broker_kind == "redis" else os.environ.get(URL_VARIABLE)
