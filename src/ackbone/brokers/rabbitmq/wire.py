"""A connection that is made again when it is lost, and a deadline for every call on it.

A call of the driver may hang without end: on a silent network, behind a full socket, and in a
server that stands still. After its deadline the connection has to open another channel. If it does,
only one queue stands still. Otherwise it is aborted, which ends every call that waits on it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiormq
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import (
    AMQPChannelError,
    AMQPError,
    InvalidFrameError,
    ProbableAuthenticationError,
)

from ackbone.core.errors import BrokerDenied, BrokerError, BrokerUnavailable, ConfigError

from .address import Address
from .decoding import tolerant_context

log = logging.getLogger("ackbone.brokers.rabbitmq")
for _name in ("aiormq.connection", "aiormq.channel"):  # a traceback for each lost connection
    logging.getLogger(_name).setLevel(logging.CRITICAL)

T = TypeVar("T")
FAULTS = (AMQPError, ConnectionError, OSError, RuntimeError, TimeoutError)
"""Errors of the driver after a lost connection. A closed channel is a RuntimeError."""
FRAMES = 1000
"""Received frames that the driver keeps for a channel before it stops reading."""
_GRACE_S = 1.0
"""After a connection was aborted, its calls end within this time."""
_CLOSE_S = 2.0
_PROOF_S = 2.0
"""How long a connection in doubt has to open a channel."""


class _Transports(TransportFactory):
    """Keeps the connection's transport, so that it can be aborted."""

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None

    async def create(
        self, url: Any, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        kind = TLSTransportFactory if url.scheme == "amqps" else TCPTransportFactory
        reader, self._writer = await kind().create(url, **options)
        return reader, self._writer

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()


class Link:
    """One connection to the server. It is made when it is needed."""

    def __init__(self, address: Address, *, url_now: Callable[[], Address] | None = None) -> None:
        """`url_now` is called for a new address when the server refuses the credentials."""
        self._address = address
        self._url_now = url_now
        self._connection: aiormq.Connection | None = None
        self._transports = _Transports()
        self._opening: asyncio.Task[aiormq.Connection] | None = None
        self._proving: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def where(self) -> str:
        return self._address.where

    @property
    def timeout_s(self) -> float:
        return self._address.timeout_s

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version. It is empty if the server does not say."""
        if self._connection is None:
            return ()
        text = str(self._connection.server_properties.get("version", ""))
        numbers = text.partition("-")[0].split(".")
        return tuple(int(each) for each in numbers if each.isdigit())

    @property
    def blocked(self) -> bool:
        """Return True while the server takes no messages: it is short of memory or disk."""
        connection = self._connection
        if connection is None or connection.is_closed:
            return False
        asked: Coroutine[Any, Any, None] = connection.ready()
        try:
            asked.send(None)  # it ends at once unless it has to wait
        except StopIteration:
            return False
        asked.close()
        return True

    async def unblocked(self, within_s: float) -> None:
        """Wait until the server takes messages. Raises BrokerUnavailable if it does not."""
        connection = self._connection
        if connection is None or not self.blocked:
            return
        try:
            async with asyncio.timeout(within_s):
                await connection.ready()
        except TimeoutError:
            raise BrokerUnavailable(self.blocked_text) from None

    @property
    def blocked_text(self) -> str:
        return f"{self.where}: the server takes no messages (its memory or disk alarm is on)"

    # -- connecting -------------------------------------------------------------------------------

    async def connection(self) -> aiormq.Connection:
        """Return an open connection. Raises BrokerUnavailable and BrokerDenied."""
        if self._closed:
            raise BrokerUnavailable(f"{self.where}: the broker is not open")
        if self._proving is not None:
            await asyncio.wait({self._proving})
        found = self._connection
        if found is not None and found.is_opened:
            return found
        if self._opening is None or self._opening.done():
            self._opening = _spawn(self._open())
        opening = self._opening
        await asyncio.wait({opening})
        if opening.cancelled():
            raise BrokerUnavailable(f"{self.where}: the broker is not open")
        return opening.result()

    async def _open(self) -> aiormq.Connection:
        try:
            return await self._connect()
        except BrokerDenied:
            if not await self._renewed():
                raise
        return await self._connect()

    async def _connect(self) -> aiormq.Connection:
        transports = _Transports()
        connection = aiormq.Connection(
            self._address.url,
            transport_factory=transports,
            client_properties={"connection_name": "ackbone"},
        )
        connecting = _spawn(connection.connect(), context=tolerant_context())
        try:
            await asyncio.wait({connecting}, timeout=self.timeout_s)
        finally:
            if not connecting.done():
                transports.abort()
                connecting.cancel()
        if not connecting.done():
            await asyncio.wait({connecting}, timeout=_GRACE_S)
            raise BrokerUnavailable(f"{self.where}: no connection within {self.timeout_s:.1f} s")
        error = None if connecting.cancelled() else connecting.exception()
        if connecting.cancelled() or error is not None:
            raise self._no_connection(error)
        self._connection, self._transports = connection, transports
        return connection

    def _no_connection(self, error: BaseException | None) -> BaseException:
        if isinstance(error, ProbableAuthenticationError):
            return BrokerDenied(
                f"{self.where} refuses the login: {_words(error)} Correct the user or the "
                "password in `broker`"
            )
        if isinstance(error, InvalidFrameError) and "OpenOk" in str(error):
            return BrokerDenied(
                f"{self.where}: the vhost {self._address.vhost!r} does not exist, or this user has "
                "no access to it. Make it (rabbitmqctl add_vhost), give the user access "
                "(rabbitmqctl set_permissions), or correct the vhost in `broker`"
            )
        if error is None or isinstance(error, FAULTS):
            return BrokerUnavailable(f"{self.where}: {_words(error)}")
        return error

    async def _renewed(self) -> bool:
        """Read the URL again. Returns True if it has changed."""
        if self._url_now is None:
            return False
        try:
            address = await asyncio.to_thread(self._url_now)
        except ConfigError as error:  # somebody may be editing it at this moment
            log.warning("%s: the credentials are refused: %s", self.where, error)
            return False
        if address.url == self._address.url:
            return False
        log.warning("%s: the credentials were refused; using the new ones", self.where)
        self._address = address
        return True

    # -- calls ------------------------------------------------------------------------------------

    async def channel(self, *, confirms: bool = False) -> Any:
        """Return a new channel."""
        connection = await self.connection()
        opening = connection.channel(
            publisher_confirms=confirms, frame_buffer_size=FRAMES, on_return_raises=False
        )
        return await self.call(opening)

    async def call(self, work: Coroutine[Any, Any, T], *, within_s: float | None = None) -> T:
        """Return the result of a call of the driver. After the deadline the connection is in doubt.

        A caller that is cancelled leaves the call to its deadline: cancelled itself, it would
        close its channel. Raises BrokerUnavailable, and AMQPChannelError if the server refused it.
        """
        limit = self.timeout_s if within_s is None else within_s
        task = _spawn(work)
        timer = asyncio.get_running_loop().call_later(limit, self.doubt, self._connection)
        task.add_done_callback(lambda _: timer.cancel())
        await asyncio.wait({task}, timeout=limit + _GRACE_S)
        if not task.done():
            if self.blocked:
                raise BrokerUnavailable(self.blocked_text)
            task.cancel()
            raise BrokerUnavailable(f"{self.where}: no answer within {limit:.1f} s")
        if task.cancelled():  # the driver does that when the server sends no heartbeats
            raise BrokerUnavailable(f"{self.where}: the connection was lost")
        error = task.exception()
        if isinstance(error, AMQPChannelError):
            raise error
        if isinstance(error, FAULTS) and not isinstance(error, BrokerError):
            raise BrokerUnavailable(f"{self.where}: {_words(error)}") from error
        return task.result()

    def doubt(self, connection: aiormq.Connection | None = None) -> None:
        """Check the connection: it missed a deadline. `connection`: nothing to do if it is another
        one by now."""
        current = self._connection
        if current is None or (connection is not None and connection is not current):
            return
        # A blocked connection lives, and what was written to it is stored later.
        if self._proving is None and not self._closed and not self.blocked:
            self._proving = _spawn(self._prove(current, self._transports))
            self._proving.add_done_callback(self._proven)

    async def _prove(self, connection: aiormq.Connection, transports: _Transports) -> None:
        opening = _spawn(connection.channel(publisher_confirms=False))
        await asyncio.wait({opening}, timeout=min(_PROOF_S, self.timeout_s))
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            closing = _spawn(opening.result().close())
            await asyncio.wait({closing}, timeout=_GRACE_S)
            return
        log.warning("%s: the server does not answer; connecting again", self.where)
        transports.abort()
        # The end of the connection is known before anybody asks for it.
        await asyncio.wait({opening}, timeout=_GRACE_S)

    def _proven(self, proving: asyncio.Task[None]) -> None:
        self._proving = None

    async def close(self) -> None:
        self._closed = True
        for task in (self._opening, self._proving):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        connection, self._connection = self._connection, None
        if connection is None:
            return
        closing = _spawn(connection.close())
        done, _ = await asyncio.wait({closing}, timeout=_CLOSE_S)
        if not done:
            self._transports.abort()
            await asyncio.wait({closing}, timeout=_GRACE_S)


def _words(error: BaseException | None) -> str:
    return str(error) or type(error).__name__ if error is not None else "the connection was lost"


def _spawn(
    work: Coroutine[Any, Any, T], *, context: contextvars.Context | None = None
) -> asyncio.Task[T]:
    """Start a task whose error is read, even if its caller is gone."""
    task = asyncio.create_task(work, context=context)
    task.add_done_callback(lambda _: task.cancelled() or task.exception())
    return task
