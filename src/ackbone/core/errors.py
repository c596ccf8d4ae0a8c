"""Every error ackbone raises, as one tree.

AckboneError
├── ConfigError                ackbone.yaml or the environment is wrong (all mistakes at once)
├── AppNotLoaded               the module of an app raised while it was loaded
├── InvalidMessage             refused at send: nothing was accepted
│   └── MessageTooLarge
├── DecodeError                bytes that are no message; the message goes to dead letters
│   └── ParseError             a trigger's body that its parser cannot read
├── BrokerError
│   ├── BrokerUnavailable      the transport is away; try again
│   │   └── BrokerDenied       it refuses the login, or has no such database
│   └── PublishUnknown         the deadline passed before the answer; repeat with the same id
├── StoreError
│   ├── StoreUnavailable       busy, gone or full: nothing was written
│   │   ├── StoreFull
│   │   └── StoreDenied        it refuses the login, or has no such database
│   ├── StoreCorrupt           bytes on disk are not what was written
│   ├── SchemaMismatch         the database is older or newer than this program
│   ├── NotFound               no such message, dead letter, parked task
│   └── Conflict               it is there, but not in the state that this needs
│       └── Ambiguous          the name fits several
├── LeaseLost                  this worker was declared dead; its runs may not commit
├── HandlerFailed              what a run ends with when no exception of the user's says it better
│   ├── HandlerTimeout
│   └── HandlerCrashed         an isolated handler's process died
├── EffectUnknown              `ctx.once`: the effect may or may not have happened
└── raised by handlers to say what should happen
    ├── RetryableError         try again (`retry_after_s` if the upstream said when)
    │   ├── TemporaryError
    │   │   └── NotDone        by the function of `ctx.once`: the effect did not happen
    │   ├── RateLimited        by channels: not now; that costs a reply no attempt
    │   └── SendUnknown        by channels: no answer came; the reply may have arrived
    ├── FinalError             never retried
    │   ├── ValidationError
    │   ├── InvalidResult      what the handler returned cannot be written as JSON
    │   ├── AuthorizationError
    │   └── NotFoundError
    └── ParkMessage            set aside, with a reason, until a person or a handler resumes it
"""

from __future__ import annotations

from collections.abc import Sequence


class AckboneError(Exception):
    """Base of all errors of ackbone."""


class AppNotLoaded(AckboneError):
    """The module that an app is defined in raised; where, stands in the text."""


class ConfigError(AckboneError):
    """The configuration is wrong; `problems` lists every mistake with its path and a hint."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class InvalidMessage(AckboneError):
    """The message cannot be sent as it is. Nothing was accepted."""


class MessageTooLarge(InvalidMessage):
    """The encoded message is above `max_message_bytes` or above what the broker takes."""


class DecodeError(AckboneError):
    """The bytes are no message of the subscription's codec."""


class ParseError(DecodeError):
    """The body of a queue message is not what the trigger's parser reads."""


class BrokerError(AckboneError):
    """The broker said no."""


class BrokerUnavailable(BrokerError):
    """The broker cannot be reached; nothing was accepted."""


class BrokerDenied(BrokerUnavailable):
    """The broker answers and refuses: a wrong password, user or database. `run` gives up at start;
    a worker that is running tries on, because the password may be about to change."""


class PublishUnknown(BrokerError):
    """The deadline passed before the broker answered. Sending again with the same id is safe."""

    def __init__(self, message_ids: Sequence[str], detail: str) -> None:
        self.message_ids = list(message_ids)
        super().__init__(
            f"{detail}; it is not known whether {', '.join(self.message_ids[:3])} was stored. "
            "Send it again with the same id: a second copy does no harm."
        )


class StoreError(AckboneError):
    """The store said no."""


class StoreUnavailable(StoreError):
    """The store cannot be written just now; nothing was changed."""


class StoreFull(StoreUnavailable):
    """No room on the disk; nothing was changed. Goes on by itself once there is room."""


class StoreDenied(StoreUnavailable):
    """The database server answers and refuses: a wrong password, user or database. `run` gives up
    at start; a worker that is running tries on, because the password may be about to change."""


class StoreCorrupt(StoreError):
    """Bytes on disk are not the ones that were written."""


class SchemaMismatch(StoreError):
    """The database's schema is not the one this program knows."""


class NotFound(StoreError):
    """No such thing in the store."""


class Conflict(StoreError):
    """The thing is not in the state that this needs (replayed before, not parked any more)."""


class Ambiguous(Conflict):
    """A short name fits several things; `matches` lists them."""

    def __init__(self, text: str, matches: Sequence[str]) -> None:
        self.matches = list(matches)
        super().__init__(text)


class LeaseLost(AckboneError):
    """This worker was declared dead; what it still runs can no longer commit."""


class HandlerFailed(AckboneError):
    """A run ended without a result."""


class HandlerTimeout(HandlerFailed):
    """The handler ran past its `timeout_s`."""


class HandlerCrashed(HandlerFailed):
    """The process of an isolated handler died (exit, signal); counts against the crash budget."""


class EffectUnknown(AckboneError):
    """A guarded effect was begun by an earlier attempt and its result was never recorded."""

    def __init__(self, name: str, error: str | None = None) -> None:
        """`error`: what its function raised; None: the attempt ended while it ran."""
        self.name = name
        self.error = error
        what = "was begun by an attempt that ended before its result was recorded"
        super().__init__(
            # Stores find such messages by the words up to the name: KNOWN_EFFECT.
            f"effect {name!r} {what if error is None else f'raised {error}'}; "
            "it may or may not have happened. Look, then resume or discard the message."
        )


class RetryableError(AckboneError):
    """Raised by a handler: this attempt failed, another one may succeed."""

    def __init__(self, *args: object, retry_after_s: float | None = None) -> None:
        super().__init__(*args)
        self.retry_after_s = retry_after_s


class TemporaryError(RetryableError):
    """A passing fault of something upstream."""


class NotDone(TemporaryError):
    """Raised by the function of `ctx.once`: the effect did not happen. A later attempt calls the
    function again."""


class RateLimited(RetryableError):
    """Raised by a channel: it takes nothing before `retry_after_s`. A reply loses no attempt."""

    def __init__(
        self,
        *args: object,
        retry_after_s: float | None = None,
        whole_channel: bool = False,
    ) -> None:
        """`whole_channel`: that goes for everything it sends, not for this one place."""
        super().__init__(*args, retry_after_s=retry_after_s)
        self.whole_channel = whole_channel


class SendUnknown(RetryableError):
    """Raised by a channel: the reply went out and no answer came. It may have arrived."""


class FinalError(AckboneError):
    """Raised by a handler: no further attempt can succeed."""


class ValidationError(FinalError):
    """The message's content is wrong."""


class InvalidResult(FinalError):
    """The handler returned something that cannot be written as JSON. Another attempt would return
    it again, so the message becomes a dead letter."""


class AuthorizationError(FinalError):
    """The message asks for something that it may not have."""


class NotFoundError(FinalError):
    """The message names something that does not exist."""


class ParkMessage(AckboneError):
    """Raised by a handler: keep the message aside under `kind` until it is resumed."""

    def __init__(self, reason: str, *, kind: str = "workflow_pending") -> None:
        super().__init__(reason)
        self.kind = kind
