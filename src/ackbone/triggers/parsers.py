"""Parsers: what a message's body is read as. They read exactly what the engine's codecs read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ackbone.core.errors import DecodeError, ParseError
from ackbone.core.json_text import loads


class MessageParser(ABC):
    """Reads one form of body."""

    @abstractmethod
    def parse(self, body: bytes) -> Any:
        """The body's value. Raises ParseError, and nothing else, for bytes it cannot read."""


class JSONParser(MessageParser):
    """Any JSON value; refuses NaN, endless nesting and numbers that would change."""

    def parse(self, body: bytes) -> Any:
        try:
            return loads(body)
        except DecodeError as error:
            raise ParseError(f"Failed to parse JSON: {error}") from None


class TextParser(MessageParser):
    """UTF-8 text."""

    def parse(self, body: bytes) -> str:
        try:
            return body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ParseError(f"Failed to decode text: {error}") from None


class BinaryParser(MessageParser):
    """The bytes as they are."""

    def parse(self, body: bytes) -> bytes:
        return body


def parser_for(parser_type: str) -> MessageParser:
    """The parser of a `parser_type`, which is also the name of the engine's codec."""
    return _PARSERS[parser_type]


_PARSERS: dict[str, MessageParser] = {
    "json": JSONParser(),
    "text": TextParser(),
    "binary": BinaryParser(),
}
