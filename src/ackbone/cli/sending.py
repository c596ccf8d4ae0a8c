"""`ackbone send`."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ackbone.core.broker import Durability, Result
from ackbone.core.errors import AckboneError, BrokerUnavailable

from .output import safe
from .parameters import Header, Json, PriorityName, Span
from .root import examples
from .session import Exit, Session, command_options, encoder, exit_code, stop

if TYPE_CHECKING:
    from ackbone.admin.sending import Answer, Defaults, Publish
    from ackbone.app import App
    from ackbone.core.message import Message
    from ackbone.core.store import Send

_ONE_ONLY = ("payload", "count", "id", "idempotency_key", "ordering_key", "correlation_id")
_SPOOL_BYTES = 16 * 1024 * 1024


@click.command(
    epilog=examples(
        'ackbone send --type chat --payload \'{"text": "hello"}\'',
        "ackbone send --queue orders --file messages.jsonl",
        "generate | ackbone send --file - --strict --json",
    )
)
@click.option("--queue", help="Queue (default: default_queue of the configuration).")
@click.option(
    "--type", "type_", help="Message type; with --file, the type of lines that have none."
)
@click.option("--payload", type=Json(), help="Payload as JSON; '-' reads standard input.")
@click.option(
    "--file",
    help="Send a file of JSON lines, one standard message per line; '-' reads standard input.",
)
@click.option("--strict", is_flag=True, help="With --file: send nothing if any line is invalid.")
@click.option("--count", type=click.IntRange(1, 10_000_000), help="Send this many copies.")
@click.option("--id", help="Message id. A second message with the same id is ignored.")
@click.option(
    "--idempotency-key", help="Messages with the same key run once within the key's window."
)
@click.option(
    "--ordering-key", help="Conversation of the message; its messages run one after another."
)
@click.option("--correlation-id", help="Id of the request or message that this one belongs to.")
@click.option("--priority", type=PriorityName(), help="low, normal, high, critical or 0 to 3.")
@click.option("--delay", type=Span(), help="Run it after this time at the earliest: 30s, 5m, 2h.")
@click.option("--ttl", type=Span(), help="Dead-letter it if it has not started within this time.")
@click.option("--tenant", help="Tenant of the message.")
@click.option("--header", type=Header(), multiple=True, help="NAME=VALUE; may be repeated.")
@command_options
def send(session: Session, file: str | None, strict: bool, **options: Any) -> None:
    """Send a message, or a file of messages.

    Returns when the messages are durable, and prints the id. Each line of a file is a standard
    message: {"message_type": "chat", "payload": {…}, "metadata": {…}}. Invalid lines are reported
    with their number and reason, and the others are sent (exit code 7), unless --strict is given.
    """
    if file is None:
        if strict:
            raise click.UsageError("--strict needs --file.")
        if not options["type_"]:
            raise click.UsageError("Give the message's --type, or a --file of messages.")
        if options["id"] and (options["count"] or 1) > 1:
            raise click.UsageError(
                "--id and --count exclude each other: an id belongs to one message."
            )
        session.run(_send_options(session, options))
        return
    given = [name for name in _ONE_ONLY if options[name] is not None]
    if given:
        option = given[0].replace("_", "-")
        raise click.UsageError(f"--{option} is for one message; with --file each line has its own.")
    with _opened(file) as (stream, size):
        session.run(_send_file(session, stream, size, strict, options))


async def _send_options(session: Session, options: Mapping[str, Any]) -> None:
    from ackbone.admin.sending import send_all
    from ackbone.app import App

    app = App(session.config)
    count = options["count"] or 1
    sends = (_one(app, options) for _ in range(count))
    first = next(sends)  # refused before anything is opened
    async with app:
        _refuse_memory(app)
        answers = send_all(
            itertools.chain([first], sends),
            _publisher(app),
            timeout_s=app.config.send_timeout_s,
        )
        receipts = _Receipts(session, app, delay_s=options["delay"], one=count == 1)
        with session.out.progress("sending", count) as advance:
            async for answer in answers:
                receipts.add(answer)
                advance(1)
    receipts.finish()


def _one(app: App, options: Mapping[str, Any]) -> Send:
    named = {
        "id": "id",
        "idempotency_key": "idempotency_key",
        "ordering_key": "ordering_key",
        "correlation_id": "correlation_id",
        "priority": "priority",
        "delay_s": "delay",
        "ttl_s": "ttl",
        "tenant_id": "tenant",
    }
    fields = {field: options[name] for field, name in named.items() if options[name] is not None}
    if options["header"]:
        fields["headers"] = dict(options["header"])
    fields["source"] = "cli"
    return app.outgoing(options["type_"], options["payload"], queue=options["queue"], **fields)


async def _send_file(
    session: Session, stream: BinaryIO, size: int | None, strict: bool, options: Mapping[str, Any]
) -> None:
    from ackbone.admin.sending import Defaults, lines_of, send_lines
    from ackbone.app import App

    app = App(session.config)
    defaults = Defaults(
        type=options["type_"],
        tenant_id=options["tenant"],
        priority=options["priority"],
        headers=dict(options["header"]),
    )
    encode = _line_encoder(app, options)
    limit = 4 * app.config.max_message_bytes
    with contextlib.ExitStack() as stack:
        if strict:
            stream = stack.enter_context(_rewindable(stream))
            _check_all(session, stream, limit, defaults, encode)
            stream.seek(0)
        receipts = _Receipts(session, app, delay_s=options["delay"])
        async with app:
            _refuse_memory(app)
            read = _Counted(stream)
            with session.out.progress("sending (bytes)", size) as advance:
                async for answer in send_lines(
                    lines_of(read, limit=limit),
                    defaults,
                    encode,
                    _publisher(app),
                    timeout_s=app.config.send_timeout_s,
                ):
                    receipts.add(answer)
                    advance(read.taken())
    receipts.finish()


def _publisher(app: App) -> Publish:
    """Return the function that publishes a batch.

    A broker without delays does not get messages that are not due yet: the store holds them.
    """

    async def publish(queue: str, batch: Sequence[Send]) -> Sequence[Result]:
        if not _kept_by_the_store(
            app, queue, batch[0].outgoing.delay_s
        ):  # --delay: the same for all
            return await app.brokers.of(queue).publish(queue, [send.outgoing for send in batch])
        for send in batch:
            await app.store.hold_back(send)
        return [Result(id=send.outgoing.id) for send in batch]

    return publish


def _kept_by_the_store(app: App, queue: str, delay_s: float) -> bool:
    return delay_s > 0 and not app.brokers.of(queue).capabilities.delay


def _line_encoder(app: App, options: Mapping[str, Any]) -> Callable[[Message], Send]:
    transport = {
        name: options[option]
        for name, option in (("delay_s", "delay"), ("ttl_s", "ttl"))
        if options[option] is not None
    }
    encode = encoder(app, **transport)
    return lambda message: encode(message, options["queue"] or app.config.default_queue)


def _check_all(
    session: Session,
    stream: BinaryIO,
    limit: int,
    defaults: Defaults,
    encode: Callable[[Message], Send],
) -> None:
    """Check every line for --strict, and end the command if one is invalid."""
    from ackbone.admin.sending import check_lines, lines_of

    wrong = 0
    for answer in check_lines(lines_of(stream, limit=limit), defaults, encode):
        if answer.error is not None:
            wrong += 1
            _refused(session, answer)
    if wrong:
        session.out.say(f"nothing was sent: {wrong} invalid {_lines(wrong)}")
        stop(Exit.FAILURE)


class _Receipts:
    """Counts the answers, prints each one, and ends the command with the total."""

    def __init__(
        self, session: Session, app: App, *, delay_s: float | None, one: bool = False
    ) -> None:
        self._session = session
        self._app = app
        self._delay_s = delay_s or 0.0
        self._one = one
        self._sent = 0
        self._refused = 0
        self._stopped: Answer | None = None

    def add(self, answer: Answer) -> None:
        if answer.stops:
            self._stopped = answer
        elif answer.error is not None:
            self._refused += 1
            _refused(self._session, answer)
        else:
            self._sent += 1
            queue = answer.queue or self._app.config.default_queue
            durability = self._app.brokers.of(queue).capabilities.durability
            if _kept_by_the_store(self._app, queue, self._delay_s):
                durability = Durability.FSYNC
            receipt = {
                "id": answer.id,
                "queue": answer.queue,
                "durability": durability,
                "line": answer.line,
            }
            self._session.out.data(receipt, answer.id if self._one else None)

    def finish(self) -> None:
        """Print the total and end the command with its exit code."""
        out = self._session.out
        if self._stopped is not None and self._stopped.error is not None:
            self._say_stopped(self._stopped, self._stopped.error)
            stop(exit_code(self._stopped.error))
        if not self._one:
            rest = f", refused {self._refused}" if self._refused else ""
            out.line(f"sent {self._sent}{rest}")
        if self._refused:
            stop(Exit.PARTIAL if self._sent else Exit.FAILURE)

    def _say_stopped(self, answer: Answer, error: AckboneError) -> None:
        text = f"{error}."
        if not self._one:
            text = (
                f"stopped at line {answer.line}: {error}. {self._sent} messages before it were "
                f"sent; to continue: tail -n +{answer.line} FILE | ackbone send --file -"
            )
        self._session.out.say(f"ackbone: {text}")


def _refused(session: Session, answer: Answer) -> None:
    session.out.say(f"line {answer.line}: {safe(answer.error)}")


def _refuse_memory(app: App) -> None:
    if any(each.kind.name == "memory" for each in app.config.endpoints.values()):
        raise BrokerUnavailable(
            "the broker is memory://, which no other process can reach; "
            "write broker: sqlite to send from another process"
        )


class _Counted:
    """A file that counts the bytes read since the last call of `taken`."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._new = 0

    def readline(self, size: int, /) -> bytes:
        text = self._stream.readline(size)
        self._new += len(text)
        return text

    def taken(self) -> int:
        count, self._new = self._new, 0
        return count


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


def _lines(count: int) -> str:
    return "line" if count == 1 else "lines"
