"""Refuses requests to internal addresses.

A URL from outside may point at this machine, at its neighbours or at a cloud's metadata service.
The guard checks the address of the socket on every attempt, so neither an unusual notation of an
address nor a name that resolves differently the second time gets past it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from ackbone.core.errors import FinalError

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
    """Opens sockets to public addresses and to explicitly allowed networks."""

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
