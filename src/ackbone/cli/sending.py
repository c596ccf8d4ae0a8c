"""`ackbone send`."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ackbone.admin.sending import Defaults, Encode, Item, Publish, encoded, lines_of, send_each
from ackbone.composition.brokers import explained
from ackbone.core.broker import Durability, Result
from ackbone.core.errors import AckboneError, BrokerUnavailable, StoreUnavailable
from ackbone.core.store import Send

from .output import safe
from .parameters import HEADER, JSON, PRIORITY, SPAN
from .session import Exit, Session, command, encoder, exit_code, stop

if TYPE_CHECKING:
    from ackbone.app import App

_ONE_ONLY = ("payload", "count", "id", "idempotency_key", "ordering_key", "correlation_id")
_TRANSPORT = ("delay_s", "ttl_s")
_FIELDS = (*_ONE_ONLY[2:], "priority", "tenant_id", *_TRANSPORT)
"""The options that are fields of the message."""
_SPOOL_BYTES = 16 * 1024 * 1024


@command(
    'ackbone send --type chat --payload \'{"text": "hello"}\'',
    "ackbone send --queue orders --file messages.jsonl",
    "generate | ackbone send --file - --strict --json",
)
@click.option("--queue", help="Queue (default: default_queue of the configuration).")
@click.option("--type", help="Message type; with --file, the type of lines that have none.")
@click.option("--payload", type=JSON, help="Payload as JSON; '-' reads standard input.")
@click.option(
    "--file",
    help="Send a file of JSON lines, one standard message per line; '-' reads standard input.",
)
@click.option("--strict", is_flag=True, help="With --file: send nothing if any line is invalid.")
@click.option("--count", type=click.IntRange(1, 10_000_000), help="Send this many copies.")
@click.option(
    "--id", help="Message id. A second message with the same id and payload does not run."
)
@click.option(
    "--idempotency-key", help="Messages with the same key run once within the key's window."
)
@click.option(
    "--ordering-key", help="Conversation of the message; its messages run one after another."
)
@click.option("--correlation-id", help="Id of the request or message that this one belongs to.")
@click.option("--priority", type=PRIORITY, help="low, normal, high, critical or 0 to 3.")
@click.option(
    "--delay",
    "delay_s",
    type=SPAN,
    help="Run it after this time at the earliest: 30s, 5m, 2h.",
)
@click.option(
    "--ttl", "ttl_s", type=SPAN, help="Dead-letter it if it has not started within this time."
)
@click.option("--tenant", "tenant_id", help="Tenant of the message.")
@click.option("--header", type=HEADER, multiple=True, help="NAME=VALUE; may be repeated.")
async def send(session: Session, file: str | None, strict: bool, **options: Any) -> None:
    """Send a message, or a file of messages.

    Returns when the messages are durable, and prints the id. Each line of a file is a standard
    message: {"message_type": "chat", "payload": {…}, "metadata": {…}}. Invalid lines are reported
    with their number and reason, and the others are sent (exit code 7), unless --strict is given.
    """
    if file is None:
        if strict:
            raise click.UsageError("--strict needs --file.")
        if not options["type"]:
            raise click.UsageError("Give the message's --type, or a --file of messages.")
        if options["id"] and (options["count"] or 1) > 1:
            raise click.UsageError(
                "--id and --count exclude each other: an id belongs to one message."
            )
        await _send_options(session, options)
        return
    given = [name for name in _ONE_ONLY if options[name] is not None]
    if given:
        option = given[0].replace("_", "-")
        raise click.UsageError(f"--{option} is for one message; with --file each line has its own.")
    with _opened(file) as (stream, size):
        await _send_file(session, stream, size, strict, options)


async def _send_options(session: Session, options: Mapping[str, Any]) -> None:
    from ackbone.app import App

    app = App(session.config)
    count = options["count"] or 1
    first = _one(app, options)  # refused before anything is opened

    def copies(advance: Callable[[int], None]) -> Iterator[Item]:
        for number in range(1, count + 1):
            advance(1)
            yield number, first if number == 1 else _one(app, options)

    await _send(session, app, options, copies, "sending", count, one=count == 1)


def _one(app: App, options: Mapping[str, Any]) -> Send:
    fields = {name: options[name] for name in _FIELDS if options[name] is not None}
    if options["header"]:
        fields["headers"] = dict(options["header"])
    fields["source"] = "cli"
    return app.outgoing(options["type"], options["payload"], queue=options["queue"], **fields)


async def _send_file(
    session: Session, stream: BinaryIO, size: int | None, strict: bool, options: Mapping[str, Any]
) -> None:
    from ackbone.app import App

    app = App(session.config)
    defaults = Defaults(
        type=options["type"],
        tenant_id=options["tenant_id"],
        priority=options["priority"],
        headers=dict(options["header"]),
    )
    encode = _line_encoder(app, options)
    limit = 4 * app.config.max_message_bytes
    with contextlib.ExitStack() as stack:
        if strict:
            stream = stack.enter_context(_rewindable(stream))
            _check_all(session, encoded(lines_of(stream, limit=limit), defaults, encode))
            stream.seek(0)

        def lines(advance: Callable[[int], None]) -> Iterator[Item]:
            return encoded(lines_of(_Counted(stream, advance), limit=limit), defaults, encode)

        await _send(session, app, options, lines, "sending (bytes)", size)


def _publisher(app: App) -> Publish:
    """Return the function that publishes a batch.

    A broker without delays does not get messages that are not due yet: the store holds them.
    """

    async def publish(queue: str, batch: Sequence[Send]) -> Sequence[Result]:
        delay_s = batch[0].outgoing.delay_s  # --delay: the same for all
        if not _kept_by_the_store(app, queue, delay_s):
            try:
                return await app.brokers.of(queue).publish(queue, [send.outgoing for send in batch])
            except BrokerUnavailable as error:
                raise explained(app.config, queue, error) from error
        for send in batch:
            await app.store.hold_back(send)
        return [Result(id=send.outgoing.id) for send in batch]

    return publish


def _kept_by_the_store(app: App, queue: str, delay_s: float) -> bool:
    return delay_s > 0 and not app.brokers.of(queue).capabilities.delay


def _line_encoder(app: App, options: Mapping[str, Any]) -> Encode:
    transport = {name: options[name] for name in _TRANSPORT if options[name] is not None}
    encode = encoder(app, **transport)
    return lambda message: encode(message, options["queue"] or app.config.default_queue)


def _check_all(session: Session, items: Iterable[Item]) -> None:
    """Check every line for --strict, and end the command if one is invalid."""
    wrong = 0
    for number, item in items:
        if isinstance(item, AckboneError):
            wrong += 1
            _refused(session, number, item)
    if wrong:
        lines = "line" if wrong == 1 else "lines"
        session.out.say(f"nothing was sent: {wrong} invalid {lines}")
        stop(Exit.FAILURE)


async def _send(
    session: Session,
    app: App,
    options: Mapping[str, Any],
    items: Callable[[Callable[[int], None]], Iterator[Item]],
    label: str,
    total: int | None,
    *,
    one: bool = False,
) -> None:
    """Send the items, whose progress they report, print a receipt for each and the total."""
    out = session.out
    sent = refused = 0
    stopped: tuple[int, AckboneError] | None = None
    async with _open_for(app, options["queue"] or app.config.default_queue):
        _refuse_memory(app)
        with out.progress(label, total) as advance:
            async for answer in send_each(
                items(advance), _publisher(app), timeout_s=app.config.send_timeout_s
            ):
                if answer.error is None:
                    sent += 1
                    queue = answer.queue or app.config.default_queue
                    durability = app.brokers.of(queue).capabilities.durability
                    if _kept_by_the_store(app, queue, options["delay_s"] or 0.0):
                        durability = Durability.FSYNC
                    receipt = {"id": answer.id, "queue": answer.queue, "durability": durability}
                    out.data({**receipt, "line": answer.line}, answer.id if one else None)
                elif answer.stops:
                    stopped = answer.line, answer.error
                else:
                    refused += 1
                    _refused(session, answer.line, answer.error)
    if stopped is not None:
        line, error = stopped
        text = (
            f"stopped at line {line}: {error}. {sent} messages before it were "
            f"sent; to continue: tail -n +{line} FILE | ackbone send --file -"
        )
        out.say(f"ackbone: {error}." if one else f"ackbone: {text}")
        stop(exit_code(error))
    if not one:
        out.line(f"sent {sent}{f', refused {refused}' if refused else ''}")
    if refused:
        stop(Exit.PARTIAL if sent else Exit.FAILURE)


@contextlib.asynccontextmanager
async def _open_for(app: App, queue: str) -> AsyncIterator[None]:
    """Open the app to send to this queue. An error says that nothing was sent."""
    try:
        await app.open()
    except BrokerUnavailable as error:
        raise explained(app.config, queue, error) from error
    except StoreUnavailable as error:
        hint = f". {error.hint.capitalize()}, then send again" if error.hint else ""
        raise type(error)(f"{error}; nothing was sent to queue {queue}{hint}") from error
    try:
        yield
    finally:
        await app.close()


def _refused(session: Session, line: int, error: AckboneError) -> None:
    session.out.say(f"line {line}: {safe(error)}")


def _refuse_memory(app: App) -> None:
    if any(each.kind.name == "memory" for each in app.config.endpoints.values()):
        raise BrokerUnavailable(
            "the broker is memory://, which no other process can reach; "
            "write broker: sqlite to send from another process"
        )


class _Counted:
    """A file that reports how many bytes are read."""

    def __init__(self, stream: BinaryIO, advance: Callable[[int], None]) -> None:
        self._stream = stream
        self._advance = advance

    def readline(self, size: int, /) -> bytes:
        text = self._stream.readline(size)
        self._advance(len(text))
        return text


@contextlib.contextmanager
def _opened(file: str) -> Iterator[tuple[BinaryIO, int | None]]:
    if file == "-":
        yield sys.stdin.buffer, None
        return
    try:
        stream = open(file, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise click.UsageError(f"Cannot read {file!r}: {error.strerror}.") from None
    with stream:
        yield stream, os.fstat(stream.fileno()).st_size


@contextlib.contextmanager
def _rewindable(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Yield the same bytes as a file that can be read twice; a pipe is copied to disk."""
    if stream.seekable():
        yield stream
        return
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as copy:
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        yield copy  # type: ignore[misc]
