"""The proxy of the tests does what it says, in front of a server that sends back what it gets."""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.proxy import Proxy

LONG_S = 30.0
SHORT_S = 0.3


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while some := self.request.recv(65_536):
                self.request.sendall(some)


@contextlib.contextmanager
def _served(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    echo = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo)
    echo.daemon_threads = True
    with _served(echo), Proxy(echo.server_address[1]) as proxy:
        yield proxy


def _client(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=LONG_S)


def _answer(client: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        some = client.recv(65_536)
        assert some, f"the connection ended after {len(found)} bytes"
        found += some
    return found


def _round_trip(client: socket.socket, body: bytes = b"ping") -> float:
    began = time.monotonic()
    client.sendall(body)
    assert _answer(client, len(body)) == body
    return time.monotonic() - began


def test_it_forwards_all_and_the_end_of_all(proxy: Proxy) -> None:
    body = bytes(range(256)) * 20_000
    with _client(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(body,))
        sender.start()
        assert _answer(client, len(body)) == body
        sender.join()
        client.sendall(b"last")
        client.shutdown(socket.SHUT_WR)
        assert _answer(client, 4) == b"last"
        assert client.recv(1) == b""
    assert proxy.accepted == 1


def test_latency_is_paid_in_both_directions(proxy: Proxy) -> None:
    with _client(proxy) as client:
        _round_trip(client)
        proxy.forward(delay_s=SHORT_S)
        assert _round_trip(client) >= 2 * SHORT_S
        proxy.forward()
        _round_trip(client)


def test_a_reset_is_seen_and_new_connections_are_let_in(proxy: Proxy) -> None:
    with _client(proxy) as client, _client(proxy) as again:
        _round_trip(client)
        _round_trip(again)
        assert proxy.live == 2
        proxy.reset()
        for each in (client, again):
            with pytest.raises(ConnectionResetError):
                each.recv(1)
    assert proxy.live == 0
    with _client(proxy) as client:
        _round_trip(client)


def test_while_it_refuses_there_is_nobody(proxy: Proxy) -> None:
    with _client(proxy) as client:
        _round_trip(client)
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        _client(proxy)
    proxy.forward()
    with _client(proxy) as client:
        _round_trip(client)


def test_while_it_holds_nothing_comes_and_nothing_breaks(proxy: Proxy) -> None:
    with _client(proxy) as client:
        _round_trip(client)
        proxy.hold()
        with _client(proxy) as late:
            for each in (client, late):
                each.settimeout(SHORT_S)
                each.sendall(b"kept")
                with pytest.raises(TimeoutError):
                    each.recv(1)
            proxy.forward()
            for each in (client, late):
                each.settimeout(LONG_S)
                assert _answer(each, 4) == b"kept"


def test_what_is_held_can_still_be_reset(proxy: Proxy) -> None:
    proxy.hold()
    with _client(proxy) as client:
        client.sendall(b"lost")
        deadline = time.monotonic() + LONG_S
        while not proxy.accepted and time.monotonic() < deadline:
            time.sleep(0.001)
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_it_flaps_until_it_forwards(proxy: Proxy) -> None:
    proxy.flap(0.05)
    seen: set[str] = set()
    deadline = time.monotonic() + LONG_S
    while seen != {"ping", "no"} and time.monotonic() < deadline:
        try:
            with _client(proxy) as client:
                _round_trip(client)
            seen.add("ping")
        except (OSError, AssertionError):
            seen.add("no")
    assert seen == {"ping", "no"}
    proxy.forward()
    with _client(proxy) as client:
        time.sleep(0.2)
        _round_trip(client)


def test_a_server_on_a_unix_socket(home: Path) -> None:
    path = home / "echo.sock"
    echo = socketserver.ThreadingUnixStreamServer(str(path), _Echo)
    echo.daemon_threads = True
    with _served(echo), Proxy(path) as proxy, _client(proxy) as client:
        _round_trip(client)


def test_no_server_behind_it_is_a_broken_connection(home: Path) -> None:
    with (
        Proxy(home / "missing.sock") as proxy,
        _client(proxy) as client,
        pytest.raises(ConnectionResetError),
    ):
        client.recv(1)
