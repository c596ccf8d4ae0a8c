"""Every error ackbone raises, as one tree.

AckboneError
├── ConfigError                ackbone.yaml or the environment is wrong (all mistakes at once)
├── AppNotLoaded               the app's module raised while it was loaded
├── InvalidMessage             refused at send: nothing was accepted
│   └── MessageTooLarge
├── DecodeError                the bytes are not a valid message; they become a dead letter
│   └── ParseError             a trigger's body that its parser cannot read
├── BrokerError
│   ├── BrokerUnavailable      the broker cannot be reached; try again
│   │   └── BrokerDenied       the broker refuses the login or the database
│   └── PublishUnknown         the deadline passed before the answer; repeat with the same id
├── StoreError
│   ├── StoreUnavailable       busy, unreachable or full: nothing was written
│   │   ├── StoreFull
│   │   └── StoreDenied        the server refuses the login or the database
│   ├── StoreCorrupt           bytes on disk are not what was written
│   ├── SchemaMismatch         the database is older or newer than this program
│   ├── NotFound               no message, dead letter or parked task has this id
│   └── Conflict               it exists, but is not in the required state
│       └── Ambiguous          a short id matches several
├── LeaseLost                  this worker was declared dead; its runs may not commit
├── HandlerFailed              a run ended without a result and without an error of its own
│   ├── HandlerTimeout
│   └── HandlerCrashed         an isolated handler's process died
├── EffectUnknown              `ctx.once`: the effect may or may not have happened
└── raised by handlers to say what should happen
    ├── RetryableError         try again (`retry_after_s` if the upstream said when)
    │   ├── TemporaryError
    │   │   └── NotDone        by the function of `ctx.once`: the effect did not happen
    │   ├── RateLimited        by channels: wait; no attempt is used up
    │   └── SendUnknown        by channels: no answer came; the reply may have arrived
    ├── FinalError             never retried
    │   ├── ValidationError
    │   ├── InvalidResult      the handler's result cannot be written as JSON
    │   ├── AuthorizationError
    │   └── NotFoundError
    └── ParkMessage            park the message until something or someone resumes it
"""

from __future__ import annotations

import socket
from collections.abc import Sequence


class AckboneError(Exception):
    """Base of all errors of ackbone."""


class AppNotLoaded(AckboneError):
    """The module that defines an app raised while it was loaded. The text says where."""


class ConfigError(AckboneError):
    """The configuration is wrong. `problems` lists every mistake with its path and a hint."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class InvalidMessage(AckboneError):
    """The message cannot be sent as it is. Nothing was accepted."""


class MessageTooLarge(InvalidMessage):
    """The encoded message is larger than `max_message_bytes` or the broker's own limit."""


class DecodeError(AckboneError):
    """The bytes are not a message in the subscription's wire form."""


class ParseError(DecodeError):
    """The trigger's parser cannot read the body of a queue message."""


class BrokerError(AckboneError):
    """The broker refused a request."""

    broker = "default"
    """Its name in the configuration, where the caller says it."""


class BrokerUnavailable(BrokerError):
    """The broker cannot be reached. Nothing was accepted."""


class BrokerDenied(BrokerUnavailable):
    """The broker refuses the login: a wrong password, user or database.

    `ackbone run` gives up at start. A running worker keeps trying, because somebody may be changing
    the password."""


class PublishUnknown(BrokerError):
    """The deadline passed before the broker answered. Sending again with the same id is safe."""

    def __init__(self, message_ids: Sequence[str], detail: str) -> None:
        self.message_ids = list(message_ids)
        self.detail = detail
        super().__init__(
            f"{detail}; it is not known whether {', '.join(self.message_ids[:3])} was stored. "
            "Send it again with the same id: a second copy does no harm."
        )


class StoreError(AckboneError):
    """The store refused a request."""


class StoreUnavailable(StoreError):
    """The store cannot be written at the moment. Nothing was changed."""

    hint: str | None = None
    """What the operator can do, if the text does not say it."""


class StoreFull(StoreUnavailable):
    """The disk is full. Nothing was changed. Work continues as soon as there is room."""


class StoreDenied(StoreUnavailable):
    """The database server refuses the login: a wrong password, user or database.

    `ackbone run` gives up at start. A running worker keeps trying, because somebody may be changing
    the password."""


class StoreCorrupt(StoreError):
    """The bytes on disk are not those that were written."""


class SchemaMismatch(StoreError):
    """The database has the schema of an older or newer version of ackbone."""


