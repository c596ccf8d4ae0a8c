"""The webhook channel: signed HTTP requests to URLs of receivers."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from yarl import URL

from ackbone.core.errors import ConfigError, FinalError
from ackbone.core.outbound.delivery import Outbound

from .http_answers import check_answer
from .http_channel import TIMEOUT_S, HttpChannel, place

PLACES = 10_000
"""Number of parsed URLs that are cached."""
_encode = msgspec.json.Encoder().encode


class WebhookChannel(HttpChannel):
    """POSTs replies as JSON, signed by Standard Webhooks; the recipient is the URL.

    With the option `raw` the content is JSON already, and becomes the whole body.

    The delivery's id is the request's `webhook-id`, the same on every attempt. A receiver that has
    seen it answers 2xx and does nothing.
    """

    def __init__(
        self,
        keys: Sequence[str],
        *,
        allow: Sequence[str] = (),
        https_only: bool = True,
        name: str = "webhook",
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`allow`: internal networks that may be reached."""
        super().__init__(timeout_s=timeout_s)
        self.name = name
        self._signer = Signer(keys)
        self._guard = AddressGuard(allow)
        self._schemes = ("https",) if https_only else ("https", "http")
        self._tls = tls

    async def send(self, reply: Outbound) -> None:
        """Return when the receiver has accepted the request."""
        url = _checked(reply.recipient, self._schemes)
        body = _body(reply)
        signed = self._signer.headers(reply.id, int(time.time()), body)
        answer = await self._post(url, body, signed)
        check_answer(answer.status, answer.headers, answer.text)

    def destination(self, reply: Outbound) -> str:
        return _destination(reply.recipient)

    def _connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(
            limit=0,
            socket_factory=self._guard.socket,
            use_dns_cache=False,  # every connection resolves the name again
            ssl=True if self._tls is None else self._tls,
        )


@functools.lru_cache(maxsize=PLACES)
def _destination(url: str) -> str:
    try:
        return place(url)
    except ValueError:
        return "nowhere"


@functools.lru_cache(maxsize=PLACES)
def _checked(url: str, schemes: tuple[str, ...]) -> URL:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise FinalError(f"the recipient is not a URL: {error}") from None
    if parts.scheme not in schemes or not host:
        raise FinalError(
            f"the recipient is not an {' or '.join(schemes)} URL, but {parts.scheme!r:.20}://…"
        )
    if parts.username or parts.password:
        raise FinalError(f"{place(url)}: URLs with a password are refused")
    try:
        return URL(url)
    except (ValueError, UnicodeError):
        raise FinalError(f"{place(url)}: that is not a valid URL") from None


def _body(reply: Outbound) -> bytes:
    if reply.options.get("raw") is True:
        return reply.content.encode()
    data = {
        "id": reply.id,
        "content": reply.content,
        "conversation": reply.conversation,
        "task_id": reply.task_id,
        "tenant_id": reply.tenant_id,
    }
    return _encode({"type": "reply", "data": {k: v for k, v in data.items() if v is not None}})


# -- signatures ------------------------------------------------------------------------------------

SHARED, PRIVATE = "whsec_", "whsk_"
_SHARED_BYTES = range(24, 65)
_SEED_BYTES = 32

Sign = Callable[[bytes], str]


