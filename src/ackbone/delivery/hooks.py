"""Webhook URLs that a chat service gave out. Whoever knows one may post: they are secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ackbone.core.errors import FinalError
from ackbone.core.secret import Secret

from .http import fingerprint


class Hooks:
    """Finds the URL of a recipient: one that was configured by name, or the recipient itself.

    A recipient that is a URL has to begin with one of `prefixes`: replies must not be a way to
    reach other places.
    """

    def __init__(self, named: Mapping[str, str], prefixes: Sequence[str]) -> None:
        self._named = {name: Secret(url) for name, url in named.items()}
        self._prefixes = tuple(prefix.rstrip("/") + "/" for prefix in prefixes)

    def url_of(self, recipient: str) -> str | None:
        """None: it is no webhook's. Raises FinalError for a URL of another place."""
        named = self._named.get(recipient)
        if named is not None:
            return named.reveal()
        if "://" not in recipient:
            return None
        if not recipient.startswith(self._prefixes):
            raise FinalError(f"the recipient is a URL, but none of {' or '.join(self._prefixes)}…")
        return recipient

    def key_of(self, recipient: str) -> str | None:
        """What limits call it, or None if it is no webhook's."""
        named = self._named.get(recipient)
        if named is not None:
            return fingerprint(named.reveal())
        return fingerprint(recipient) if "://" in recipient else None
