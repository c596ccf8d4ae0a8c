"""Which errors of a call prove that it did nothing."""

from __future__ import annotations

import socket

from .errors import NotDone

_NOT_DONE = (NotDone, ConnectionRefusedError, socket.gaierror)
_NO_CONNECTION = frozenset(
    {
        ("httpx", "ConnectError"),
        ("httpcore", "ConnectError"),
        ("aiohttp.client_exceptions", "ClientConnectorError"),
    }
)
"""By module and name: these libraries need not be there. Each says that no connection was made."""


def proves_not_done(error: BaseException) -> bool:
    """True: the call never reached the other side.

    That is a refused connection, a name that DNS does not know, or what was raised `from` one of
    them. Not if another error was being handled when it was raised: that may be one of an earlier
    call, which did reach the other side.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(proves_not_done(each) for each in error.exceptions)
    cause, context = error.__cause__, error.__context__
    if context is not None and context is not cause and not proves_not_done(context):
        return False
    if isinstance(error, _NOT_DONE) or _is_unconnected(error):
        return True
    return cause is not None and proves_not_done(cause)


def _is_unconnected(error: BaseException) -> bool:
    return any((each.__module__, each.__name__) in _NO_CONNECTION for each in type(error).__mro__)
