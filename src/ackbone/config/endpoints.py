"""The broker URLs, store URLs and trigger adapters that this version has."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ackbone.core.secret import mask_value

STORES = {"postgresql": "postgresql", "postgres": "postgresql"}
"""URL schemes of stores on a server, and the store behind each."""
SERVERS = {"redis": "redis", "rediss": "redis", "unix": "redis"}
"""URL schemes of brokers on a server, and the broker behind each."""
ADAPTERS = {"mock": "memory", "memory": "memory", "sqlite": "sqlite", "redis": "redis"}
"""Adapter types of triggers, and the broker behind each."""
_LATER = {
    "amqp": "RabbitMQ",
    "amqps": "RabbitMQ",
    "kafka": "Kafka",
    "rabbitmq": "RabbitMQ",
    "servicebus": "Azure Service Bus",
    "sqs": "SQS",
}
"""Schemes and adapter types that a later version will have."""
ADAPTER_TYPES = ("mock", "memory", "sqlite", "kafka", "rabbitmq", "sqs", "redis", "servicebus")
"""Adapter types of triggers. Those that are not in ADAPTERS can be loaded and not started."""


def lacks_adapter(kind: str, instead: str) -> str:
    """Return the message for an adapter that a later version will have."""
    return f"this version of ackbone has no {_LATER.get(kind, kind)} adapter yet; it has: {instead}"


def sqlite_file(url: str) -> Path | None:
    """Return the file of a sqlite:/// URL, else None."""
    if not url.startswith("sqlite:///"):
        return None
    return Path(url.removeprefix("sqlite:///"))


def read_url(setting: str, url: str, folder: Path) -> str:
    """Return the URL with an absolute path. Raises ValueError with what to write instead."""
    forms = "sqlite, sqlite:///path/to/file.db"
    if setting == "broker":
        forms += ", memory://, redis://host:6379/0"
    else:
        forms += ", postgresql://user@host:5432/name"
    scheme, separator, rest = url.partition("://")
    scheme = scheme.strip().lower()
    if scheme == "memory" and setting == "broker":
        if rest:
            raise ValueError("memory:// takes no path; write memory://")
        return "memory://"
    if scheme == "memory":
        raise ValueError(
            "the store cannot be in memory, because it must survive a restart; write sqlite"
        )
    if scheme == "sqlite" and not rest:
        return "sqlite"
    if scheme == "sqlite":
        return f"sqlite:///{_sqlite_path(rest, folder)}"
    if scheme in SERVERS and setting == "broker":
        return _server(scheme, rest, url)
    if scheme in STORES and setting == "store":
        if not rest:
            raise ValueError(f"{scheme}:// names no database; write postgresql://user@host/name")
        return url.strip()
    if scheme in _LATER:
        raise ValueError(lacks_adapter(scheme, forms))
    near = difflib.get_close_matches(scheme, ["sqlite", "memory", *SERVERS, *STORES, *_LATER], 1)
    hint = f"did you mean {near[0]}? " if near else ""
    found = mask_value(url) if separator else url
    raise ValueError(f"{found[:60]!r} is not a known {setting}; {hint}write one of: {forms}")


def _server(scheme: str, rest: str, url: str) -> str:
    """Return a server's URL unchanged; the adapter reads the part after the `?`."""
    if scheme == "unix" and not rest.startswith("/"):
        raise ValueError("a socket's path is absolute: unix:///run/redis.sock")
    if not rest:
        raise ValueError(f"{scheme}:// names no server; write redis://host:6379/0")
    return url.strip()


def parameter(url: str, name: str) -> str | None:
    """Return the value of a parameter after the `?` of a URL."""
    parts = (part.partition("=") for part in url.partition("?")[2].split("&"))
    return next((value for key, _, value in parts if key == name), None)


def with_default(url: str, name: str, value: str) -> str:
    """Return the URL with this parameter, unless it has one with the same name."""
    if parameter(url, name) is not None:
        return url
    return f"{url}{'&' if '?' in url else '?'}{name}={value}"


def _sqlite_path(rest: str, folder: Path) -> Path:
    """Return the path of a sqlite URL: three slashes are relative, four absolute."""
    if not rest.startswith("/"):
        raise ValueError(
            "a file takes three slashes (sqlite:///relative.db) or, from the root of the disk, "
            "four (sqlite:////var/lib/ackbone.db)"
        )
    name = rest[1:]
    if "?" in name or "#" in name:
        raise ValueError("sqlite:/// takes only a path, without ? or #")
    if not name or name.endswith("/") or "\0" in name:
        raise ValueError("sqlite:/// names no file; write sqlite, or sqlite:///path/to/file.db")
    first = name.partition("/")[0]
    path = folder / name
    looks_absolute = "/" in name and first not in ("", ".", "..") and os.path.isdir(f"/{first}")
    if looks_absolute and not os.path.exists(folder / first):
        raise ValueError(
            f"three slashes mean a path relative to {folder}; for /{name} write four: "
            f"sqlite:////{name}; for a relative path write sqlite:///./{name}"
        )
    return Path(os.path.abspath(path))
