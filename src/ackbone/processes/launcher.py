"""Start worker processes: `spawn` from nothing, or by a fork of a process that has our imports.

Starting a worker from nothing costs 0.3 s of CPU, nearly all of it our own imports. A fork costs a
tenth of that, so that messages which kill their process again and again delay the others less.
The launcher never loads the user's app, opens no store and starts no thread, because a fork would
break those. It ends with the process that started it, and its workers end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, Protocol

_PR_SET_PDEATHSIG = 1
_STOPS = (signal.SIGINT, signal.SIGTERM)
_START_S = 30.0
"""How long a launcher may take to answer. The first answer waits for its imports."""
_MOST_BYTES = 65536
_IMPORTS = (
    "ackbone.app",
    "ackbone.brokers.sqlite",
    "ackbone.composition.background",
    "ackbone.observe.logs",
    "ackbone.processes.worker_process",
    "ackbone.backends",
    "ackbone.store.revisions",
    "ackbone.store.sqlite.migrate",
    "ackbone.store.anchors",
    "ackbone.store.upkeep",
    "ackbone.store.sqlite.prune",
    "ackbone.store.retention",
    "ackbone.store.sqlite.seals",
)


class Process(Protocol):
    """A worker process, as the one that started it sees it. `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return its exit code, a signal as a negative number; None while it runs."""

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Launcher:
    """The launcher as the process that started it sees it."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._is_gone = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ackbone.processes.launcher", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, arguments: Sequence[str], *, report_fd: int | None = None) -> Forked:
        """Fork a worker with these arguments of `python -m ackbone.processes.worker_process`.

        Raises OSError if the launcher cannot do it.
        """
        fds = [] if report_fd is None else [report_fd]
        self._sock.settimeout(_START_S)
        socket.send_fds(self._sock, [json.dumps(list(arguments)).encode()], fds)
        while (pid := self._hear()) is None:
            if self._is_gone:
                raise ConnectionError("the launcher ended")
        return Forked(self, pid)

    def close(self) -> None:
        """End the launcher. Workers that still run are asked to stop."""
        self._sock.close()
        self._process.wait()

    def code_of(self, pid: int, *, wait_s: float | None) -> int | None:
        """Return the exit code of a worker. None: it did not end within `wait_s`."""
        self._sock.settimeout(wait_s)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while pid not in self._codes and not self._is_gone:
                self._hear()
        if self._is_gone:  # and has asked its workers to stop
            return self._codes.get(pid, -signal.SIGTERM)
        return self._codes.get(pid)

    def knows_end_of(self, pid: int) -> bool:
        return pid in self._codes

    def _hear(self) -> int | None:
        """Read one line of the launcher. Returns the id of a process that was started."""
        try:
            words = self._sock.recv(_MOST_BYTES).split()
        except ConnectionError:  # it ended before it read what we asked for
            words = []
        if not words:
            self._is_gone = True
            return None
        pid = int(words[1])
        if words[0] == b"started":
            self._codes.pop(pid, None)  # of an earlier process with the same id
            return pid
        self._codes[pid] = int(words[2])
        return None


class Forked:
    """A worker that a launcher has forked."""

    def __init__(self, launcher: Launcher, pid: int) -> None:
        self._launcher = launcher
        self.pid = pid

    def poll(self) -> int | None:
        return self._launcher.code_of(self.pid, wait_s=0.0)

    def send_signal(self, sig: int) -> None:
        """Send it, unless the process is known to have ended. This reads nothing from the launcher,
        because a signal handler may call it during another read."""
        if not self._launcher.knows_end_of(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        code = self._launcher.code_of(self.pid, wait_s=timeout)
        if code is None:
            raise subprocess.TimeoutExpired("ackbone.processes.launcher", timeout or 0.0)
        return code


def spawn(
    target: str, options: Sequence[str] = (), *, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a worker process from nothing. It ends with its parent."""
    command = [sys.executable, "-m", "ackbone.processes.worker_process", target, *options]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=pass_fds,
        preexec_fn=end_with_parent,  # noqa: PLW1509 - one system call, takes no lock
    )


def end_with_parent(number: int = signal.SIGTERM, *, parent: int | None = None) -> None:
    """Let the kernel send this process a signal when its parent ends. With the number of the
    parent, also end this process if the parent ended before that."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The launcher process: fork workers when asked, report those that ended."""
    (number,) = sys.argv[1:] if arguments is None else arguments
    sock = socket.socket(fileno=int(number))
    os.set_inheritable(sock.fileno(), False)
    for name in _STOPS:  # meant for its owner, which decides about the workers
        signal.signal(name, signal.SIG_IGN)
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for module in _IMPORTS:
        importlib.import_module(module)
    from ackbone.config.load import settings_by_last_name

    settings_by_last_name()  # 20 ms of every start
    gc.collect()
    gc.freeze()
    while True:
        readable, _, _ = select.select([sock, wake], [], [])
        try:
            if wake in readable:
                wake.recv(_MOST_BYTES)
                _report_ends(sock)
            if sock in readable:
                data, fds, _, _ = socket.recv_fds(sock, _MOST_BYTES, 1)
                if not data:
                    return 0
                _fork(sock, json.loads(data), fds, [wake, woken])
        except ConnectionError:
            return 0


def _report_ends(sock: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            sock.send(b"ended %d %d" % (pid, os.waitstatus_to_exitcode(status)))


def _fork(
    sock: socket.socket, arguments: list[str], fds: list[int], others: list[socket.socket]
) -> None:
    launcher = os.getpid()
    # The launcher ignores these signals. One that comes right after the fork is blocked until the
    # worker handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    pid = os.fork()
    if pid == 0:
        _become_worker(launcher, [sock, *others], arguments, fds)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    for fd in fds:
        os.close(fd)
    sock.send(b"started %d" % pid)


def _become_worker(
    launcher: int, sockets: list[socket.socket], arguments: list[str], fds: list[int]
) -> NoReturn:
    """Run a worker in the child of a fork, and end the process with it."""
    code = 1
    try:
        end_with_parent(parent=launcher)
        signal.set_wakeup_fd(-1)
        for name in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(name, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        for each in sockets:
            each.close()
        from .worker_process import main as work

        sys.argv = ["ackbone.processes.worker_process", *arguments]
        code = work([*arguments, *(f"--report-fd={fd}" for fd in fds)])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
