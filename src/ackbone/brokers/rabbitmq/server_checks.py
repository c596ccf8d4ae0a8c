"""Whether a RabbitMQ server and its queues keep messages, for `ackbone doctor`."""

from __future__ import annotations

from collections.abc import Iterable

from ackbone.core.findings import Check, ok, refused, warning

from .entries import LEVELS, key_of
from .queues import UNLIMITED_SINCE, Queues
from .wire import Link

QUORUM_SINCE = (3, 8)


async def judge(link: Link, queues: Queues, names: Iterable[str]) -> list[Check]:
    """Return the findings. Raises BrokerUnavailable if the server does not answer."""
    await link.connection()
    found = [_version(link)]
    for name in names:
        for level in LEVELS:
            difference = await queues.difference(link, key_of(name, level))
            if difference is not None:
                found.append(_differs(key_of(name, level), difference))
    return found


def _version(link: Link) -> Check:
    name, version = "rabbitmq", ".".join(map(str, link.version))
    if not link.version:
        return warning(name, f"{link.where} answers; it does not say which version it is")
    if link.version < QUORUM_SINCE:
        return refused(
            name, f"{link.where} is RabbitMQ {version}: it has no quorum queues", "3.8 or newer"
        )
    if link.version < UNLIMITED_SINCE:
        return warning(
            name,
            f"{link.where} answers, version {version}: messages that a worker hands back while it "
            "runs others go behind the rest of their queue",
            "4.0 or newer keeps them in front",
        )
    return ok(name, f"{link.where} answers, version {version}")


def _differs(queue: str, difference: str) -> Check:
    if "'durable'" in difference:
        return warning(
            f"rabbitmq {queue}",
            f"the queue is not durable: its messages are gone when the server stops ({difference})",
            "delete the queue when it is empty; it is declared again when it is used",
        )
    return warning(
        f"rabbitmq {queue}",
        f"the queue has other arguments than ours and is used as it is: {difference}",
        "a delivery limit, a length limit or a time to live of the queue removes messages that "
        "this program never sees; let it move them to a dead-letter queue, and name that in "
        f"queues.{queue}.broker_dead_letters",
    )
