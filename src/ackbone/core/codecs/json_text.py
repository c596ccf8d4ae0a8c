"""JSON texts and plain values. Refused: deep nesting, huge numbers, NaN and invalid text."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ackbone.core.errors import DecodeError, InvalidMessage, InvalidResult

MAX_DEPTH = 64
_decode = msgspec.json.Decoder().decode
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ROUND = bytes.maketrans(b"[{]}", b"(())")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def json_value(value: Any) -> Any:
    """Return the JSON value of a pydantic model, which msgspec does not know.

    Models are recognized by their method, so that pydantic need not be installed. Raises TypeError
    for other objects.
    """
    dump = getattr(type(value), "model_dump", None)
    if not callable(dump):
        kind = type(value)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a JSON value")
    return dump(value, mode="json")


encode = msgspec.json.Encoder(enc_hook=json_value).encode
"""Writes values of users as JSON. Dataclasses, msgspec structs and pydantic models become objects.
Use `dumps` for a value that has not been checked."""
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def is_model(value: Any) -> bool:
    """Return True for an instance of a dataclass, a msgspec struct or a pydantic model."""
    if isinstance(value, type):
        return False
    return (
        isinstance(value, msgspec.Struct)
        or dataclasses.is_dataclass(value)
        or callable(getattr(type(value), "model_dump", None))
    )


def loads(body: bytes) -> Any:
    """Read JSON as a plain value. Raises DecodeError for deep nesting, huge numbers and bad
    text."""
    if not body:
        raise DecodeError("the body is empty, JSON was expected")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise DecodeError(f"JSON is nested deeper than {MAX_DEPTH} levels")
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DecodeError(f"not valid JSON: {error}") from None


def loads_text(text: str) -> Any:
    """As `loads`, for a text, without encoding it first."""
    if not text:
        raise DecodeError("the text is empty, JSON was expected")
    if text.count("[") + text.count("{") > MAX_DEPTH:
        return loads(text.encode("utf-8", "surrogatepass"))
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        raise DecodeError(f"not valid JSON: {error}") from None


def dumps(value: Any) -> bytes:
    """Write a value as JSON. Raises InvalidMessage if JSON would silently change it."""
    try:
        body = encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessage(f"the value cannot be written as JSON: {error}") from None
    if b"null" in body and has_non_finite(value):
        raise InvalidMessage(
            "the value contains NaN or an infinite number, which JSON cannot carry"
        )
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise InvalidMessage(f"the value is nested deeper than {MAX_DEPTH} levels")
    return body


def result_bytes(result: Any) -> bytes | None:
    """Write a handler's result as JSON. None stays None. Raises InvalidResult."""
    if result is None:
        return None
    try:
        return dumps(result)
    except InvalidMessage as error:
        raise InvalidResult(
            f"the handler returned a {type(result).__name__}, but {error}. Return None, a value of "
            "dicts, lists, texts, numbers and booleans, a dataclass, a msgspec struct or a "
            "pydantic model"
        ) from None


def hash_payload(payload: Any) -> bytes:
    """Return the SHA-256 of a payload. This also proves that the payload can be written again."""
    if isinstance(payload, bytes):
        return hashlib.sha256(payload).digest()
    try:
        return hashlib.sha256(_encode_sorted(payload)).digest()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DecodeError(f"the payload cannot be stored: {error}") from None


def has_non_finite(value: Any) -> bool:
    """Return True if the value contains NaN or an infinite number, which JSON does not have."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return True
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif isinstance(item, msgspec.Struct):
            stack.extend(msgspec.structs.asdict(item).values())
        elif dataclasses.is_dataclass(item):
            stack.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))
        elif is_model(item):
            stack.append(json_value(item))
    return False


def _depth(body: bytes) -> int:
    """Return the nesting depth of a JSON text. Brackets inside strings do not count."""
    left = _STRINGS.sub(b"", body).translate(_ROUND, _NO_BRACKETS)
    depth = 0
    while b"()" in left and depth <= MAX_DEPTH:  # the innermost pairs
        left = left.replace(b"()", b"")
        depth += 1
    return depth + left.count(b"(")
