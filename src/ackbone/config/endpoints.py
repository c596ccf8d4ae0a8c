"""The URLs of brokers and stores, read and completed."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from ackbone.brokers.registry import BY_SCHEME, KINDS, BrokerKind, kind_of, meant
from ackbone.core.errors import ConfigError
from ackbone.core.secret import mask_value

STORES = {"postgresql": "postgresql", "postgres": "postgresql"}
"""URL schemes of stores on a server, and the store behind each."""


class Endpoint(NamedTuple):
    """A broker of the configuration."""

    name: str
    url: str
    kind: BrokerKind

    @property
    def file(self) -> Path | None:
        """Its SQLite file; None for a broker without one."""
        return sqlite_file(self.url)

    @property
    def setting(self) -> str:
        """Its place in ackbone.yaml."""
        return "broker" if self.name == "default" else f"brokers.{self.name}"

    def named(self, text: str) -> str:
        """Return what is said about `broker`, said about this one."""
        if text.startswith("broker:"):
            text = self.setting + text.removeprefix("broker")
        return text.replace("`broker`", f"`{self.setting}`")


def endpoint(name: str, url: str, *, file: Path, store: str) -> Endpoint:
    """Return a broker by its URL. `file`: the file of `sqlite` without a path. `store`: the URL of
    the store, whose database is the only one that a PostgreSQL broker can be in."""
    kind = kind_of(url)
    if kind.name == "sqlite" and url == "sqlite":
        url = f"sqlite:///{file}"
    if kind.name in STORES.values() and store.partition(":")[0] in STORES:
        url = store
    return Endpoint(name, url, kind)


def not_in_store(url: str, store: str) -> str | None:
    """Return what is wrong with a broker that shares the store's database. None: nothing, or it is
    another kind of broker."""
    scheme = url.partition(":")[0]
    if scheme not in STORES:
        return None
    if store.partition(":")[0] not in STORES:
        return (
            "the PostgreSQL broker is in the store's database, and the store is SQLite; write "
            "`store: postgresql://user@host/name` and `broker: postgresql`"
        )
    if url.partition("://")[2] and _database(url) != _database(store):
        return (
            "names another database than `store`. The PostgreSQL broker is in the store's database,"
            " so that receiving and claiming a message are one transaction; write postgresql"
        )
    return None


def _database(url: str) -> tuple[object, ...]:
    """Return server, port and name of a PostgreSQL database."""
    parts = urlsplit(url)
    given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    where, _, port = parts.netloc.rpartition("@")[2].partition(":")
    return (
        (where or given.get("host") or "localhost").lower(),
        port or given.get("port") or "5432",
        parts.path.lstrip("/") or given.get("dbname"),
    )


def sqlite_file(url: str) -> Path | None:
    """Return the file of a sqlite:/// URL, else None."""
    if not url.startswith("sqlite:///"):
        return None
    return Path(url.removeprefix("sqlite:///"))


def read_url(setting: str, url: str, folder: Path) -> str:
    """Return the URL with an absolute path. Raises ValueError with what to write instead."""
    scheme, separator, rest = url.partition("://")
    scheme = scheme.strip().lower()
    broker = setting != "store"
    if scheme == "sqlite":
        return f"sqlite:///{_sqlite_path(rest, folder)}" if rest else "sqlite"
    if scheme == "memory":
        if not broker:
            raise ValueError(
                "the store cannot be in memory, because it must survive a restart; write sqlite"
            )
        if rest.partition("?")[0]:
            raise ValueError("memory:// takes no path; write memory://")
        return f"memory://{rest}"
    if scheme in STORES and broker and not rest:
        return scheme
    if broker and scheme in BY_SCHEME:
        return _server(BY_SCHEME[scheme], scheme, rest, url)
    if scheme in STORES and not broker:
        if not rest:
            raise ValueError(f"{scheme}:// names no database; write postgresql://user@host/name")
        return url.strip()
    kind = "broker" if broker else "store"
    stores = difflib.get_close_matches(scheme, ["sqlite", *STORES], 1)
    near = meant(scheme) if broker else next(iter(stores), None)
    hint = f"did you mean {near}? " if near else ""
    found = mask_value(url) if separator else f"***{url[url.rfind('@') :]}" if "@" in url else url
    raise ValueError(
        f"{found[:60]!r} is not a known {kind}; {hint}write one of: {_forms(broker=broker)}"
    )


def _forms(*, broker: bool) -> str:
    if not broker:
        return "sqlite, sqlite:///path/to/file.db, postgresql://user@host:5432/name"
    return ", ".join(["sqlite", "postgresql", *(kind.example for kind in KINDS if kind.adapter)])


def _server(kind: BrokerKind, scheme: str, rest: str, url: str) -> str:
    """Return a server's URL unchanged; the adapter reads the part after the `?`."""
    try:
        kind_of(url)
    except ConfigError:
        raise ValueError(
            f"this version of ackbone has no {kind.title} adapter yet; it has: "
            f"{_forms(broker=True)}"
        ) from None
    if scheme == "unix" and not rest.startswith("/"):
        raise ValueError("a socket's path is absolute: unix:///run/redis.sock")
    if not rest:
        raise ValueError(f"{scheme}:// names no server; write {kind.example}")
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
