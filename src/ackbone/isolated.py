"""The process of an isolated handler: `python -m ackbone.isolated TARGET SOCKET WORKER`.

Started by a worker; it loads the app as a worker does, opens neither store nor broker, and ends
with the worker, however that ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence

from ackbone.core.errors import AckboneError
from ackbone.engine.frames import Hello, packed
from ackbone.engine.isolated import serve

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    target, number, parent = sys.argv[1:] if arguments is None else arguments
    _end_with(int(parent))
    for name in (signal.SIGINT, signal.SIGTERM):
        # Meant for the worker, which drains and decides; a stop of the whole group must not look
        # like a crash. Not SIG_IGN: a program that a handler starts would inherit that.
        signal.signal(name, _leave_it_to_the_worker)
    sock = socket.socket(fileno=int(number))
    os.set_inheritable(sock.fileno(), False)

    from ackbone.observe.logs import configure_logs
    from ackbone.supervisor import load_app

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


def _end_with(parent: int) -> None:
    """Be killed when the worker dies, at whatever this process is doing then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before we could ask


def _leave_it_to_the_worker(*_: object) -> None:
    """Nothing."""


if __name__ == "__main__":
    sys.exit(main())