class Signer:
    """Standard Webhooks signatures, by which a receiver can check that a request is ours and
    recent.

    A key is a shared secret (`whsec_…`: `v1`, HMAC-SHA256) or a private key (`whsk_…`: `v1a`,
    Ed25519). Every key signs, the newest first, so that a key can be replaced.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        """Raise ConfigError for an invalid key, without showing it."""
        if not keys:
            raise ConfigError(["webhook: a request needs at least one key to be signed with"])
        self._signs = [_sign_with(key, place) for place, key in enumerate(keys, 1)]

    def headers(self, message_id: str, at_s: int, body: bytes) -> dict[str, str]:
        """Return the three headers for exactly these bytes."""
        content = f"{message_id}.{at_s}.".encode() + body
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": " ".join(sign(content) for sign in self._signs),
        }


def _sign_with(key: str, place: int) -> Sign:
    if key.startswith(PRIVATE):
        return _ed25519(_decoded(key.removeprefix(PRIVATE), place), place)
    secret = _decoded(key.removeprefix(SHARED), place)
    if len(secret) not in _SHARED_BYTES:
        raise ConfigError([f"webhook: key {place} has {len(secret)} bytes; a secret has 24 to 64"])

    def sign(content: bytes) -> str:
        digest = hmac.new(secret, content, hashlib.sha256).digest()
        return f"v1,{base64.b64encode(digest).decode()}"

    return sign


def _ed25519(key: bytes, place: int) -> Sign:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if len(key) not in (_SEED_BYTES, 2 * _SEED_BYTES):  # alone, or followed by the public key
        raise ConfigError([f"webhook: key {place} is not an Ed25519 private key (32 or 64 bytes)"])
    private = Ed25519PrivateKey.from_private_bytes(key[:_SEED_BYTES])
    return lambda content: f"v1a,{base64.b64encode(private.sign(content)).decode()}"


def _decoded(text: str, place: int) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError([f"webhook: key {place} is not base64"]) from None


# -- addresses that may be reached -----------------------------------------------------------------

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_CLOSED_4 = (
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",  # private
    "100.64.0.0/10",  # behind a carrier's NAT
    "127.0.0.0/8",  # this machine
    "168.63.129.16/32",  # public in form; in Azure it is the host of this machine
    "169.254.0.0/16",  # link-local, where clouds keep their metadata
    "172.16.0.0/12",  # private
    "192.0.0.0/24",  # protocol assignments
    "192.0.2.0/24",  # documentation
    "192.31.196.0/24",  # AS112
    "192.52.193.0/24",  # AMT
    "192.88.99.0/24",  # 6to4 relays
    "192.168.0.0/16",  # private
    "192.175.48.0/24",  # AS112
    "198.18.0.0/15",  # benchmarks
    "198.51.100.0/24",  # documentation
    "203.0.113.0/24",  # documentation
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, and broadcast
)
_CLOSED_6 = (
    "::/96",  # unspecified, loopback, IPv4 in disguise
    "::ffff:0:0/96",  # IPv4 in disguise
    "::ffff:0:0:0/96",  # the same, translated
    "64:ff9b::/96",  # NAT64
    "64:ff9b:1::/48",  # NAT64 of one's own
    "100::/64",  # discard
    "2001::/23",  # protocol assignments, Teredo among them
    "2001:db8::/32",  # documentation
    "2002::/16",  # 6to4
    "3fff::/20",  # documentation
    "5f00::/16",  # segment routing
    "fc00::/7",  # unique local
    "fe80::/10",  # link-local
    "fec0::/10",  # site-local
    "ff00::/8",  # multicast
)
_CLOSED: tuple[Network, ...] = tuple(map(ipaddress.ip_network, (*_CLOSED_4, *_CLOSED_6)))

SocketAddress = tuple[
    int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]
]
"""A result of `getaddrinfo`: family, kind, protocol, canonical name, address."""


class AddressRefused(FinalError):
    """The URL leads to an internal address."""


class AddressGuard:
    """Opens sockets to public addresses and to explicitly allowed networks.

    A URL from outside may point at this machine, at its neighbours or at a cloud's metadata
    service. The address of the socket is checked on every attempt, so neither an unusual notation
    of an address nor a name that resolves differently the second time gets past.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        """`allow`: internal networks that may be reached, such as `10.1.2.0/24`."""
        self._allow: tuple[Network, ...] = tuple(map(ipaddress.ip_network, allow))

    def is_open(self, address: str) -> bool:
        """Return True if requests to this address are allowed. Anything that is not a valid
        address is refused."""
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if any(found in network for network in self._allow):
            return True
        inner = getattr(found, "ipv4_mapped", None)
        if inner is not None and any(inner in network for network in self._allow):
            return True
        return not any(found in network for network in _CLOSED)

    def socket(self, info: SocketAddress) -> socket.socket:
        """Return an unconnected socket for this address. Raises AddressRefused."""
        family, kind, protocol, _, address = info
        host = str(address[0])
        if not self.is_open(host):
            raise AddressRefused(
                f"{host} is not a public address; if this is intended, add its network to `allow`"
            )
        opened = socket.socket(family, kind, protocol)
        opened.setblocking(False)
        return opened
