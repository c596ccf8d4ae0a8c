"""The child process of an isolated handler.

    python -m ackbone.processes.handler_child TARGET SOCKET WORKER_PID

A worker starts it. It loads the app as a worker does, opens neither store nor broker, and ends when
the worker ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence

from ackbone.core.errors import AckboneError
from ackbone.engine.child_protocol import Hello, packed
from ackbone.engine.child_runner import serve

from .launcher import end_with_parent


def main(arguments: Sequence[str] | None = None) -> int:
    target, number, parent = sys.argv[1:] if arguments is None else arguments
    end_with_parent(signal.SIGKILL, parent=int(parent))
    for name in (signal.SIGINT, signal.SIGTERM):
        # These signals are meant for the worker, which drains and decides. A stop of the whole
        # process group must not look like a crash. Not SIG_IGN: programs that a handler starts
        # would inherit that.
        signal.signal(name, _leave_it_to_the_worker)
    sock = socket.socket(fileno=int(number))
    os.set_inheritable(sock.fileno(), False)

    from ackbone.observe.logs import configure_logs

    from .load_app import load_app

    try:
        app = load_app(target)
    except AckboneError as error:
        return _refuse(sock, str(error))
    except Exception as error:
        return _refuse(sock, f"{target}: {type(error).__name__}: {error}")
    configure_logs(level=app.config.log.level)
    asyncio.run(serve(sock, app.handlers, app._follow_up))
    return 0


def _refuse(sock: socket.socket, why: str) -> int:
    sock.sendall(packed(Hello(problem=why)))
    return os.EX_CONFIG


def _leave_it_to_the_worker(*_: object) -> None:
    """Do nothing."""


if __name__ == "__main__":
    sys.exit(main())
