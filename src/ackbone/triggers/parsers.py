"""Parsers of message bodies. They accept exactly what the engine's codecs accept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ackbone.core.codecs.json_text import loads
from ackbone.core.errors import DecodeError, ParseError


class MessageParser(ABC):
    """Reads one kind of body."""

    @abstractmethod
    def parse(self, body: bytes) -> Any:
        """Return the body's value. Raises ParseError, and nothing else, for other bytes."""


class JSONParser(MessageParser):
    """Any JSON value, except NaN, deep nesting and numbers that would change."""

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
    """The unchanged bytes."""

    def parse(self, body: bytes) -> bytes:
        return body


def parser_for(parser_type: str) -> MessageParser:
    """Return the parser for a `parser_type`, which is also the name of the engine's codec."""
    return _PARSERS[parser_type]


_PARSERS: dict[str, MessageParser] = {
    "json": JSONParser(),
    "text": TextParser(),
    "binary": BinaryParser(),
}
