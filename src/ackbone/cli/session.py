"""One execution of a command: common options, configuration, store, errors and exit codes."""

from __future__ import annotations

import asyncio
import functools
import getpass
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import click

from ackbone.core.errors import (
    AckboneError,
    Ambiguous,
    AppNotLoaded,
    BrokerUnavailable,
    ConfigError,
    Conflict,
    NotFound,
    PublishUnknown,
    StoreUnavailable,
)
from ackbone.core.secret import mask_line
from ackbone.engine.sender import MESSAGE_OPTIONS

from .output import Output, safe
from .root import Group, examples
from .signals import Signals

if TYPE_CHECKING:
    from ackbone.admin.queues import AtBrokers
    from ackbone.app import App
    from ackbone.backends import Acting as Operating
    from ackbone.backends import Looking, Storage
    from ackbone.config import Config
    from ackbone.core.broker import QueueStats
    from ackbone.core.message import Message
    from ackbone.core.store import Send

T = TypeVar("T")
Fn = TypeVar("Fn", bound=Callable[..., Any])


class Exit(IntEnum):
    """Exit codes."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 5
    UNAVAILABLE = 6
    PARTIAL = 7
    CHECK_FAILED = 10
    INTERRUPTED = 130
    TERMINATED = 143


_CODES: tuple[tuple[type[AckboneError], Exit], ...] = (
    (ConfigError, Exit.USAGE),
    (NotFound, Exit.NOT_FOUND),
    (Conflict, Exit.CONFLICT),
    (StoreUnavailable, Exit.UNAVAILABLE),
    (BrokerUnavailable, Exit.UNAVAILABLE),
    (PublishUnknown, Exit.UNAVAILABLE),
    (AckboneError, Exit.FAILURE),
)


def exit_code(error: AckboneError) -> Exit:
    return next(code for kind, code in _CODES if isinstance(error, kind))


class Acting(NamedTuple):
    """An open app, its records and its operations, for a command that changes something."""

    app: App
    records: Looking
    operations: Operating


class Session:
    """The first argument of every command."""

    def __init__(self, *, as_json: bool, config_path: Path | None, debug: bool) -> None:
        self.out = Output(as_json=as_json)
        self.debug = debug
        self.signals = Signals()
        self._config_path = config_path

    @functools.cached_property
    def config(self) -> Config:
        from ackbone.config import load_config

        return load_config(self._config_path)

    def load_app(self, target: str) -> App:
        """Load the app of MODULE:APP with the configuration that was given to this command."""
        from ackbone.processes.load_app import load_app

        if self._config_path is not None:
            _ = self.config  # report its mistakes under the file name that was given
        return load_app(target)

    @property
    def queues(self) -> list[str]:
        """Queues of the configuration, and the default queue of a broker with a server."""
        usual = {self.config.default_queue} if self.config.has_server else set()
        return list({**self.config.queues, **dict.fromkeys(usual)})

    @property
    def has_several_brokers(self) -> bool:
        """True if there are several brokers."""
        return len(self.config.endpoints) > 1

    async def look_at_brokers(self, queues: Collection[str]) -> AtBrokers:
        """Return the brokers of queues, and the messages at their servers.

        A server that cannot be reached is named, and its messages are not counted.
        """
        from ackbone.admin.queues import AtBrokers
        from ackbone.brokers.registry import make_broker
        from ackbone.core.broker import Inspectable

        brokers = {name: self.config.endpoint(name).name for name in queues}
        stats: list[QueueStats] = []
        uncounted: dict[str, str] = {}
        for endpoint in self.config.endpoints.values():
            if not endpoint.kind.is_server:
                continue
            broker = make_broker(endpoint.url)
            here = [name for name in queues if brokers[name] == endpoint.name]
            try:
                await broker.open()
                stats += await broker.stats(here) if isinstance(broker, Inspectable) else ()
            except AckboneError as error:
                uncounted[endpoint.name] = str(error)
                name = "" if endpoint.name == "default" else f" {endpoint.name}"
                self.out.say(f"messages at the broker{name} are not counted: {error}")
            finally:
                await broker.close()
        return AtBrokers(brokers=brokers, stats=stats, uncounted=uncounted)

    def codec_of(self, queue: str) -> str:
        return self.config.queue(queue).codec

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. SIGTERM and Ctrl+C cancel it; it closes what it opened."""
        if threading.current_thread() is not threading.main_thread():
            return asyncio.run(work)
        return asyncio.run(self.signals.run(work))

    @functools.cached_property
    def storage(self) -> Storage:
        """The database of the configuration."""
        from ackbone.backends import storage_of

        return storage_of(self.config)

    def reading(self) -> AbstractAsyncContextManager[Looking]:
        """Open the records for reading. This creates and migrates nothing."""
        return self.storage.reading()

    @asynccontextmanager
    async def acting(self) -> AsyncIterator[Acting]:
        """Open the records, and the operations on them, under a worker number of this process."""
        from ackbone.app import App

        self.storage.require()
        app = App(self.config)
        try:
            # Without a connection, messages go into the queue's file or into the outbox.
            await app.open(connect=False)
            async with operating(app) as (records, operations):
                yield Acting(app, records, operations)
        finally:
            await app.close()