class NotFound(StoreError):
    """The store has no message, dead letter or parked task with this id."""


class Conflict(StoreError):
    """The message exists, but not in the required state: already replayed, no longer parked, …"""


class Ambiguous(Conflict):
    """A short id matches several messages. `matches` lists them."""

    def __init__(self, text: str, matches: Sequence[str]) -> None:
        self.matches = list(matches)
        super().__init__(text)


class LeaseLost(AckboneError):
    """This worker was declared dead. Its runs in progress cannot commit any more."""


class HandlerFailed(AckboneError):
    """A run ended without a result."""


class HandlerTimeout(HandlerFailed):
    """The handler ran past its `timeout_s`."""


class HandlerCrashed(HandlerFailed):
    """The process of an isolated handler died (exit, signal). It uses up crash budget."""


class EffectUnknown(AckboneError):
    """An earlier attempt began an effect of `ctx.once`, and its result was never recorded."""

    def __init__(self, name: str, error: str | None = None) -> None:
        """`error`: what the effect's function raised. None: the attempt ended while it ran."""
        self.name = name
        self.error = error
        what = "was begun by an attempt that ended before its result was recorded"
        super().__init__(
            # Stores find such messages by the words up to the name (KNOWN_EFFECT).
            f"effect {name!r} {what if error is None else f'raised {error}'}; "
            "it may or may not have happened. Look, then resume or discard the message."
        )


class RetryableError(AckboneError):
    """Raised by a handler: this attempt failed, but another one may succeed.

    `retry_after_s`: the upstream asked us to wait this many seconds."""

    def __init__(self, *args: object, retry_after_s: float | None = None) -> None:
        super().__init__(*args)
        self.retry_after_s = retry_after_s


class TemporaryError(RetryableError):
    """Raised by a handler: an upstream service has a passing fault."""


class NotDone(TemporaryError):
    """Raised by the function of `ctx.once`: the effect did not happen.

    A later attempt calls the function again."""


class RateLimited(RetryableError):
    """Raised by a channel: it accepts nothing for `retry_after_s` seconds.

    The reply waits, and no attempt is used up."""

    def __init__(
        self,
        *args: object,
        retry_after_s: float | None = None,
        whole_channel: bool = False,
    ) -> None:
        """`whole_channel`: this holds for all replies of the channel, not for one recipient."""
        super().__init__(*args, retry_after_s=retry_after_s)
        self.whole_channel = whole_channel


class SendUnknown(RetryableError):
    """Raised by a channel: the reply was sent and no answer came. It may have arrived."""


class FinalError(AckboneError):
    """Raised by a handler: no further attempt can succeed."""


class ValidationError(FinalError):
    """Raised by a handler: the message's content is wrong."""


class InvalidResult(FinalError):
    """The handler returned a value that cannot be written as JSON.

    Another attempt would return it again, so the message becomes a dead letter."""


class AuthorizationError(FinalError):
    """Raised by a handler: the message asks for something that it is not allowed to have."""


class NotFoundError(FinalError):
    """Raised by a handler: the message names something that does not exist."""


class ParkMessage(AckboneError):
    """Raised by a handler: park the message under `kind` until something or someone resumes it."""

    def __init__(self, reason: str, *, kind: str = "workflow_pending") -> None:
        super().__init__(reason)
        self.kind = kind


_NOT_DONE = (NotDone, ConnectionRefusedError, socket.gaierror)
_NO_CONNECTION = frozenset(
    {
        ("httpx", "ConnectError"),
        ("httpcore", "ConnectError"),
        ("aiohttp.client_exceptions", "ClientConnectorError"),
    }
)
"""Errors of HTTP clients that mean that no connection was made, by module and class name, because
these libraries need not be installed."""


def proves_not_done(error: BaseException) -> bool:
    """Return True if the error proves that the call never reached the other side.

    Such errors are a refused connection, a name that DNS does not know, and errors that were raised
    `from` one of them. An error that was raised while another one was handled proves nothing: the
    other one may belong to an earlier call, which did reach the other side.
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


def install_extra(extra: str) -> str:
    """Return the words of an error message that tell the user how to install an extra.

    The package is not on an index yet, so `pip install 'ackbone[redis]'` would find nothing.
    """
    return (
        f"install the extra {extra!r}; in a clone of ackbone: pip install -e '.[{extra}]', "
        f"with a wheel: pip install 'PATH/TO/FILE.whl[{extra}]'"
    )
