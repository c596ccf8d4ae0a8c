"""A RabbitMQ broker's URL: where the server is, and how it is used."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import msgspec

from ackbone.brokers.parameters import seconds, unknown
from ackbone.core.errors import ConfigError

TIMEOUT_S = 5.0
HEARTBEAT_S = 3.0
"""The server closes the connection of a client that was silent for two to three of these, and gives
its messages to others. That is to happen within the lease of a worker (10 s)."""
HOLD_LIMIT_S = 600.0
"""The server's own limit (consumer_timeout) is 30 minutes, and a client cannot ask for it."""

_OURS = ("timeout_s", "heartbeat_s", "hold_limit_s", "queue_type")
_DRIVERS = ("cafile", "capath", "certfile", "keyfile", "no_verify_ssl")
"""Parameters that are passed to the driver. All but the last one name files or a folder."""
TYPES = ("quorum", "classic")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The URL of a RabbitMQ broker, parsed."""

    url: str
    """The URL for the driver, without our parameters."""
    where: str
    """The server and its vhost, without credentials, for people."""
    vhost: str = "/"
    timeout_s: float = TIMEOUT_S
    hold_limit_s: float = HOLD_LIMIT_S
    queue_type: str = TYPES[0]


def read_address(url: str) -> Address:
    """Parse a URL. Raises ConfigError with every mistake, without text that may be a password."""
    parts = urlsplit(url)
    try:
        _ = parts.port
        if parts.fragment or not parts.hostname:  # a password that contains a # was cut there
            raise ValueError
    except ValueError:
        raise ConfigError(
            [
                f"broker: {parts.scheme}: host and port cannot be read. In a password write "
                "% : / ? # [ ] @ as %25 %3A %2F %3F %23 %5B %5D %40"
            ]
        ) from None
    found = dict(parse_qsl(parts.query, keep_blank_values=True))
    problems = [
        unknown(name, (*_OURS, *_DRIVERS)) for name in found if name not in (*_OURS, *_DRIVERS)
    ]
    if "/" in parts.path[1:]:
        problems.append("a vhost whose name contains a / is written with %2F")
    numbers = {
        name: seconds(name, found.get(name), default, problems)
        for name, default in (
            ("timeout_s", TIMEOUT_S),
            ("heartbeat_s", HEARTBEAT_S),
            ("hold_limit_s", HOLD_LIMIT_S),
        )
    }
    queue_type = found.get("queue_type", TYPES[0])
    if queue_type not in TYPES:
        problems.append(f"queue_type must be one of {', '.join(TYPES)}")
    problems += [
        f"{name}: there is no such file or folder"
        for name in _DRIVERS[:-1]
        if name in found and not Path(found[name]).exists()
    ]
    if problems:
        raise ConfigError([f"broker: {parts.scheme}: {problem}" for problem in problems])
    rest = {name: value for name, value in found.items() if name in _DRIVERS}
    rest["heartbeat"] = str(max(1, round(numbers["heartbeat_s"])))
    return Address(
        url=urlunsplit(parts._replace(query=urlencode(rest))),
        where=_where(parts),
        vhost=_vhost(parts),
        timeout_s=numbers["timeout_s"],
        hold_limit_s=numbers["hold_limit_s"],
        queue_type=queue_type,
    )


def _where(parts: SplitResult) -> str:
    port = f":{parts.port}" if parts.port else ""
    vhost = _vhost(parts)
    named = " (vhost /)" if vhost == "/" else f"/{vhost}"
    return f"{parts.scheme}://{parts.hostname}{port}{named}"


def _vhost(parts: SplitResult) -> str:
    return unquote(parts.path[1:]) or "/"
