"""A reply as an e-mail. No text in it can add a header or a recipient."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import getaddresses, localtime

import msgspec

from ackbone.core.errors import FinalError
from ackbone.core.outbound.delivery import Outbound
from ackbone.core.text import one_line

from .reply_text import options_of

_POLICY = SMTP.clone(cte_type="7bit")  # not every server accepts eight bits
_ADDRESS = re.compile(r"[^\s@<>,;:\"\\()\[\]]{1,64}@[A-Za-z0-9._-]{1,255}", re.ASCII)
_BREAKS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_PLAIN_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_SUBJECT_LENGTH = 100
NO_SUBJECT = "(no subject)"


class Options(msgspec.Struct, frozen=True):
    """The options of a reply."""

    subject: str | None = None
    html: str | None = None
    """Sent together with the text, for mail programs that show HTML."""
    in_reply_to: str | None = None
    references: Sequence[str] = ()
    reply_to: str | None = None


def addresses_of(text: str, *, what: str) -> list[Address]:
    """Return the addresses of a text with commas. Raises FinalError if one of them is invalid."""
    _one_line(text, what)
    found = []
    for name, address in getaddresses([text]):
        if not _ADDRESS.fullmatch(address) or not address.isascii():
            raise FinalError(f"e-mail: {what} {text!r:.80} is not an address")
        try:
            found.append(Address(name, addr_spec=address))
        except (ValueError, MessageError):  # for example two dots in a row
            raise FinalError(f"e-mail: {what} {text!r:.80} is not an address") from None
    if not found:
        raise FinalError(f"e-mail: {what} is empty")
    return found


def message_for(reply: Outbound, sender: Address) -> EmailMessage:
    """Return the message, with the same id on every attempt: a mail program shows it once."""
    options = options_of(reply, Options, "e-mail")
    message = EmailMessage(policy=_POLICY)
    message["From"] = sender
    message["To"] = addresses_of(reply.recipient, what="the recipient")
    message["Subject"] = _subject(reply, options)
    message["Date"] = localtime()
    message["Message-ID"] = message_id(reply.id, sender.domain)
    message["Auto-Submitted"] = "auto-generated"  # absence notes do not answer those
    if options.in_reply_to is not None:
        message["In-Reply-To"] = _one_line(options.in_reply_to, "in_reply_to")
    earlier = options.references or ([options.in_reply_to] if options.in_reply_to else [])
    if earlier:
        message["References"] = " ".join(_one_line(item, "references") for item in earlier)
    if options.reply_to is not None:
        message["Reply-To"] = addresses_of(options.reply_to, what="reply_to")
    message.set_content(reply.content)
    if options.html is not None:
        message.add_alternative(options.html, subtype="html")
    return message


def message_id(reply_id: str, domain: str) -> str:
    name = reply_id
    if not _PLAIN_ID.fullmatch(name):
        name = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"<ackbone.{name}@{domain}>"


def _subject(reply: Outbound, options: Options) -> str:
    if options.subject is not None:
        return _one_line(options.subject, "subject")
    first = next((line for line in reply.content.splitlines() if line.strip()), NO_SUBJECT)
    return one_line(first.strip())[:_SUBJECT_LENGTH]


def _one_line(text: str, what: str) -> str:
    """Return the text. Raises FinalError for a line break: it would begin another header."""
    if _BREAKS.search(text):
        raise FinalError(f"e-mail: {what} has a line break or another control character in it")
    return text
