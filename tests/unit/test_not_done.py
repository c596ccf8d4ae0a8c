"""Which errors prove that a call did nothing; a real client is asked, too."""

from __future__ import annotations

import socket
import ssl

import aiohttp
import pytest

from ackbone.core.errors import NotDone, TemporaryError, proves_not_done

REFUSED = ConnectionRefusedError(111, "Connection refused")


def raised(error: BaseException, *, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def while_handling(first: BaseException, error: BaseException) -> BaseException:
    try:
        try:
            raise first
        except BaseException:
            raise error  # noqa: B904 - that is what is tested
    except BaseException as caught:
        return caught


def connect_error(name: str, module: str) -> BaseException:
    """As httpx and httpcore have it: the cause is taken off on its way."""
    kind = type(name, (Exception,), {"__module__": module})
    error = while_handling(REFUSED, kind("All connection attempts failed"))
    error.__cause__ = None
    return error


@pytest.mark.parametrize(
    "error",
    [
        REFUSED,
        OSError(111, "Connection refused"),
        socket.gaierror(-2, "Name or service not known"),
        NotDone("they said no"),
        raised(RuntimeError("no connection"), cause=REFUSED),
        raised(OSError("all failed"), cause=ExceptionGroup("all", [REFUSED, REFUSED])),
        connect_error("ConnectError", "httpx"),
        raised(RuntimeError("sdk"), cause=connect_error("ConnectError", "httpcore")),
        while_handling(REFUSED, ConnectionRefusedError("the other one, too")),
    ],
    ids=repr,
)
def test_not_done(error: BaseException) -> None:
    assert proves_not_done(error)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("no answer"),
        ConnectionResetError(104, "reset"),
        TemporaryError("later"),
        ssl.SSLError("bad"),
        raised(RuntimeError("late"), cause=TimeoutError()),
        # An earlier call of the same function may have reached the other side.
        while_handling(TimeoutError("no answer"), ConnectionRefusedError("the retry")),
        # The second place was reached.
        while_handling(REFUSED, TimeoutError("no answer")),
        raised(OSError("all failed"), cause=ExceptionGroup("all", [REFUSED, TimeoutError()])),
        connect_error("ConnectTimeout", "httpx"),
        connect_error("ConnectError", "elsewhere"),
    ],
    ids=repr,
)
def test_unknown(error: BaseException) -> None:
    assert not proves_not_done(error)


async def test_a_real_client_that_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as caught:
                await session.post(url)
    assert proves_not_done(caught.value)
