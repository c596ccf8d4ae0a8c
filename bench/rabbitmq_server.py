"""A private RabbitMQ for the bench: the newest that tests/prepare.sh has fetched, else Debian's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.servers.rabbitmq import DEBIAN, NEWEST, RabbitServer

from .measure import Unavailable


@contextlib.contextmanager
def rabbitmq_server() -> Iterator[RabbitServer]:
    """A node that is running. A start takes seconds, so one serves all contenders."""
    try:
        server = RabbitServer(NEWEST if NEWEST.exists() else DEBIAN)
    except AssertionError as error:
        raise Unavailable(str(error)) from error
    try:
        server.start()
        yield server
    finally:
        server.remove()
