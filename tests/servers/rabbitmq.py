"""A private RabbitMQ node: its own folder, its own epmd, free ports of 127.0.0.1.

There are two versions: `DEBIAN`, the package of this machine (3.10.8 on Debian 12), and `NEWEST`,
in a root directory that tests/prepare.sh fetches (4.3). `python -m tests.servers.rabbitmq` measures
both, on two cores: a start takes 4 to 7 s, a stop 0.3 s (4.3) or 6 s (3.10), a kill 0.1 s.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

DEBIAN = Path("/")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
NEWEST = Path(os.environ.get("ACKBONE_TEST_RABBITMQ_ROOT") or _CACHE / "ackbone" / "rabbitmq-4")
"""A Debian root directory: newer servers need a newer libc than the machine may have."""
STARTS_WITHIN_S = 90.0
STOPS_WITHIN_S = 30.0
_PROGRAMS = "/usr/lib/rabbitmq/bin"
"""Not /usr/sbin: the scripts there insist on the user rabbitmq."""
_NODE = "ackbone@localhost"
_SETTINGS = """\
listeners.tcp.default = 127.0.0.1:{amqp}
management.tcp.ip = 127.0.0.1
management.tcp.port = {api}
loopback_users = none
vm_memory_high_watermark.absolute = 1GB
disk_free_limit.absolute = 50MB
"""


class RabbitServer:
    """Started, killed, paused and started again by tests, on the same ports and data."""

    def __init__(self, root: Path = DEBIAN, *settings: str) -> None:
        """`settings` are further lines of rabbitmq.conf."""
        _check(root)
        self._root = root
        self.folder = Path(tempfile.mkdtemp(prefix="ab-rabbit-", dir="/tmp"))
        with _free_ports(4) as ports:
            self.port, self._api_port, self.epmd_port, self._node_port = ports
        (self.folder / "home").mkdir()
        (self.folder / "enabled_plugins").write_text("[rabbitmq_management].")
        lines = _SETTINGS.format(amqp=self.port, api=self._api_port)
        (self.folder / "rabbitmq.conf").write_text(
            lines + "".join(f"{each}\n" for each in settings)
        )
        self._epmd: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        if self._epmd is None:
            self._epmd = self._start_epmd()
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                self._inside(f"{_PROGRAMS}/rabbitmq-server"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=self._environment(),
            )
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not self._answers():
            assert self._process.poll() is None, f"RabbitMQ ended:\n{self._last_words()}"
            assert time.monotonic() < deadline, f"RabbitMQ did not start:\n{self._last_words()}"
            time.sleep(0.05)

    def _start_epmd(self) -> subprocess.Popen[bytes]:
        """A child of ours. Where Erlang finds none it starts its own, which outlives the node."""
        command = ["epmd", "-port", str(self.epmd_port), "-address", "127.0.0.1"]
        with (self.folder / "output").open("ab") as output:
            epmd = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not _listens(self.epmd_port):
            assert epmd.poll() is None, self._last_words()
            assert time.monotonic() < deadline, "epmd did not start"
            time.sleep(0.01)
        return epmd

    def kill(self) -> None:
        """As `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """In order: connections are told, everything is on disk."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOPS_WITHIN_S)
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stands still: connections stay open and get no answer. Its threads stop one after the
        other."""
        os.kill(self.pid, signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid}/task")
        deadline = time.monotonic() + STOPS_WITHIN_S
        while not all(_is_stopped(thread) for thread in threads.iterdir()):
            assert time.monotonic() < deadline, "RabbitMQ does not stand still"
            time.sleep(0.01)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def remove(self) -> None:
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
            self._epmd = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def close_all_connections(self, user: str = "guest") -> None:
        """As an operator does: each client of this user gets CONNECTION_FORCED."""
        self.api("DELETE", f"connections/username/{quote(user, safe='')}")

    def queues(self) -> list[str]:
        return [each["name"] for each in self.api("GET", "queues")]

    def forget(self, *queues: str) -> None:
        for queue in queues:
            self.api("DELETE", f"queues/%2F/{quote(queue, safe='')}", missing_is_fine=True)

    @property
    def version(self) -> str:
        return str(self.api("GET", "overview")["rabbitmq_version"])

    def api(
        self, method: str, path: str, body: Any = None, *, missing_is_fine: bool = False
    ) -> Any:
        """What the management API answers; most writes answer nothing."""
        status, answer = self._request(method, path, body)
        if status == http.client.NOT_FOUND and missing_is_fine:
            return None
        assert status < http.client.BAD_REQUEST, f"{method} {path}: {status} {answer!r}"
        return json.loads(answer) if answer else None

    def ctl(self, *words: str) -> str:
        """What `rabbitmqctl`, as a person uses it, answers. A call takes a second."""
        command = self._inside(f"{_PROGRAMS}/rabbitmqctl", "--quiet", "-n", _NODE, *words)
        done = subprocess.run(
            command,
            env=self._environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        client = http.client.HTTPConnection("127.0.0.1", self._api_port, timeout=10)
        with contextlib.closing(client):
            login = base64.b64encode(b"guest:guest").decode()
            headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
            client.request(
                method, f"/api/{path}", json.dumps(body) if body is not None else None, headers
            )
            response = client.getresponse()
            return response.status, response.read()

    def _answers(self) -> bool:
        """The API does, and clients are let in: that comes last."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self._request("GET", "overview")[0] == http.client.OK and _listens(self.port)
        return False

    def _environment(self) -> dict[str, str]:
        folder = str(self.folder)
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": f"{folder}/home",
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": _NODE,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(self._node_port),
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{folder}/generated",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
            # The script becomes the server, as systemd wants it: no shell stays above it.
            "RUNNING_UNDER_SYSTEMD": "true",
            # Idle schedulers sleep: by default they spin, and the machine has other things to do.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
            "RABBITMQ_SERVER_START_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _inside(self, *command: str) -> Sequence[str]:
        """The command, seen from the server's root directory.

        /tmp with our folder, /proc and /dev are the machine's own. They are mounted in a namespace
        that ends with the process.
        """
        if self._root == DEBIAN:
            return command
        root = shlex.quote(str(self._root))
        mounts = "".join(
            f"mount --rbind /{each} {root}/{each} && " for each in ("tmp", "proc", "dev")
        )
        enter = f"{mounts} exec chroot {root} {shlex.join(command)}"
        not_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        return ["unshare", "--mount", *not_root, "/bin/sh", "-c", enter]

    def _last_words(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-2000:]


def _check(root: Path) -> None:
    if root == DEBIAN:
        assert Path(f"{_PROGRAMS}/rabbitmq-server").exists(), (
            "RabbitMQ is missing: run tests/prepare.sh (Debian package rabbitmq-server)"
        )
    else:
        assert (root / f".{_PROGRAMS}/rabbitmq-server").exists(), (
            f"RabbitMQ 4 is missing in {root}: run tests/prepare.sh, which fetches it from Debian"
        )


def _is_stopped(thread: Path) -> bool:
    try:
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return True
    return state in "Tt"


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    """Different ones: each is held until all are known."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]


def _time(root: Path) -> None:
    server = RabbitServer(root)
    try:
        for step in ("start", "restart", "stop", "start", "kill"):
            began = time.monotonic()
            getattr(server, step)()
            took = time.monotonic() - began
            print(f"{step:8} {took:5.1f} s", server.version if step == "restart" else "")
    finally:
        server.remove()


if __name__ == "__main__":
    for _each in (DEBIAN, NEWEST):
        _time(_each)
