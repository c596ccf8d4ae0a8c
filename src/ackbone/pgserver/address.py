"""The address of the database: for the driver, and for people, without the password."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ackbone.core.errors import ConfigError

CONNECT_S = 5
SILENCE_S = 10
"""A server that does not answer for this many seconds counts as gone."""

_DEFAULTS: dict[str, Any] = {
    "application_name": "ackbone",
    "connect_timeout": CONNECT_S,
    "keepalives_idle": SILENCE_S,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": SILENCE_S * 1000,
}


class Address(str):
    """The parameter of `psycopg.connect`. `shown` names the database without its password."""

    shown: str

    @classmethod
    def from_url(cls, url: str) -> Address:
        """Raises ConfigError if the URL cannot be read. The error does not repeat it."""
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            raise ConfigError(
                ["store: this is not a PostgreSQL URL; write postgresql://user@host:5432/name"]
            ) from None
        if _splits_the_password(url, given):
            # Host and port are parts of the password then, so neither is shown.
            raise ConfigError(
                [
                    "store: the port in the URL is not a number, or it has an @ too many. "
                    "In a password write / as %2F and @ as %40"
                ]
            )
        address = cls(make_conninfo(**{**_DEFAULTS, **given}))
        host = given.get("host") or given.get("hostaddr") or "localhost"
        port = f":{given['port']}" if given.get("port") else ""
        address.shown = f"PostgreSQL {given.get('dbname') or 'database'} on {host}{port}"
        return address


def _splits_the_password(url: str, given: dict[str, Any]) -> bool:
    """Return True if the driver took text around an unescaped / or @ for the host and the port."""
    ports = str(given.get("port") or "").split(",")
    if any(port and not port.isdecimal() for port in ports):
        return True
    place, _, rest = url.partition("://")[2].partition("/")
    if place.partition("?")[0].count("@") > 1:  # the driver ends the password at the first one
        return True
    return ":" in place and "@" in rest.partition("?")[0]
