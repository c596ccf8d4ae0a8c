"""A Redis broker's URL: where the server is, and how it is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from ackbone.brokers.parameters import seconds, unknown
from ackbone.core.errors import ConfigError

VISIBILITY_TIMEOUT_S = 300.0
TIMEOUT_S = 5.0
DELETE_ACKED = ("auto", "always", "never")

_OURS = ("visibility_timeout_s", "timeout_s", "delete_acked", "allow_unsafe")
_DRIVERS = (
    "db", "username", "password", "client_name", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile",
    "ssl_keyfile", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname",
)  # fmt: skip
"""Parameters that are passed to the driver. Others would override ours: protocol, time limits."""
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The URL of a Redis broker, parsed."""

    url: str
    """The URL for the driver, without our parameters."""
    lease_s: float = VISIBILITY_TIMEOUT_S
    timeout_s: float = TIMEOUT_S
    delete_acked: str = "auto"
    allow_unsafe: bool = False


def read_address(url: str) -> Address:
    """Parse a URL. Raises ConfigError with every mistake, without text that may be a password."""
    parts = urlsplit(url)
    try:
        _ = parts.port
        if parts.fragment:  # the password contains a #, and was cut there
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
    problems += _database(parts, found)
    lease = found.get("visibility_timeout_s") or os.environ.get("VISIBILITY_TIMEOUT_S")
    lease_s = seconds("visibility_timeout_s", lease, VISIBILITY_TIMEOUT_S, problems)
    timeout_s = seconds("timeout_s", found.get("timeout_s"), TIMEOUT_S, problems)
    delete_acked = found.get("delete_acked", "auto")
    if delete_acked not in DELETE_ACKED:
        problems.append(f"delete_acked must be one of {', '.join(DELETE_ACKED)}")
    unsafe = found.get("allow_unsafe", "0").lower()
    if unsafe not in (*_YES, *_NO):
        problems.append("allow_unsafe must be 1 or 0")
    if problems:
        raise ConfigError([f"broker: {parts.scheme}: {problem}" for problem in problems])
    rest = {name: value for name, value in found.items() if name in _DRIVERS}
    return Address(
        url=urlunsplit(parts._replace(query=urlencode(rest))),
        lease_s=lease_s,
        timeout_s=timeout_s,
        delete_acked=delete_acked,
        allow_unsafe=unsafe in _YES,
    )


def _database(parts: SplitResult, found: Mapping[str, str]) -> list[str]:
    """Check the database. The driver silently uses database 0 for one that is not a number."""
    named = [found["db"]] if "db" in found else []
    if parts.scheme != "unix" and parts.path not in ("", "/"):
        named.append(parts.path[1:])
    if all(name.isascii() and name.isdigit() for name in named):
        return []
    return ["the database after the / must be a number, such as redis://host:6379/0"]
