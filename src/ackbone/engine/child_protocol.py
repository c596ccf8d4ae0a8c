"""The protocol between a worker and the child process of an isolated handler.

Frames are msgpack behind a length, over a socket pair. There is no pickle: an error is sent as its
class names, its text and plain values, and built again from classes that this side has imported.
"""

from __future__ import annotations

import asyncio
import builtins
import struct
import sys
from typing import Any, get_args

import msgspec

from ackbone.core import errors
from ackbone.core.codecs.values import result_bytes
from ackbone.core.errors import AckboneError, HandlerFailed
from ackbone.core.outcome import Outcome
from ackbone.core.store import Reply, Run, Send, Usage

from .tracebacks import carry, user_trace

_LENGTH = struct.Struct("<I")
_PLAIN = (str, int, float, bool, bytes, type(None))
_OUTCOMES: dict[str, Any] = {kind.__name__: kind for kind in get_args(Outcome)}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An error as plain values: enough to decide about a retry as if it had been raised here."""

    classes: list[tuple[str, str]]
    """(module, name) of its class and of every base, the nearest first."""
    text: str
    arguments: list[Any] | None = None
    fields: dict[str, Any] = {}
    trace: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The child has loaded the app, or reports why it cannot."""

    problem: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Run this message's handler."""

    run: Run
    content: bytes
    """Payload, metadata and extra as JSON, because msgpack limits whole numbers."""


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """Replies, follow-ups and usage, to be committed with the run."""

    replies: list[Reply] = []
    sends: list[Send] = []
    usage: Usage | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """A write before the run's end: the worker makes it, under the run's token, and answers."""

    call: int
    what: str
    name: str = ""
    value: bytes = b""
    data: dict[str, Any] = {}
    reply: Reply | None = None
    n: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The worker's answer to an `Ask`."""

    call: int
    value: Any = None
    fault: Fault | None = None


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag="returned"):
    """The handler returned: a result as JSON, or an outcome by its name."""

    result: bytes | None = None
    outcome: str = ""


class Raised(msgspec.Struct, frozen=True, kw_only=True, tag="raised"):
    """The handler raised."""

    fault: Fault


FromChild = Hello | Kept | Ask | Returned | Raised
ToChild = Start | Answer

_encode = msgspec.msgpack.Encoder().encode
_from_child = msgspec.msgpack.Decoder(FromChild)
_to_child = msgspec.msgpack.Decoder(ToChild)


def packed(frame: FromChild | ToChild) -> bytes:
    """A frame as bytes, its length in front."""
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


async def read_from_child(reader: asyncio.StreamReader) -> FromChild:
    """Raises asyncio.IncompleteReadError when the child is gone."""
    frame: FromChild = _from_child.decode(await _read(reader))
    return frame


async def read_to_child(reader: asyncio.StreamReader) -> ToChild:
    """Raises asyncio.IncompleteReadError when the worker is gone."""
    frame: ToChild = _to_child.decode(await _read(reader))
    return frame


async def _read(reader: asyncio.StreamReader) -> bytes:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(size)


# -- runs ------------------------------------------------------------------------------------------


def start(run: Run) -> Start:
    """A run as a frame. The broker's copy and the stored body stay with the worker."""
    message = run.message
    payload = None if isinstance(message.payload, bytes) else message.payload
    content = msgspec.json.encode([payload, message.metadata, message.extra])
    bare = msgspec.structs.replace(
        message, payload=None if payload is not None else message.payload, metadata={}, extra={}
    )
    return Start(
        run=msgspec.structs.replace(run, message=bare, delivery=None, body=b""), content=content
    )


def run_of(frame: Start) -> Run:
    """The run that the frame carries."""
    payload, metadata, extra = msgspec.json.decode(frame.content)
    bare = frame.run.message
    message = msgspec.structs.replace(
        bare,
        payload=bare.payload if payload is None else payload,
        metadata=metadata,
        extra=extra,
    )
    return msgspec.structs.replace(frame.run, message=message)


# -- results --------------------------------------------------------------------------------------


def returned(result: Any) -> Returned:
    """Return the frame of a handler's result. Raises InvalidResult if JSON cannot carry it."""
    kind = type(result).__name__
    if _OUTCOMES.get(kind) is not type(result):
        return Returned(result=result_bytes(result))
    return Returned(result=result_bytes(result), outcome=kind)


def result_of(frame: Returned) -> Any:
    """The result or the outcome that the frame carries."""
    value = msgspec.json.decode(frame.result or b"null")
    if frame.outcome:
        return msgspec.convert(value, _OUTCOMES[frame.outcome])
    return value


# -- errors ---------------------------------------------------------------------------------------


def fault_of(error: BaseException) -> Fault:
    """An error as plain values."""
    arguments = list(error.args)
    try:
        text = str(error)
    except Exception:  # its __str__ fails
        text = ""
    return Fault(
        classes=[(kind.__module__, kind.__qualname__) for kind in type(error).__mro__[:-1]],
        text=_clean(text),
        arguments=arguments if all(_is_plain(value) for value in arguments) else None,
        fields={
            name: value
            for name, value in vars(error).items()
            if _is_plain(value) and not name.startswith("__")
        },
        trace=_clean(user_trace(error)),
    )


def error_of(fault: Fault) -> Exception:
    """Return the error, of its own class if that is known here, else of the nearest known base."""
    for at, (module, name) in enumerate(fault.classes):
        kind = _class_of(module, name)
        if kind is None:
            continue
        if at > 0:
            # Its own class is not known here: make one of that name below the known base.
            base = HandlerFailed if kind in (Exception, AckboneError) else kind
            kind = type(fault.classes[0][1].rpartition(".")[2], (base,), {})
        error = _made(kind, fault)
        if fault.trace:
            carry(error, fault.trace)
        return error
    return HandlerFailed(fault.text)


def _class_of(module: str, name: str) -> type[Exception] | None:
    """Return a class that is imported already. Nothing is imported for an error."""
    home: Any = {"builtins": builtins, errors.__name__: errors}.get(module, sys.modules.get(module))
    for part in name.split("."):
        home = getattr(home, part, None)
    if isinstance(home, type) and issubclass(home, Exception):
        return home
    return None


def _made(kind: type[Exception], fault: Fault) -> Exception:
    """Make the error without its `__init__`, whose parameters are not known."""
    arguments = fault.arguments if fault.arguments is not None else [fault.text]
    try:
        error = kind.__new__(kind, *arguments)
        error.args = tuple(arguments)
        vars(error).update(fault.fields)
        known = str(error) == fault.text
    except Exception:
        known = False
    if known:
        return error
    name = fault.classes[0][1].rpartition(".")[2]
    plain: type[Exception] = type(name, (kind,), {"__init__": _bare, "__str__": _said})
    try:
        error = plain.__new__(plain)
    except TypeError:  # a class that needs arguments, as exception groups do
        error = type(name, (HandlerFailed,), {"__str__": _said})()
    vars(error).update(fault.fields, said=fault.text)
    return error


def _bare(self: Exception, *_: object) -> None:
    """Set up nothing: the fields are copied."""


def _said(self: Any) -> str:
    return str(self.said)


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return _clean(value) == value
    if isinstance(value, int) and not isinstance(value, bool):
        return -(2**63) <= value < 2**63
    return isinstance(value, _PLAIN)


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