@asynccontextmanager
async def operating(app: App) -> AsyncIterator[tuple[Looking, Operating]]:
    """Yield the records and the operations of an open app."""
    records = app.storage.records(app.store, app.brokers)
    async with app.storage.operations(app.store, by=operator_name()) as operations:
        yield records, operations


def encoder(app: App, **transport: float) -> Callable[[Message, str], Send]:
    """Return a function that checks and encodes a message for a queue, as `App.send` does.

    `transport` is delay_s and ttl_s for all messages.
    """

    def encode(message: Message, queue: str) -> Send:
        fields = {name: getattr(message, name) for name in MESSAGE_OPTIONS}
        return app.outgoing(message.type, message.payload, queue=queue, **fields, **transport)

    return encode


def operator_name() -> str:
    """Return the name that the ledger records for this operator."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def group(*lines: str) -> Callable[[Fn], click.Group]:
    """Make a group of commands with these examples."""
    return click.group(cls=Group, epilog=examples(*lines))


def command(
    *lines: str, of: click.Group | None = None, **settings: Any
) -> Callable[[Fn], click.Command]:
    """Make a command with these examples and the common options, in the group `of` if given.

    It is named like the function, which gets a `Session`. Its errors become exit codes. A coroutine
    is run to its end.
    """

    def decorate(fn: Fn) -> click.Command:
        name = fn.__name__.removesuffix("_")
        made = (click if of is None else of).command(name, epilog=examples(*lines), **settings)
        found: click.Command = made(_in_session(fn))
        found.params += _COMMON
        return found

    return decorate


_COMMON = (
    click.Option(
        ["--config", "config_path"],
        type=click.Path(dir_okay=False, path_type=Path),
        help="Read this file instead of ./ackbone.yaml.",
    ),
    click.Option(
        ["--home"],
        type=click.Path(file_okay=False, path_type=Path),
        help="Use this folder instead of ./.ackbone.",
    ),
    click.Option(["--json", "as_json"], is_flag=True, help="Write JSON."),
    click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
)


def _in_session(fn: Fn) -> Fn:
    @functools.wraps(fn)
    def wrapped(
        *args: Any,
        as_json: bool,
        config_path: Path | None,
        home: Path | None,
        debug: bool,
        **options: Any,
    ) -> Any:
        session = Session(as_json=as_json, config_path=config_path, debug=debug)
        try:
            with _environment(ACKBONE_CONFIG=config_path, ACKBONE_HOME=home):
                work = fn(session, *args, **options)
                return session.run(work) if asyncio.iscoroutine(work) else work
        except (click.ClickException, click.exceptions.Exit, click.Abort, SystemExit):
            raise
        except KeyboardInterrupt:
            click.echo(err=True)
            stop(Exit.INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output is gone, so an error message would go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            stop(Exit.FAILURE)
        except Exception as error:
            stop(report(error, debug=debug))

    return wrapped  # type: ignore[return-value]


@contextmanager
def _environment(**places: Path | None) -> Iterator[None]:
    """Set these variables while the command runs.

    An app that the command loads, and every process that it starts, reads the same configuration.
    """
    before = {name: os.environ.get(name) for name in places}
    os.environ.update(
        {name: os.path.abspath(place) for name, place in places.items() if place is not None}
    )
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def report(error: Exception, *, debug: bool) -> Exit:
    """Print an error for people, and return its exit code."""
    if debug:
        click.echo(mask_line("".join(traceback.format_exception(error))), err=True, nl=False)
    if not isinstance(error, AckboneError):
        hint = "" if debug else " Run the command again with --debug and report the output."
        _complain(mask_line(f"internal error: {type(error).__name__}: {error}.{hint}"))
        return Exit.FAILURE
    if isinstance(error, ConfigError):
        _complain("the configuration is wrong:")
        for problem in error.problems:
            click.echo(f"  {safe(problem)}", err=True)
    elif isinstance(error, AppNotLoaded):
        first, *where = mask_line(str(error)).splitlines()
        _complain(first)
        for line in where:
            click.echo(safe(line), err=True)
    else:
        _complain(str(error))
    if isinstance(error, Ambiguous):
        for match in error.matches:
            click.echo(f"  {safe(match)}", err=True)
    return exit_code(error)


def refuse(session: Session, error: ConfigError, **record: object) -> NoReturn:
    """End a check with the mistakes that it found."""
    session.out.data({"ok": False, **record, "problems": error.problems})
    for problem in error.problems:
        session.out.line(safe(problem))
    stop(Exit.CHECK_FAILED)


def _complain(text: str) -> None:
    click.echo(f"ackbone: {safe(text)}", err=True)


def stop(code: Exit) -> NoReturn:
    """End the command with this exit code."""
    raise click.exceptions.Exit(int(code))
