"""The RabbitMQ that tests start keeps its data, stands still when told to, and leaves nothing."""

import base64
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.rabbitmq import DEBIAN, NEWEST, RabbitServer

pytestmark = [pytest.mark.xdist_group("rabbitmq"), pytest.mark.timeout(300)]
QUEUE = "kept"
HELLO = b"AMQP\x00\x00\x09\x01"


@pytest.fixture(params=[DEBIAN, NEWEST], ids=["debian", "newest"])
def server(request: pytest.FixtureRequest) -> Iterator[RabbitServer]:
    server = RabbitServer(request.param)
    yield server
    server.remove()


def test_its_life(server: RabbitServer) -> None:
    server.start()
    server.api("PUT", f"queues/%2F/{QUEUE}", {"durable": True})
    letter = {
        "properties": {"delivery_mode": 2},
        "routing_key": QUEUE,
        "payload": base64.b64encode(b"body").decode(),
        "payload_encoding": "base64",
    }
    assert server.api("POST", "exchanges/%2F/amq.default/publish", letter) == {"routed": True}

    server.pause()
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.5) as client:
        client.sendall(HELLO)
        with pytest.raises(TimeoutError):
            client.recv(1)
        server.go_on()
        client.settimeout(30)
        assert client.recv(1) == b"\x01"

    server.restart()
    found = server.api("POST", f"queues/%2F/{QUEUE}/get", _GET)
    assert [each["payload"] for each in found] == ["body"]

    of_it = _processes(server)
    assert of_it, "no process was found to look for later"
    server.remove()
    assert not _processes(server)
    assert not server.folder.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


_GET = {"count": 2, "ackmode": "ack_requeue_false", "encoding": "auto"}


def _processes(server: RabbitServer) -> list[str]:
    """Those that have its folder in their environment, or its epmd's port in their command."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (each / "environ").read_bytes() + (each / "cmdline").read_bytes()
            if str(server.folder).encode() in text or f"-port\0{server.epmd_port}".encode() in text:
                found.append(each.name)
    return found


def test_a_missing_one_says_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"run tests/prepare\.sh"):
        RabbitServer(tmp_path)
